"""Merges the demand reports of all routers into one series for each model. Pure.

    watch(now, routers)            which routers there are
    reported(now, life, report)    a router's newest report
    series(now, model)             the demand for a model, as far as it is known
    health(now)                    which routers are missing, silent or refused

A report's counters are compared with those of the router's report before, so a lost or repeated
report changes no sum. A process that begins anew begins at zero. What a router had counted before
this reader began to listen is left out.

No arrivals are zero. A router that has not reported is *missing*: its demand is unknown, and not
zero. A router that has reported and stopped is *silent*: until it reports again or leaves the
cluster, its mean demand before the silence is added, and marked as estimated. A router at rest
reports seldom, and is not silent for it.

Bounded: buckets by time, arrivals by count (beyond, fewer stand for more, by weight), lengths by
count, models and routers by what the cluster has. The planner's driver owns it; times are on its
clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final

from msgspec.structs import astuple

from pdserve.messages.demand import FinishedRequest, ModelDemand, ModelTimes
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.planner.demand_buckets import BucketRing, Key, Tally, add_all
from pdserve.planner.demand_series import DemandBucket, DemandHealth, DemandSeries
from pdserve.planner.recent_arrivals import RecentArrival, RecentArrivals

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pdserve.ids import Epoch, NodeId, NodeLife, Seconds
    from pdserve.messages.demand import Arrival, DemandReport

__all__ = [
    "DemandBucket",
    "DemandHealth",
    "DemandReader",
    "DemandReaderConfig",
    "DemandSeries",
    "RecentArrival",
]


_OLDER: Final = 100
"""Finished requests whose lengths are kept, of each number of bits of the prompt's length."""


@dataclass(frozen=True, slots=True)
class DemandReaderConfig:
    """Lengths and bounds of what is kept."""

    bucket: Seconds = 5.0
    """Seconds of one bucket; the planner's tick."""
    buckets: int = 240
    """Buckets kept: 20 minutes."""
    replay: Seconds = 300.0
    """Seconds of arrivals that are kept one by one, for the what-if."""
    arrivals: int = 2000
    """Most arrivals of a model that are kept; beyond, one stands for several."""
    lengths: int = 500
    """Finished requests of a model whose lengths are kept."""
    silent_after: Seconds = 3.0
    """A router that has work reports each second; after three it is silent."""
    resting_after: Seconds = 25.0
    """A router at rest reports every 10 s; two may be lost."""
    missing_after: Seconds = 3.0
    """Time for a router that has just joined to send its first report."""
    share_window: Seconds = 60.0
    """A silent router's demand is its mean over so many seconds before the silence."""
    forget: Seconds = 1200.0
    """A router that has left is remembered for so long: it may return with the same counters."""


_SUMS: Final = (
    *("arrivals", "refused", "work", "work_squared", "kv_token_seconds"),
    *("output_tokens", "first_tokens", "finished"),
)
_ARRIVALS: Final[Key] = ("arrivals",)
_REFUSED: Final[Key] = ("refused",)
_WORK: Final[Key] = ("work",)
_SQUARED: Final[Key] = ("work_squared",)
_FINISHED: Final[Key] = ("finished",)
_DRIFT: Final = 1e-4
"""Most seconds per second by which two machines' clocks run apart; crystals keep below that."""
_STOOD: Final[Seconds] = 5.0
"""A clock that is behind by so much more than before has stood still, as in a machine that was
suspended."""
_MOST: Final = 1e18
"""Figures beyond this make no sense, and sums of them would be no numbers."""
_MOST_MODELS: Final = 1024
"""Models in one report that make no sense: a router counts 64."""


@dataclass(slots=True)
class _Count:
    """One router's count of one model."""

    newest: ModelDemand
    tally: Tally
    own: BucketRing
    """Its own demand of the last while, for an estimate."""


@dataclass(slots=True)
class _Router:
    """One router that is there, or was a while ago."""

    since: Seconds
    """When it was first seen, or seen again."""
    left: Seconds | None = None
    """When it left the cluster; None: it is there."""
    epoch: Epoch = 0
    reachable: bool = True
    heard: Seconds | None = None
    """When its newest report came; None: none has come since it is there."""
    newest: DemandReport | None = None
    offset: Seconds = 0.0
    """Seconds to add to its clock for the planner's."""
    refused: str = ""
    counts: dict[str, _Count] = field(default_factory=dict)


@dataclass(slots=True)
class _Model:
    """One model's demand from all routers."""

    ring: BucketRing
    arrivals: RecentArrivals
    lengths: deque[FinishedRequest]
    changed: Seconds
    older: dict[int, deque[FinishedRequest]] = field(default_factory=dict)
    """The newest lengths of prompts of each number of bits: what is rare now may come back."""


class DemandReader:
    """Reads the demand of all routers. See the module."""

    def __init__(self, now: Seconds, config: DemandReaderConfig | None = None) -> None:
        """`now`: when this reader begins to listen."""
        self._config = config or DemandReaderConfig()
        self._began = now
        self._first: Seconds | None = None
        """When the first report came."""
        self._routers: dict[NodeId, _Router] = {}
        self._models: dict[str, _Model] = {}

    # ------------------------------------------------------------------ news

    def watch(
        self, now: Seconds, routers: Collection[NodeId], unreachable: Collection[NodeId] = ()
    ) -> None:
        """Which routers the cluster has now. Those in `unreachable` are silent, also if they were
        at rest. Forgets what is too old."""
        for node, router in self._routers.items():
            if node not in routers and router.left is None:
                router.left = now
        for node in routers:
            router = self._routers.setdefault(node, _Router(now))
            if router.left is not None:
                router.left, router.since, router.heard = None, now, None
            router.reachable = node not in unreachable
        self._forget(now)

    def _forget(self, now: Seconds) -> None:
        oldest = now - self._config.forget
        self._routers = {
            node: router
            for node, router in self._routers.items()
            if router.left is None or router.left > oldest
        }
        counted = {name for router in self._routers.values() for name in router.counts}
        self._models = {
            name: model
            for name, model in self._models.items()
            if name in counted or model.changed > oldest
        }

    def reported(self, now: Seconds, life: NodeLife, report: DemandReport) -> None:
        """A router's report has come. One that came before, or is older, is ignored; one that makes
        no sense is refused whole, see `DemandHealth.refused`."""
        router = self._routers.setdefault(life.node, _Router(now))
        last = router.newest
        if life.epoch < router.epoch:
            return
        same = last is not None and last.process == report.process
        if last is not None and same and report.number < last.number:
            return
        if last is not None and same and report.number == last.number:
            router.epoch, router.heard = life.epoch, router.heard or now
            return
        router.refused = _fault(report) or (_backwards(router, report) if same else "")
        if router.refused:
            return
        if not same:
            router.counts = {}
        self._take(now, router, report, None if last is None or not same else last)
        router.epoch, router.heard, router.newest = life.epoch, now, report
        self._first = now if self._first is None else self._first

    def _take(
        self, now: Seconds, router: _Router, report: DemandReport, last: DemandReport | None
    ) -> None:
        """`last`: the report of this process before; None: this one is the first."""
        known, offset = router.newest is not None, now - report.now
        if last is not None:
            # The report that travelled fastest says best by how much the clocks differ.
            most = router.offset + _DRIFT * max(0.0, report.now - last.now)
            offset = offset if offset > most + _STOOD else min(offset, most)
        router.offset = offset
        for demand in report.models:
            model = self._models.get(demand.model)
            if model is None:
                model = self._models[demand.model] = self._new_model(now)
            before = router.counts.get(demand.model)
            own = self._ring(self._config.share_window) if before is None else before.own
            tally = _tally(demand)
            router.counts[demand.model] = _Count(demand, tally, own)
            if before is not None and before.newest.count == demand.count:
                base = before.tally
            elif known or self._is_new(now, demand.began + offset):
                base = {}
            else:
                # It was counted before this reader listened; only the newest arrivals have times.
                _remember(model, demand.recent, 1.0, demand.ended, offset)
                continue
            if grown := {key: more for key, at in tally.items() if (more := at - base.get(key, 0))}:
                model.changed = now
                span = _span(report, last, demand), report.now
                _add(model, own, demand, grown, span, offset)
        told = {demand.model for demand in report.models}
        # What the router has forgotten begins a new count when it returns.
        router.counts = {name: count for name, count in router.counts.items() if name in told}

    def _is_new(self, now: Seconds, began: Seconds) -> bool:
        """True if a count of an unknown process has nothing from before this reader listened, or
        from a life that it has forgotten."""
        return began >= max(self._began, now - self._config.forget)

    def _new_model(self, now: Seconds) -> _Model:
        config = self._config
        return _Model(
            self._ring(config.bucket * config.buckets),
            RecentArrivals(config.replay, config.arrivals),
            deque(maxlen=config.lengths),
            now,
        )

    def _ring(self, seconds: Seconds) -> BucketRing:
        width = self._config.bucket
        return BucketRing(width, max(1, round(seconds / width)))

    # ------------------------------------------------------------------ what is known

    @property
    def models(self) -> tuple[str, ...]:
        """Models that some router has reported, by name."""
        return tuple(sorted(self._models))

    def health(self, now: Seconds) -> DemandHealth:
        """Which routers' demand is known."""
        routers = sorted(self._present())
        ages = [
            0.0 if report.resting and not self._silent(now, router) else now - router.heard
            for _, router in routers
            if (report := router.newest) is not None and router.heard is not None
        ]
        return DemandHealth(
            max(ages, default=None),
            tuple(
                node
                for node, router in routers
                if router.heard is None and now - router.since > self._config.missing_after
            ),
            tuple(node for node, router in routers if self._silent(now, router)),
            {node: router.refused for node, router in routers if router.refused},
        )

    def series(self, now: Seconds, model: str) -> DemandSeries:
        """The demand for a model. For one that no router has reported it is zero, if the routers'
        demand is known (`DemandHealth.known`)."""
        known = self._models.get(model) or self._new_model(now)
        counts = [
            count
            for _, router in self._present()
            if (count := router.counts.get(model)) is not None
        ]
        counts.sort(key=lambda count: (count.newest.times.fitted, count.newest.first_tokens))
        newest = [count.newest for count in counts]
        best = newest[-1] if newest else ModelDemand(model=model)
        buckets, rest = self._buckets(now, known.ring, model)
        return DemandSeries(
            model,
            self.health(now),
            buckets,
            rest,
            _bucket(self._began, now - self._began, known.ring.total, {}),
            known.arrivals.since(now),
            tuple(known.lengths),
            tuple(chain.from_iterable(known.older.values())),
            sum(demand.held for demand in newest),
            sum(demand.held_work for demand in newest),
            max((demand.held_oldest for demand in newest), default=0.0),
            _latency_model(best.times),
            {node: speed for demand in newest for node, speed in demand.speeds.items()},
            sum(demand.first_tokens for demand in newest),
            best.prediction_poor,
        )

    def _present(self) -> list[tuple[NodeId, _Router]]:
        return [(node, router) for node, router in self._routers.items() if router.left is None]

    def _silent(self, now: Seconds, router: _Router) -> bool:
        if router.newest is None or router.heard is None:
            return False
        config = self._config
        most = config.resting_after if router.newest.resting else config.silent_after
        return not router.reachable or now - router.heard > most

    def _closed(self, now: Seconds) -> Seconds:
        """Until when all routers have reported; silent and missing ones are not waited for."""
        return min(
            (
                report.now + router.offset
                for _, router in self._present()
                if (report := router.newest) is not None
                and not report.resting
                and not self._silent(now, router)
            ),
            default=now,
        )

    def _buckets(
        self, now: Seconds, ring: BucketRing, model: str
    ) -> tuple[tuple[DemandBucket, ...], DemandBucket | None]:
        """The full buckets, and what came after them."""
        if self._first is None:
            return (), None
        width, newest = ring.width, ring.number(now)
        first = max(ring.number(self._first) + 1, newest - self._config.buckets)
        end = max(first, ring.number(self._closed(now)))
        full = tuple(
            _bucket(
                number * width,
                width,
                ring.tally(number),
                self._guess(now, model, number * width, (number + 1) * width),
            )
            for number in range(first, end)
        )
        start, rest = end * width, Tally()
        if start >= now:
            return full, None
        for number in range(end, newest + 1):
            add_all(rest, ring.tally(number).items())
        return full, _bucket(start, now - start, rest, self._guess(now, model, start, now))

    def _guess(self, now: Seconds, model: str, start: Seconds, end: Seconds) -> Tally:
        """What silent routers would have reported of a stretch of time."""
        guess: Tally = {}
        for _, router in self._present():
            count, report = router.counts.get(model), router.newest
            if count is None or report is None or not self._silent(now, router):
                continue
            until = report.now + router.offset
            seconds = min(end, now) - max(start, until)
            if seconds > 0:
                began = count.newest.began + router.offset
                add_all(guess, _rate(count.own, began, until, self._config.share_window), seconds)
        return guess


# ---------------------------------------------------------------------- one report


def _fault(report: DemandReport) -> str:
    """Why a report makes no sense by itself; empty: it does."""
    if len(report.models) > _MOST_MODELS:
        return f"it counts {len(report.models)} models"
    for demand in report.models:
        for name in (*_SUMS, "held", "held_work", "held_oldest", "began"):
            if not _sensible(getattr(demand, name)):
                return f"{name} of {demand.model} is not a number"
        for one in demand.recent:
            if not (one.at <= report.now and _sensible(one.at) and _sensible(one.work)):
                return f"an arrival for {demand.model} has no sensible time or work"
        for node, speed in demand.speeds.items():
            if not _sensible(speed):
                return f"the speed of {node} for {demand.model} is not a number"
        if not all(_sensible(value) for value in astuple(demand.times)):
            return f"the times of {demand.model} are not numbers"
    return "" if _sensible(report.now) and _sensible(report.since) else "its clock is not a number"


def _sensible(value: float) -> bool:
    return -_MOST < value < _MOST


def _backwards(router: _Router, report: DemandReport) -> str:
    """Which counter is smaller than in the report before; empty: none."""
    if router.newest is not None and report.now < router.newest.now:
        return f"its clock went back from {router.newest.now:g} to {report.now:g}"
    for demand in report.models:
        before = router.counts.get(demand.model)
        if before is None or before.newest.count != demand.count:
            continue
        tally = _tally(demand)
        for key, was in before.tally.items():
            if tally.get(key, 0) < was:
                name = " ".join(key)
                return f"{name} of {demand.model} went back from {was:g} to {tally.get(key, 0):g}"
    return ""


def _tally(demand: ModelDemand) -> Tally:
    """A report's counters, flat."""
    tally: Tally = {(name,): getattr(demand, name) for name in _SUMS}
    for objective, number in demand.kept.items():
        tally["kept", objective] = number
    for objective, causes in demand.missed.items():
        for cause, number in causes.items():
            tally["missed", objective, cause] = number
    return tally


def _span(report: DemandReport, last: DemandReport | None, demand: ModelDemand) -> Seconds:
    """From when on a report's news has happened, on the router's clock. If the report before was
    lost, it may be as old as the last one that was not."""
    if last is None:
        start = report.since if report.number == 1 else demand.began
    elif report.number == last.number + 1:
        start = max(last.now, report.since)
    else:
        start = last.now
    return min(start, report.now)


def _add(
    model: _Model,
    own: BucketRing,
    demand: ModelDemand,
    grown: Tally,
    span: tuple[Seconds, Seconds],
    offset: Seconds,
) -> None:
    """Adds what has grown: arrivals that are listed at their times, all else over the span."""
    arrived, finished = int(grown.get(_ARRIVALS, 0)), int(grown.get(_FINISHED, 0))
    recent = demand.recent[-arrived:] if arrived else ()
    ended = demand.ended[-finished:] if finished else ()
    _remember(model, recent, arrived / len(recent) if recent else 1.0, ended, offset)
    start, end = span
    for ring in (model.ring, own):
        rest = dict(grown)
        for one in recent:
            amounts: Tally = {_ARRIVALS: 1, _WORK: one.work, _SQUARED: one.work * one.work}
            ring.add(one.at + offset, amounts)
            for key, amount in amounts.items():
                rest[key] = max(0, rest.get(key, 0) - amount)
        ring.spread(start + offset, end + offset, rest)
        ring.drop_before(end + offset)


def _remember(
    model: _Model,
    recent: Iterable[Arrival],
    weight: float,
    ended: Iterable[FinishedRequest],
    offset: Seconds,
) -> None:
    """Keeps single arrivals and lengths. `weight`: arrivals that each of them stands for."""
    for known in ended:
        model.lengths.append(known)
        alike = model.older.setdefault(known.prompt_tokens.bit_length(), deque(maxlen=_OLDER))
        alike.append(known)
    for one in recent:
        cached = min(one.cached_tokens, one.prompt_tokens)
        model.arrivals.add(
            RecentArrival(one.at + offset, one.prompt_tokens, cached, one.choices, one.work, weight)
        )


# ---------------------------------------------------------------------- what is shown


def _rate(
    own: BucketRing, began: Seconds, until: Seconds, window: Seconds
) -> Iterable[tuple[Key, float]]:
    """A router's mean demand per second over the window that ends with its last report."""
    first = own.number(max(began, until - window))
    seconds = until - max(began, first * own.width)
    for number in range(first, own.number(until) + 1):
        for key, amount in own.tally(number).items():
            if len(key) == 1 and key != _REFUSED and seconds > 0:
                yield key, amount / seconds


def _bucket(
    at: Seconds, seconds: Seconds, tally: Mapping[Key, float], guess: Tally
) -> DemandBucket:
    sums = dict(tally)
    add_all(sums, guess.items())
    kept, missed = dict[str, float](), dict[str, dict[str, float]]()
    for key, amount in sums.items():
        if key[0] == "kept":
            kept[key[1]] = amount
        elif key[0] == "missed":
            missed.setdefault(key[1], {})[key[2]] = amount
    arrivals = sums.get(_ARRIVALS, 0)
    return DemandBucket(
        at,
        seconds,
        **{name: sums.get((name,), 0) for name in _SUMS},
        kept=kept,
        missed=missed,
        estimated=guess.get(_ARRIVALS, 0) / arrivals if arrivals else 0.0,
    )


def _latency_model(times: ModelTimes) -> LatencyModel:
    learnt = astuple(times)
    return LatencyModel(*learnt) if any(learnt) else LatencyModel()
