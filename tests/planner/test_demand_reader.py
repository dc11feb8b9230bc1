"""The planner's reader of demand: exact sums, and what it says when a report is missing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.ids import NodeId, NodeLife
from pdserve.messages.demand import (
    RECENT_LIMIT,
    Arrival,
    DemandReport,
    FinishedRequest,
    ModelDemand,
    ModelTimes,
)
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.planner.demand_reader import DemandReader, DemandReaderConfig, DemandSeries

M = "org/model"


@dataclass
class Router:
    """A router that counts one model, and reports."""

    name: str
    epoch: int = 1
    process: int = 1
    clock: float = 0.0
    """Seconds to subtract from the planner's clock for its own."""
    began: float = 0.0
    arrivals: int = 0
    refused: int = 0
    work: float = 0.0
    squared: float = 0.0
    missed: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    first_tokens: int = 0
    recent: list[Arrival] = field(default_factory=list)
    ended: list[FinishedRequest] = field(default_factory=list)
    number: int = 0
    since: float | None = None
    model: str = M

    @property
    def life(self) -> NodeLife:
        return NodeLife(NodeId(self.name), self.epoch)

    def arrive(self, at: float, work: float = 0.5, number: int = 1) -> None:
        self.since = at - self.clock if self.since is None else self.since
        for _ in range(number):
            self.arrivals += 1
            self.work += work
            self.squared += work * work
            self.recent = [*self.recent, Arrival(at - self.clock, 100, 10, 1, work)]
        self.recent = self.recent[-RECENT_LIMIT:]

    def finish(self, cause: str = "", prompt_tokens: int = 100) -> None:
        ended = FinishedRequest(prompt_tokens, 10, len(self.ended) + 1)
        self.ended = [*self.ended, ended][-RECENT_LIMIT:]
        if cause:
            self.missed[cause] += 1
        else:
            self.kept += 1

    def demand(self) -> ModelDemand:
        return ModelDemand(
            model=self.model,
            began=self.began - self.clock,
            arrivals=self.arrivals,
            refused=self.refused,
            work=self.work,
            work_squared=self.squared,
            finished=self.kept + self.missed.total(),
            first_tokens=self.first_tokens,
            kept={"both": self.kept} if self.kept else {},
            missed={"both": dict(self.missed)} if self.missed else {},
            recent=tuple(self.recent),
            ended=tuple(self.ended),
        )

    def report(self, now: float, *, resting: bool = False) -> DemandReport:
        self.number += 1
        since, self.since = self.since, None
        own = now - self.clock
        return DemandReport(
            now=own,
            process=self.process,
            number=self.number,
            since=own if since is None else since,
            resting=resting,
            models=(self.demand(),),
        )


def _reader(*names: str, now: float = 0.0) -> DemandReader:
    reader = DemandReader(now)
    reader.watch(now, [NodeId(name) for name in names])
    return reader


def _tell(reader: DemandReader, now: float, router: Router, *, resting: bool = False) -> None:
    reader.reported(now, router.life, router.report(now, resting=resting))


def _sums(series: DemandSeries) -> tuple[float, float]:
    assert series.total is not None
    return series.total.arrivals, series.total.work


class TestSums:
    def test_arrivals_are_in_the_bucket_of_their_own_times(self) -> None:
        reader, router = _reader("r"), Router("r", clock=1000.0)
        _tell(reader, 0.0, router)
        for at in (6.0, 9.9, 10.1):
            router.arrive(at, work=0.25)
        _tell(reader, 21.0, router)
        series = reader.series(21.0, M)
        assert [bucket.arrivals for bucket in series.buckets] == [2, 1, 0]
        assert [bucket.at for bucket in series.buckets] == [5.0, 10.0, 15.0]
        assert [bucket.work for bucket in series.buckets] == [0.5, 0.25, 0.0]
        assert series.buckets[0].work_rate == pytest.approx(0.1)
        assert [one.at for one in series.arrivals] == pytest.approx([6.0, 9.9, 10.1])

    def test_more_arrivals_than_a_report_lists_are_spread(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 0.0, router)
        for at in range(10):
            router.arrive(5.0 + at, work=0.01, number=100)
        router.since = 5.0
        _tell(reader, 15.0, router)
        series = reader.series(20.0, M)
        assert _sums(series) == pytest.approx((1000, 10.0))
        first, second = (bucket.arrivals for bucket in series.buckets[:2])
        assert first + second == 1000
        assert first == pytest.approx(372, abs=1)  # half of the 744 that are not listed
        assert sum(one.weight for one in series.arrivals) == pytest.approx(1000)

    def test_what_follows_a_rest_is_not_spread_over_it(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 0.0, router, resting=True)
        router.arrive(100.5, number=600)
        _tell(reader, 101.0, router)
        _tell(reader, 106.0, router)
        arrivals = {bucket.at: bucket.arrivals for bucket in reader.series(106.0, M).buckets}
        assert arrivals.pop(100.0) == 600
        assert set(arrivals.values()) == {0}

    def test_what_a_lost_report_contained_is_spread_over_its_time(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 0.0, router)
        for second in range(1, 21):
            router.arrive(second - 0.5, number=100)
            report = router.report(float(second))
        reader.reported(20.0, router.life, report)
        arrivals = [bucket.arrivals for bucket in reader.series(20.0, M).buckets]
        assert len(arrivals) == 3
        assert sum(arrivals) == pytest.approx(1500, abs=150)
        assert min(arrivals) > 400

    def test_verdicts_and_lengths(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 1.0, router)
        router.finish()
        router.finish("held")
        router.finish("held")
        _tell(reader, 6.0, router)
        series = reader.series(10.0, M)
        assert series.total is not None
        assert (series.total.kept, series.total.missed) == ({"both": 1}, {"both": {"held": 2}})
        assert series.total.missed_for("both") == 2
        assert [one.output_tokens for one in series.lengths] == [1, 2, 3]

    def test_lengths_of_rare_prompts_are_kept(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 1.0, router)
        router.finish(prompt_tokens=300)
        for second in range(2, 12):
            for _ in range(100):
                router.finish(prompt_tokens=9_000)
            _tell(reader, float(second), router)
        series = reader.series(12.0, M)
        assert {one.prompt_tokens for one in series.lengths} == {9_000}
        older = Counter(one.prompt_tokens for one in series.older_lengths)
        assert older == {300: 1, 9_000: 100}

    def test_several_routers_add_up(self) -> None:
        reader = _reader("a", "b")
        routers = [Router("a", clock=-50.0), Router("b", clock=70.0)]
        for router in routers:
            _tell(reader, 1.0, router)
            router.arrive(7.0)
        for router in routers:
            _tell(reader, 11.0, router)
        series = reader.series(11.0, M)
        assert [bucket.arrivals for bucket in series.buckets] == [2]
        assert series.health.known


class TestAbsurdReports:
    @pytest.mark.parametrize(
        "report",
        [
            DemandReport(now=1e308),
            DemandReport(now=9.0, models=(ModelDemand(model=M, work=1e300),)),
            DemandReport(
                now=9.0,
                models=(ModelDemand(model=M, arrivals=1, recent=(Arrival(-1e308, 1),)),),
            ),
            DemandReport(
                now=9.0, models=(ModelDemand(model=M, times=ModelTimes(per_token=1e300)),)
            ),
            DemandReport(
                now=9.0, models=tuple(ModelDemand(model=f"m{number}") for number in range(5000))
            ),
        ],
    )
    def test_they_are_refused_whole(self, report: DemandReport) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 1.0, router)
        absurd = replace(report, process=1, number=2)
        reader.reported(10.0, router.life, absurd)
        assert [*reader.health(10.0).refused] == ["r"]
        assert reader.models == (M,)
        router.number = 2
        router.arrive(10.5, number=3)
        _tell(reader, 11.0, router)
        assert reader.health(11.0).known
        assert _sums(reader.series(11.0, M)) == (3, 1.5)

    def test_what_a_router_has_forgotten_is_forgotten(self) -> None:
        reader = _reader("r")
        for number in range(3000):
            now = 1.0 + number
            demand = ModelDemand(model=f"m{number}", count=number, began=now, held=1, arrivals=1)
            report = DemandReport(now=now, process=1, number=1 + number, models=(demand,))
            reader.watch(now, [NodeId("r")])
            reader.reported(now, NodeLife(NodeId("r"), 1), report)
        assert reader.series(3001.0, "m0").held == 0
        assert len(reader.models) <= 1300  # those of the last 1,200 s


class TestClocks:
    def test_a_router_whose_machine_was_suspended_is_not_behind_for_ever(self) -> None:
        """Its clock stood still, so its times are 100 s too early from then on."""
        reader, router = _reader("r"), Router("r")
        for now in range(1, 60):
            router.arrive(now - 0.5)
            _tell(reader, float(now), router)
        router.clock = 100.0
        for now in range(160, 181):
            router.arrive(now - 0.5)
            _tell(reader, float(now), router)
        newest = reader.series(180.0, M).buckets[-1]
        assert (newest.at, newest.arrivals) == (175.0, 5)


class TestLives:
    def test_what_was_counted_before_is_left_out(self) -> None:
        reader, router = _reader("r", now=100.0), Router("r")
        router.arrive(50.0, number=7)
        _tell(reader, 101.0, router)
        assert _sums(reader.series(101.0, M)) == (0, 0.0)
        assert len(reader.series(101.0, M).arrivals) == 7  # for the what-if, with their times
        router.arrive(102.0)
        _tell(reader, 103.0, router)
        assert _sums(reader.series(103.0, M)) == (1, 0.5)

    def test_a_router_that_begins_later_counts_whole(self) -> None:
        reader = _reader()
        router = Router("r", began=10.0)
        router.arrive(11.0, number=3)
        _tell(reader, 12.0, router)
        assert _sums(reader.series(12.0, M))[0] == 3

    def test_a_restart_counts_nothing_twice(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 1.0, router)
        router.arrive(2.0, number=10)
        before = router.report(3.0)
        reader.reported(3.0, router.life, before)
        again = Router("r", epoch=2, process=2, began=5.0)
        again.arrive(6.0, number=4)
        _tell(reader, 7.0, again)
        assert _sums(reader.series(7.0, M))[0] == 14
        reader.reported(8.0, router.life, before)  # late, of the life before
        assert _sums(reader.series(8.0, M))[0] == 14

    def test_a_router_that_rejoins_goes_on_counting(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 1.0, router)
        router.arrive(2.0, number=10)
        _tell(reader, 3.0, router)
        reader.watch(4.0, [])
        router.epoch = 2
        router.arrive(5.0)
        reader.watch(6.0, [NodeId("r")])
        _tell(reader, 6.0, router)
        assert _sums(reader.series(6.0, M))[0] == 11

    def test_a_model_that_the_router_had_forgotten_begins_anew(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 1.0, router)
        router.arrive(2.0, number=10)
        _tell(reader, 3.0, router)
        fresh = Router("r", number=2, began=4.0)
        fresh.arrive(5.0, number=2)
        report = fresh.report(6.0)
        report = replace(report, models=(replace(report.models[0], count=1),))
        reader.reported(6.0, router.life, report)
        assert _sums(reader.series(6.0, M))[0] == 12
        assert not reader.health(6.0).refused


class TestHealth:
    def test_no_arrivals_are_zero_and_known(self) -> None:
        reader, router = _reader("r"), Router("r")
        for now in range(1, 32):
            _tell(reader, float(now), router)
        series = reader.series(31.0, M)
        assert series.health.known
        assert series.health.words == ""
        assert [bucket.arrivals for bucket in series.buckets] == [0] * 5
        assert reader.series(31.0, "another").buckets == series.buckets

    def test_a_missing_report_is_not_zero(self) -> None:
        reader = _reader("r")
        assert reader.series(2.0, M).buckets == ()
        health = reader.health(9.0)
        assert (health.missing, health.known, health.age) == (("r",), False, None)
        assert "router r has not reported its demand" in health.words
        series = reader.series(9.0, M)
        assert (series.buckets, series.rest) == ((), None)

    def test_one_of_two_is_missing(self) -> None:
        reader, router = _reader("r", "old"), Router("r")
        _tell(reader, 1.0, router)
        assert reader.health(2.0).known
        assert reader.health(4.0).missing == ("old",)
        assert not reader.health(4.0).known

    def test_without_any_router_nothing_is_known(self) -> None:
        reader = _reader()
        assert not reader.health(1.0).known
        assert reader.health(1.0).words == "no router has reported its demand"

    def test_a_router_at_rest_is_not_silent(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 1.0, router, resting=True)
        series = reader.series(21.0, M)
        assert series.health.known
        assert series.health.age == 0
        assert [bucket.arrivals for bucket in series.buckets] == [0, 0, 0]
        assert reader.health(30.0).silent == ("r",)

    def test_an_unreachable_router_at_rest_is_silent(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 1.0, router, resting=True)
        reader.watch(2.0, [NodeId("r")], unreachable=[NodeId("r")])
        assert reader.health(2.0).silent == ("r",)

    def test_a_silent_router_is_replaced_by_its_share_before(self) -> None:
        reader = _reader("a", "b")
        routers = Router("a"), Router("b")
        for now in range(1, 61):
            for router in routers:
                router.arrive(now - 0.5, work=0.1, number=4 if router is routers[0] else 1)
                _tell(reader, float(now), router)
        for now in range(61, 91):
            routers[1].arrive(now - 0.5, work=0.1)
            _tell(reader, float(now), routers[1])
        series = reader.series(90.0, M)
        assert series.health.silent == ("a",)
        assert series.health.age == 30.0
        by_time = {bucket.at: bucket for bucket in series.buckets}
        assert by_time[80.0].arrivals == pytest.approx(25.0)
        assert by_time[80.0].work == pytest.approx(2.5)
        assert by_time[80.0].estimated == pytest.approx(0.8)
        assert by_time[50.0].estimated == 0
        assert series.total is not None
        assert series.total.arrivals == 60 * 5 + 30  # estimates are no counts
        _tell(reader, 90.5, routers[0])
        back = reader.series(90.5, M)
        assert back.health.known
        assert {bucket.at: bucket.arrivals for bucket in back.buckets}[80.0] == 5
        reader.watch(91.0, [NodeId("b")])
        assert reader.series(91.0, M).health.known

    def test_a_bucket_is_full_when_each_router_has_reported_it(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 4.0, router)
        _tell(reader, 9.5, router)
        router.arrive(9.8)
        assert reader.series(10.2, M).buckets == ()
        _tell(reader, 10.5, router)
        assert [bucket.arrivals for bucket in reader.series(10.6, M).buckets] == [1]

    @pytest.mark.parametrize(
        ("fault", "words"),
        [
            ({"work": nan}, "work of org/model is not a number"),
            ({"kv_token_seconds": inf}, "kv_token_seconds of org/model is not a number"),
            ({"arrivals": 1}, "arrivals of org/model went back from 2 to 1"),
            ({"missed": {}}, "missed both held of org/model went back from 1 to 0"),
            ({"times": ModelTimes(base=nan)}, "the times of org/model are not numbers"),
            ({"speeds": {NodeId("w"): nan}}, "the speed of w for org/model is not a number"),
            ({"recent": (Arrival(nan, 1),)}, "an arrival for org/model has no sensible time"),
            ({"recent": (Arrival(99.0, 1),)}, "an arrival for org/model has no sensible time"),
        ],
    )
    def test_a_report_without_sense_is_refused_by_name(
        self, fault: dict[str, object], words: str
    ) -> None:
        reader, router = _reader("r"), Router("r")
        router.arrive(0.5, number=2)
        router.finish("held")
        _tell(reader, 1.0, router)
        report = router.report(2.0)
        bad = replace(report, models=(replace(report.models[0], **fault),))
        reader.reported(2.0, router.life, bad)
        health = reader.health(2.0)
        assert not health.known
        assert words in health.refused[NodeId("r")]
        assert words in health.words
        assert _sums(reader.series(2.0, M))[0] == 2
        _tell(reader, 3.0, router)
        assert reader.health(3.0).known

    def test_a_clock_that_goes_back_is_refused(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 5.0, router)
        reader.reported(6.0, router.life, router.report(4.0))
        assert "clock went back" in reader.health(6.0).words


class TestWhatIsKnown:
    def test_times_are_those_of_the_router_that_knows_most(self) -> None:
        reader = _reader("a", "b")
        reports = []
        for name, seen, base in (("a", 500, 0.5), ("b", 20, 0.25)):
            router = Router(name, first_tokens=seen)
            report = router.report(1.0)
            speeds = {NodeId("w1"): base, NodeId(f"of-{name}"): 2.0}
            times = ModelTimes(base, 1e-4, 1e-9, 0.01, 1e-4, 1e-7, True)
            model = replace(report.models[0], times=times, speeds=speeds, held=3, held_oldest=base)
            reports.append((router, replace(report, models=(model,))))
        for router, report in reports:
            reader.reported(1.0, router.life, report)
        series = reader.series(1.0, M)
        assert series.times == LatencyModel(0.5, 1e-4, 1e-9, 0.01, 1e-4, 1e-7, fitted=True)
        assert series.speeds == {"w1": 0.5, "of-a": 2.0, "of-b": 2.0}
        assert (series.held, series.held_oldest, series.first_tokens) == (6, 0.5, 520)

    def test_nothing_learnt_gives_the_default_times(self) -> None:
        series = _reader("r").series(1.0, M)
        assert series.times == LatencyModel()

    def test_arrivals_are_bounded_and_weigh_as_many(self) -> None:
        reader, router = _reader("r"), Router("r")
        _tell(reader, 0.0, router)
        for second in range(1, 301):
            router.arrive(second - 0.5, number=100)
            _tell(reader, float(second), router)
        arrivals = reader.series(300.0, M).arrivals
        assert 900 < len(arrivals) <= 2000
        assert sum(one.weight for one in arrivals) == pytest.approx(30_000, rel=0.01)
        late = sum(one.weight for one in arrivals if one.at > 150)
        assert late == pytest.approx(15_000, rel=0.02)
        weights = [one.weight for one in arrivals]
        assert max(weights) <= 2 * min(weights)

    def test_old_models_and_routers_are_forgotten(self) -> None:
        reader, router = _reader("r"), Router("r")
        router.arrive(0.5)
        _tell(reader, 1.0, router)
        reader.watch(2.0, [])
        assert reader.models == (M,)
        reader.watch(1300.0, [])
        assert not reader.models

    def test_the_ring_of_buckets_is_bounded(self) -> None:
        reader = DemandReader(0.0, DemandReaderConfig(buckets=10))
        router = Router("r")
        for now in range(0, 1000, 2):
            router.arrive(now - 0.5)
            _tell(reader, float(now), router)
        series = reader.series(1000.0, M)
        assert len(series.buckets) == 9
        assert _sums(series)[0] == 500


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "report", "deliver", "repeat", "restart", "rejoin"]),
        st.integers(0, 2),
        st.integers(1, 400),
    ),
    max_size=60,
)


class TestAnyOrder:
    @given(_EVENTS, st.integers(0, 1 << 30))
    def test_sums_are_exact_whatever_is_lost_or_repeated(
        self, events: list[tuple[str, int, int]], seed: int
    ) -> None:
        """Only what a router counted and never got through, before it restarted, is lost."""
        random = Random(seed)
        routers = [Router(f"r{index}", clock=index * 333.0 - 100) for index in range(3)]
        reader = _reader("r0", "r1", "r2")
        sent: list[list[tuple[NodeLife, DemandReport]]] = [[], [], []]
        told = [0, 0, 0]
        done = 0
        now = 0.0
        for what, index, number in events:
            now += random.random() * 3
            router = routers[index]
            if what == "arrive":
                router.arrive(now, work=0.125, number=number)
            elif what == "report":
                sent[index].append((router.life, router.report(now)))
            elif what in ("deliver", "repeat") and sent[index]:
                life, report = sent[index][-1] if what == "deliver" else random.choice(sent[index])
                reader.reported(now, life, report)
                if report.process == router.process:
                    told[index] = max(told[index], report.models[0].arrivals)
            elif what == "restart":
                done, told[index] = done + told[index], 0
                routers[index] = Router(
                    router.name, router.epoch + 1, router.process + 1, router.clock, now
                )
                sent[index].append((routers[index].life, routers[index].report(now)))
                reader.reported(now, *sent[index][-1])
            elif what == "rejoin":
                reader.watch(now, [r.life.node for r in routers if r is not router])
                router.epoch += 1
                reader.watch(now, [r.life.node for r in routers])
        series = reader.series(now, M)
        assert _sums(series) == (done + sum(told), 0.125 * (done + sum(told)))
        assert not series.health.refused
        # A router that is silent at the end has an estimate in them, too.
        counted = sum(bucket.arrivals * (1 - bucket.estimated) for bucket in series.buckets)
        assert counted <= done + sum(told) + 1e-6
