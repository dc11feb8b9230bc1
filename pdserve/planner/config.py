"""Configuration of a planner: its pace, its limits, and what each model must keep.

`validate` refuses what cannot work, above all limits that would leave a model without a worker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Kind

__all__ = [
    "MODES",
    "MOST_WORKERS",
    "Floor",
    "PlannerConfig",
    "PlannerMode",
    "PoolConfig",
    "WorkerModeName",
]

PlannerMode = Literal["off", "advise", "act"]
WorkerModeName = Literal["aggregated", "prefill", "decode", "both"]
MODES: Final[tuple[WorkerModeName, ...]] = ("aggregated", "prefill", "decode", "both")
MOST_WORKERS: Final = 10_000
"""Most workers that a pool may have."""
_DAY: Final = 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Fewest workers of a model on some days, for some hours."""

    days: frozenset[int] = frozenset(range(7))
    """Weekdays on which it begins, Monday is 0."""
    begin: Seconds = 0.0
    """Seconds after midnight, on the zone's clock."""
    end: Seconds = 86400.0
    """The same; before `begin`: it lasts until the next day."""
    zone: str = "UTC"
    """IANA name of a time zone."""
    min: int = 1

    def holds(self, unix: float) -> bool:
        """True if it holds at this moment, in Unix seconds."""
        local = datetime.fromtimestamp(unix, _zone(self.zone))
        second = local.hour * 3600 + local.minute * 60 + local.second
        if self.begin < self.end:
            return local.weekday() in self.days and self.begin <= second < self.end
        if second >= self.begin:
            return local.weekday() in self.days
        return second < self.end and (local.weekday() - 1) % 7 in self.days

    def problem(self) -> str:
        """Why it cannot work, with the remedy; empty: it can."""
        if self.min < 1:
            return "min must be at least 1: leave the floor out to have none"
        if not self.days or not self.days <= frozenset(range(7)):
            return "days must be weekdays, at least one"
        if not 0 <= self.begin < _DAY or not 0 <= self.end <= _DAY or self.begin == self.end:
            return "from and to must be different times of a day"
        try:
            _zone(self.zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            return f"zone {self.zone!r} is not known here: use an IANA name, or install tzdata"
        return ""


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """What one model must keep, and the workers that it may have."""

    model: str
    ttft: Seconds | None = None
    """Objective of the time to the first token; None: none."""
    itl: Seconds | None = None
    """Objective of a request's mean inter-token latency; None: none."""
    share: float = 0.95
    """Share of the requests that must keep both."""
    kinds: tuple[str, ...] = ()
    """Kinds of workers that may be started, the preferred one first. Empty: all, if this is the
    only pool; else none, because a kind starts workers of one model."""
    modes: tuple[WorkerModeName, ...] = ()
    """Modes that its workers may be switched to and started in; empty: those that they have."""
    min: int = 1
    """Fewest workers. At least 1: a start takes minutes, and until then every request would fail,
    so a model that is offered keeps one worker."""
    max: int = 64
    """Most workers, those that are being started included."""
    floors: tuple[Floor, ...] = ()
    """More workers at some times; the largest that holds counts."""

    def floor(self, unix: float) -> int:
        """Fewest workers at this moment, in Unix seconds; never above `max`."""
        holding = [one.min for one in self.floors if one.holds(unix)]
        return min(self.max, max([self.min, *holding]))

    @property
    def allowed_miss(self) -> float:
        """Share of the requests that may miss the objective."""
        return 1.0 - self.share

    def problem(self) -> str:
        """Why it cannot work, with the remedy; empty: it can."""
        return self._objective_problem() or self._size_problem() or self._list_problem()

    def _objective_problem(self) -> str:
        if not self.model:
            return "model is missing: name the model of the pool"
        for name in ("ttft", "itl"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < 1e6:
                return (
                    f"slo-{name} must be more than 0 and less than 1e6 seconds: leave it out to "
                    "have no objective"
                )
        if not 0 < self.share < 1:
            return "share must be between 0 and 1, as 0.95: no pool keeps every request in time"
        return ""

    def _size_problem(self) -> str:
        if self.min < 1:
            return (
                "min must be at least 1: a start takes minutes, in which every request would fail; "
                "take the pool out to serve the model no more"
            )
        if self.max > MOST_WORKERS:
            return f"max ({self.max}) is above {MOST_WORKERS}: lower it"
        if self.max < self.min:
            return f"max ({self.max}) is below min ({self.min}): raise max"
        high = max((one.min for one in self.floors), default=0)
        if high > self.max:
            return f"a floor ({high}) is above max ({self.max}): raise max"
        return ""

    def _list_problem(self) -> str:
        if unknown := [mode for mode in self.modes if mode not in MODES]:
            return f"mode {unknown[0]!r} is not known: use {', '.join(MODES)}"
        takes = {"aggregated", "decode", "both"} & {*self.modes}
        if self.modes and not takes:
            return "modes has none that takes requests: add aggregated, decode or both"
        if self.modes and "prefill" in self.modes and "decode" not in self.modes:
            return "modes has prefill without decode: only decode workers use prefill workers"
        return next((f"floor: {why}" for one in self.floors if (why := one.problem())), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """Settings of one planner. Planners of a cluster should have the same."""

    mode: PlannerMode = "off"
    """`off`; `advise`: plans, and changes nothing; `act`."""
    pools: tuple[PoolConfig, ...] = ()
    """The models that it plans for; it touches no workers of other models."""
    budget: float = 0.0
    """Most that all workers may cost in an hour, in the unit of the kinds' prices; those that are
    being started count. 0: no bound."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price of a worker for an hour by kind, where the operator names one; else the actuator's."""
    tick: Seconds = 5.0
    """Interval of decisions that add capacity: a step of the load is seen in two."""
    slow_tick: Seconds = 60.0
    """Interval of decisions that take capacity away or change the mix."""
    stable: Seconds = 300.0
    """Longest time for which capacity is kept after a load; before it is removed, the demand must
    have been seen for as long. Where start-ups are short, `break_even` ends it sooner."""
    dwell: Seconds = 90.0
    """A worker keeps its mode at least so long: a switch costs a few seconds of service."""
    switches_per_hour: int = 4
    """Most mode switches of one worker in an hour."""
    reversal_ticks: int = 3
    """Slow ticks in a row that must want a model's last switch back before it is done."""
    reversal_gain: float = 0.15
    """Advantage, as a share of the cost, that a switch back must have."""
    donor_headroom: float = 0.10
    """Share of its capacity that the mode which gives a worker away must keep free."""
    remove_interval: Seconds = 60.0
    """Time between two removals of one model: the load must settle on those that stay, and the
    reports of a slow tick show how they bear it."""
    remove_ttft: float = 0.8
    """After a removal the p95 of the waits for first tokens must stay below this part of the time
    that the prompts themselves leave of the objective."""
    remove_itl: float = 0.85
    """The same for the ITL, which varies less."""
    break_even: float = 2.0
    """A worker is removed if it is expected to be idle for this many times its start-up and drain,
    and its load has been gone for as long: at most twice the cost of knowing the future."""
    hold: Seconds = 3600.0
    """An operator's own change of a worker is left alone for so long."""
    fast_up: float = 0.20
    """Predicted share of missed requests at which capacity is added at once, without a second
    tick in agreement."""
    queued_limit: float = 4.0
    """Held and queued work, as a multiple of the TTFT objective per open worker, at which capacity
    is added at once."""
    panic: float = 1.5
    """A load above this multiple of the forecast, and beyond chance, is a panic: the load since it
    rose counts, and nothing is removed for the stabilization window."""
    blind_wait: float = 0.5
    """Held requests that wait longer than this part of the TTFT objective add a worker while no
    demand is known."""
    min_first_tokens: int = 20
    """First tokens that must have been seen before predictions are trusted."""
    alarm: Seconds = 60.0
    """After so long without knowing the demand it is a degradation."""
    start_prior: Seconds = 120.0
    """Assumed start-up time of a kind that has not been seen to start."""
    drain_prior: Seconds = 5.0
    """Assumed time of a drain; streams move with their KV."""
    pending_timeout: Seconds = 600.0
    """A start that is pending for so long is withdrawn, and its kind is not started for as long."""
    ready_factor: float = 3.0
    """A worker that runs for this many times the p90 of start-ups and is not ready is ended."""
    start_backoff: Seconds = 60.0
    """Wait after a failed start of a kind; doubles with each one."""
    start_backoff_most: Seconds = 3600.0
    """The longest such wait."""
    start_failures: int = 3
    """Failures in a row after which a kind is no longer started, until an operator says so."""
    drain_timeout: Seconds = 45.0
    """A worker that drains longer is ended, unless it has said that its own limit is longer."""
    switch_timeout: Seconds = 60.0
    """A mode switch that takes longer is given up."""
    switch_retry: Seconds = 300.0
    """The same worker is not switched again for so long after a switch that did not happen."""
    lease_slack: Seconds = 60.0
    """A worker that ends by a time limit gets a successor its start-up, a drain and this before."""

    def pool(self, model: str) -> PoolConfig | None:
        """The pool of a model; None: it is not planned for."""
        return next((one for one in self.pools if one.model == model), None)

    def price(self, kind: Kind) -> float:
        """The price of a worker of this kind for an hour."""
        return self.prices.get(kind.name, kind.price)

    def kinds_of(self, pool: PoolConfig, kinds: Sequence[Kind]) -> tuple[Kind, ...]:
        """The kinds that a pool may start, the preferred one first."""
        if not pool.kinds:
            return tuple(kinds) if len(self.pools) == 1 else ()
        by_name = {one.name: one for one in kinds}
        return tuple(by_name[name] for name in pool.kinds if name in by_name)

    def validate(self) -> None:
        """Raises `ConfigError`, with cause and remedy, for settings that cannot work."""
        for why in (self._number_problem(), self._pool_problem(), self._budget_problem()):
            if why:
                raise ConfigError(f"planner: {why}")

    def _number_problem(self) -> str:
        if self.mode not in ("off", "advise", "act"):
            return f"mode {self.mode!r} is not known: use off, advise or act"
        for name in _POSITIVE:
            if not 0 < getattr(self, name) < _FOREVER:
                return f"{name.replace('_', '-')} must be more than 0, and less than {_FOREVER:g}"
        for name in _SHARES:
            if not 0 <= getattr(self, name) < 1:
                return f"{name.replace('_', '-')} must be at least 0, and less than 1"
        if self.tick < _SHORTEST_TICK:
            return f"tick must be at least {_SHORTEST_TICK:g} s: each looks at the whole cluster"
        if self.stable > _LONGEST_STABLE:
            return f"stable must be at most {_LONGEST_STABLE:g} s: each tick looks at all of it"
        if self.slow_tick < self.tick:
            return "slow-tick must not be shorter than tick"
        if not 0 <= self.budget < _FOREVER:
            return "budget must be 0 or more; 0: no bound"
        wrong = [name for name, price in self.prices.items() if not 0 <= price < _FOREVER]
        return f"the price of kind {wrong[0]!r} must be 0 or more" if wrong else ""

    def _pool_problem(self) -> str:
        owners: dict[str, str] = {}
        pools = Counter(pool.model for pool in self.pools)
        for pool in self.pools:
            if why := pool.problem():
                return f"pool {pool.model!r}: {why}"
            if pools[pool.model] > 1:
                return f"model {pool.model!r} has two pools: put both into one"
            for kind in pool.kinds:
                other = owners.setdefault(kind, pool.model)
                if other != pool.model:
                    return (
                        f"kind {kind!r} stands in the pools of {other!r} and {pool.model!r}: a "
                        f"kind starts workers of one model; define a second kind"
                    )
        return ""

    def _budget_problem(self) -> str:
        """The budget must pay for the smallest cluster that the pools and their floors allow."""
        if not self.budget:
            return ""
        need = sum(self._least_cost(pool) for pool in self.pools)
        if need <= self.budget:
            return ""
        return (
            f"budget {self.budget:g} is below {need:g}, the cost of the fewest workers that the "
            f"pools ask for (min and floors): raise the budget to {need:g}, or lower them"
        )

    def _least_cost(self, pool: PoolConfig) -> float:
        high = max([pool.min, *(one.min for one in pool.floors)])
        return high * min((self.prices.get(kind, 1.0) for kind in pool.kinds), default=1.0)


_FOREVER: Final = 1e9
_SHORTEST_TICK: Final[Seconds] = 0.05
_LONGEST_STABLE: Final[Seconds] = 6 * 3600.0
_SHARES: Final = ("reversal_gain", "donor_headroom")
_POSITIVE: Final = (
    *("tick", "slow_tick", "stable", "dwell", "switches_per_hour", "reversal_ticks", "hold"),
    *("remove_interval", "remove_ttft", "remove_itl", "break_even", "fast_up", "queued_limit"),
    *("panic", "blind_wait", "min_first_tokens", "alarm", "start_prior", "drain_prior"),
    *("pending_timeout", "ready_factor", "start_backoff", "start_backoff_most", "start_failures"),
    *("drain_timeout", "switch_timeout", "switch_retry", "lease_slack"),
)
