"""Defines what a what-if is asked and what it answers.

A what-if replays recent arrivals, scaled to a forecast, through a model of a candidate pool. It
answers with the share of requests that would miss their objectives, and with the causes. Seconds
count from now, tokens are tokens of KV. The records know no forecast, no cluster and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, Literal

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Seconds
    from pdserve.messages.handoff import Disagg

__all__ = [
    "CAUSES",
    "MODES",
    "CandidatePool",
    "CandidateWorker",
    "Handoffs",
    "LatencyObjective",
    "MissCause",
    "Outcome",
    "PoolMode",
    "ReplayedRequest",
]

PoolMode = Literal["aggregated", "prefill", "decode", "both"]
MODES: Final[tuple[PoolMode, ...]] = PoolMode.__args__  # type: ignore[attr-defined]

MissCause = Literal["queue", "prefill", "handoff", "decode_admission", "decode"]
"""What took the most of a late request's time. `queue`: it waited to be computed, in a router, a
prefill queue or an engine. `prefill`: its own prompt, in steps that streams share. `handoff`: its
KV on the way. `decode_admission`: it waited for KV or a place where it decodes; more prefill
workers do not help. `decode`: its tokens came too slowly."""
CAUSES: Final[tuple[MissCause, ...]] = MissCause.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """What requests of one model are to keep; 0: no limit."""

    ttft: Seconds = 0.0
    """Longest time from arrival to the first token."""
    itl: Seconds = 0.0
    """Longest mean time between the tokens of one request."""
    idle_factor: float = 0.0
    """The first token may come this many times a prompt's own time later: its time on an idle
    worker with an empty cache. For objectives that depend on the prompt's length."""

    def validate(self) -> None:
        """Errors: `ConfigError` for limits that cannot be kept."""
        for name in ("ttft", "itl", "idle_factor"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(
                    f"the objective's {name} is {getattr(self, name)}: give seconds, or 0 for no "
                    "limit"
                )


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One request of the load that is replayed."""

    at: Seconds
    """Seconds after the first one's arrival."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that its worker finds in its cache."""
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateWorker:
    """One worker of a candidate pool, with what it does now."""

    mode: PoolMode = "aggregated"
    speed: float = 1.0
    """Factor by which it is slower than the latency model, as `ModelDemand.speeds`."""
    share: float = 0.0
    """Of mode `both`: the part of each step that other workers' prompts may take."""
    kv_tokens: int = 0
    """Size of its KV pool; 0: unknown, and then without a bound."""
    max_sequences: int = 256
    max_batch_tokens: int = 2048
    """Most tokens in a step."""
    ready: Seconds = 0.0
    """When it begins to serve; more than 0 for a worker that starts or switches."""
    leaves: Seconds = inf
    """When it takes nothing new any more. What it has it finishes."""
    streams: int = 0
    """Sequences that it decodes now."""
    stream_tokens: int = 0
    """Tokens of these sequences."""
    backlog: int = 0
    """Prompt tokens that it has to compute now."""
    price: float = 1.0
    """Cost of an hour."""


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """The workers of one model as they might be."""

    name: str
    """How plans call it, such as `stay` or `start 2 decode`."""
    workers: tuple[CandidateWorker, ...]
    cache_kept: float = 1.0
    """Share of the cached tokens that are still found: a worker that leaves takes its cache
    along."""
    held: int = 0
    """Requests that wait in routers now; they come first."""

    @property
    def cost(self) -> float:
        """Cost of an hour."""
        return sum(worker.price for worker in self.workers)

    def count(self) -> dict[PoolMode, int]:
        """Number of workers by mode; modes without a worker are left out."""
        found: dict[PoolMode, int] = {}
        for worker in self.workers:
            found[worker.mode] = found.get(worker.mode, 0) + 1
        return found


@dataclass(frozen=True, slots=True)
class Handoffs:
    """How decode workers hand prompts over, and how fast KV moves."""

    disagg: Disagg = "rule"
    """The rule of `worker.config.WorkerConfig.disagg`, also for the next two."""
    min_tokens: int = 512
    max_queue: int = 10
    latency: Seconds = 0.005
    """Seconds between the end of a remote prefill and its first token that do not depend on the
    prompt's length."""
    token: Seconds = 1e-6
    """Seconds to move a token's KV over a worker's link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a candidate pool would do to the load. Shares are of the requests that can keep their
    objective at all, and means over seeds."""

    pool: CandidatePool
    requests: int
    """Requests of the load that were counted, `unreachable` ones included."""
    unreachable: float
    """Share of all requests whose own prompt takes longer than the objective allows, even on an
    idle worker. They are in no other share: no worker more would help them."""
    miss: float
    """Share that misses any objective."""
    miss_ttft: float
    miss_itl: float
    spread: float
    """Largest difference of `miss` between two seeds."""
    causes: Mapping[MissCause, float] = field(default_factory=dict)
    """Share that misses by cause; they add up to `miss`."""
    busy: Mapping[PoolMode, float] = field(default_factory=dict)
    """How full the workers are, by mode, on average: the share of the time in which they compute
    prompts, or that of the sequences or the KV in use, whichever is more."""
    kv_used: Mapping[PoolMode, float] = field(default_factory=dict)
    """Largest share of a worker's KV that was in use, by mode."""
    ttft_p95: Seconds = 0.0
    wait_p95: float = 0.0
    """95 % of the requests wait for at most this part of the time that their own prompts leave of
    the TTFT objective; 0 without one."""
    itl_p95: Seconds = 0.0

    @property
    def cause(self) -> MissCause | None:
        """The most frequent cause; None if no request misses."""
        return max(self.causes, key=self.causes.__getitem__, default=None)
