"""What the planner's decisions need to know of demand and of the future, as records and ports.

The demand reader measures demand, the forecast continues it, and the what-if predicts what a pool
would make of it. Decisions see only the types here, so a test can put any demand and any prediction
before them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.planner.steady_load import Stretch

__all__ = [
    "DemandView",
    "Forecaster",
    "Horizon",
    "Judge",
    "Load",
    "PoolCandidate",
    "PoolOutcome",
    "QuantilesAt",
    "Slot",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandView:
    """The demand for one model, all routers together, as known at one moment. Work is prefill
    seconds at speed 1, cached tokens left out."""

    known: bool = True
    """False: no router's demand is known, or too little of it. No demand is known, too."""
    faults: str = ""
    """Whose demand is not known or only estimated, in words; empty: nobody's."""
    poor: bool = False
    """Predictions are wrong, or have not been learnt."""
    seen: Seconds = inf
    """For how long the demand has been seen, as far back as peaks are looked for."""
    first_tokens: int = 0
    """First tokens that were seen."""
    work: float = 0.0
    """Work per second of the newest complete bucket of 5 s."""
    level: float = 0.0
    """Mean work per second since the load last changed, of at most 300 s: `steady_load`."""
    rate: float = 0.0
    """Mean requests per second of the same time; 0: unknown, or none."""
    recent: tuple[Stretch, ...] = ()
    """The complete buckets of the last 60 s, the oldest first; the last one with what was reported
    since. Empty: only `level` is known."""
    request_work: Seconds = 0.0
    """Mean work of a request; 0: unknown."""
    request_spread: Seconds = 0.0
    """Sum of the squares of the requests' work over the sum of their work: what chance adds or
    takes as a whole. 0: unknown."""
    work_300: float = 0.0
    """Mean work per second of the last 300 s, or of as much as was seen."""
    peak_300: float = 0.0
    """Highest `level` of the last 300 s."""
    levels: tuple[tuple[Seconds, float], ...] = ()
    """The levels that it is the highest of, each with its age, the newest first; empty: they are
    not known one by one."""
    held: int = 0
    """Requests that wait in routers."""
    held_work: float = 0.0
    """Their work, in seconds."""
    held_wait: Seconds = 0.0
    """How long those have waited that have waited longest."""
    queued_work: float = 0.0
    """Work that waits at workers, in seconds."""
    missed: Mapping[str, int] = field(default_factory=dict)
    """Requests of the last 300 s that missed the objective, by cause (`observe.slo.CAUSES`)."""
    kept: int = 0
    """Those that kept it."""
    miss_share: float | None = None
    """Share that missed it of those judged in the last minute; None: too few were."""
    traffic: object = None
    """What the `Judge` replays: recent arrivals, lengths and learnt times. Decisions do not look
    into it."""

    def peak(self, seconds: Seconds) -> float:
        """Highest `level` of the last seconds, 300 at most."""
        known = [level for age, level in self.levels if age <= seconds]
        return max(self.level, *known) if known else max(self.level, self.peak_300)


class Slot(NamedTuple):
    """One worker of a candidate."""

    mode: str
    ready_in: Seconds = 0.0
    """Seconds until it serves; 0: it does."""
    speed: float = 1.0
    """Factor by which it is slower than the learnt times."""
    share: float = 0.0
    """With mode `both`: the share of a step for other workers' prompts."""
    kv_tokens: int = 0
    """KV that it can hold; 0: unknown."""
    max_sequences: int = 0
    """Sequences that it runs at once; 0: unknown."""
    streams: int = 0
    """Requests that it has now."""
    stream_tokens: int = 0
    """KV tokens of these."""
    waiting_tokens: int = 0
    """Prompt tokens that it has to compute now."""
    disagg: str = ""
    """How it decides where the prompts that it decodes are computed; empty: not said."""
    transfer_token: Seconds = 0.0
    """Seconds to move a token's KV, where no worker's paths have been measured; 0: unknown."""
    measured_token: Seconds = 0.0
    """The same, as measured; 0: it was not."""


@dataclass(frozen=True, slots=True)
class PoolCandidate:
    """A pool that might be."""

    slots: tuple[Slot, ...]


class Load(NamedTuple):
    """The load that candidates are judged by."""

    work: float
    """Work per second to which the recent arrivals are scaled."""
    backlog: float = 0.0
    """Work that waits at the beginning, in seconds."""
    cached: float = 1.0
    """Factor on the cached tokens of each arrival: fewer workers remember less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOutcome:
    """What a candidate would make of a load."""

    miss: float
    """Share of the requests that miss the objective, of those that could keep it."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """That share by cause."""
    wait_p95: float = 0.0
    """95 % of the requests wait for at most this part of the time that their own prompts leave of
    the TTFT objective. A prompt's own time is in no worker's power, so it is left out."""
    itl_p95: Seconds = 0.0
    utilisation: Mapping[str, float] = field(default_factory=dict)
    """Busy share of the workers by mode."""
    unreachable: float = 0.0
    """Share of all requests whose own prompt takes longer than the objective on an idle worker.
    `miss` leaves them out: no number of workers helps them."""


class Judge(Protocol):
    """Predicts outcomes, by replaying traffic."""

    def judge(
        self,
        traffic: object,
        objectives: tuple[Seconds | None, Seconds | None],
        load: Load,
        candidates: Sequence[PoolCandidate],
    ) -> Sequence[PoolOutcome]:
        """The outcome of each candidate. `objectives`: of the TTFT and of the ITL."""
        ...


class Horizon(NamedTuple):
    """Forecast work per second, by quantile."""

    p50: float
    p90: float
    p95: float


class QuantilesAt(Protocol):
    """A forecast with quantiles."""

    @property
    def p50(self) -> float: ...

    @property
    def p90(self) -> float: ...

    @property
    def p95(self) -> float: ...


class Forecaster(Protocol):
    """Continues one model's requests per second."""

    def observe(self, at: Seconds, value: float) -> None:
        """One more bucket."""
        ...

    def shifted(self) -> None:
        """The load has left the forecast: errors across that moment are not learnt."""
        ...

    def at(self, horizon: Seconds) -> QuantilesAt | None:
        """The forecast so far ahead; None: nothing was observed yet."""
        ...
