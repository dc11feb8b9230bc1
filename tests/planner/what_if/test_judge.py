"""The judge asks what the core means: it translates, and drops nothing."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pdserve.ids import NodeId
from pdserve.messages.demand import FinishedRequest
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.planner.demand_series import DemandHealth, DemandSeries
from pdserve.planner.outlook import Load, PoolCandidate, Slot
from pdserve.planner.recent_arrivals import RecentArrival
from pdserve.planner.what_if.judge import WhatIfJudge
from pdserve.planner.what_if.records import Handoffs

MODEL = LatencyModel(0.002, 25e-6, 1e-10, 0.006, 10e-6, 5e-8, fitted=True)
LIMITS = (1.0, 0.03)


def series(rate: float = 8.0, **other: Any) -> DemandSeries:
    random, at, arrivals = Random("judge"), 100.0, []
    for _ in range(200):
        at += random.expovariate(rate)
        tokens = int(random.gammavariate(4, 500)) + 16
        arrivals.append(RecentArrival(at, tokens, work=MODEL.prefill(tokens)))
    fields: dict[str, Any] = {
        "arrivals": tuple(arrivals),
        "lengths": tuple(FinishedRequest(2000, 0, 20 + n) for n in range(50)),
        "times": MODEL,
    }
    return DemandSeries("m", DemandHealth(), **(fields | other))


def rate_of(traffic: DemandSeries) -> float:
    span = traffic.arrivals[-1].at - traffic.arrivals[0].at
    return sum(one.work for one in traffic.arrivals) / span


def judged(load: Load, *candidates: PoolCandidate, judge: WhatIfJudge | None = None) -> list[Any]:
    return (judge or WhatIfJudge()).judge(series(), LIMITS, load, candidates)


def slots(mode: str, count: int, **fields: Any) -> PoolCandidate:
    return PoolCandidate((Slot(mode, **fields),) * count)


def test_the_load_is_scaled_to_the_forecast():
    """At the forecast of twice the work, two workers are as busy as one is now."""
    work = rate_of(series())
    (one,) = judged(Load(work), slots("aggregated", 1))
    (two,) = judged(Load(2 * work), slots("aggregated", 2))
    assert two.utilisation["aggregated"] == pytest.approx(one.utilisation["aggregated"], rel=0.1)
    (busier,) = judged(Load(2 * work), slots("aggregated", 1))
    assert busier.miss > one.miss


def test_no_load_misses_nothing():
    (outcome,) = judged(Load(0.0), slots("aggregated", 1))
    assert outcome.miss == 0
    (outcome,) = WhatIfJudge().judge(
        series(arrivals=()), LIMITS, Load(1.0), [slots("aggregated", 1)]
    )
    assert outcome.miss == 0


def test_candidates_are_answered_in_their_order():
    work = 5 * rate_of(series())
    few, many = judged(Load(work), slots("aggregated", 1), slots("aggregated", 6))
    assert few.miss > 0.5 > many.miss


def test_work_that_waits_comes_first():
    work = rate_of(series())
    calm, late = (judged(Load(work, backlog), slots("aggregated", 1))[0] for backlog in (0.0, 10.0))
    assert late.miss > calm.miss


def test_what_workers_have_to_compute_does_not_count_twice():
    """The backlog includes it."""
    work = rate_of(series())
    own = slots("aggregated", 1, waiting_tokens=100_000)
    (once,) = judged(Load(work), own)
    (told,) = judged(Load(work, 2.5), own)
    assert told.miss == once.miss


def test_slots_keep_their_fields():
    work = 2 * rate_of(series())
    plain, slow, late, full = judged(
        Load(work),
        slots("aggregated", 2),
        slots("aggregated", 2, speed=3.0),
        slots("aggregated", 2, ready_in=5.0),
        slots("aggregated", 2, kv_tokens=4000),
    )
    assert plain.miss < min(slow.miss, late.miss, full.miss)


def test_fewer_workers_may_remember_less():
    arrivals = tuple(
        one._replace(cached_tokens=one.prompt_tokens // 2, work=one.work / 2)
        for one in series().arrivals
    )
    traffic = series(arrivals=arrivals)
    kept, lost = (
        WhatIfJudge().judge(traffic, LIMITS, Load(1.0, cached=cached), [slots("aggregated", 2)])[0]
        for cached in (1.0, 0.0)
    )
    assert lost.wait_p95 > 1.3 * kept.wait_p95


def test_no_objective_is_no_limit():
    (outcome,) = WhatIfJudge().judge(series(), (None, None), Load(50.0), [slots("aggregated", 1)])
    assert outcome.miss == 0


def test_other_traffic_is_refused():
    with pytest.raises(TypeError, match="DemandSeries"):
        WhatIfJudge().judge(object(), LIMITS, Load(1.0), [])


def test_the_rule_of_handoffs_is_the_clusters():
    pool = PoolCandidate((Slot("prefill"), Slot("decode")))
    (never,) = judged(Load(1.0), pool, judge=WhatIfJudge(Handoffs("never")))
    assert never.utilisation["prefill"] == 0


PAIR = (Slot("prefill"), Slot("decode"))


def test_workers_say_how_they_decide():
    said = PoolCandidate(tuple(slot._replace(disagg="never") for slot in PAIR))
    (never,) = judged(Load(1.0), said)
    assert never.utilisation["prefill"] == 0
    (odd,) = judged(Load(1.0), PoolCandidate(tuple(s._replace(disagg="odd") for s in PAIR)))
    assert odd.utilisation["prefill"] > 0


def test_transfers_take_what_was_measured_or_else_what_such_paths_take():
    def handoffs(**about: Any) -> float:
        told = PoolCandidate(tuple(slot._replace(**about) for slot in PAIR))
        return WhatIfJudge().judge(series(), LIMITS, Load(0.5), [told])[0].causes.get("handoff", 0)

    assert handoffs() < 0.01
    assert handoffs(transfer_token=1e-3) > 0.5
    assert handoffs(transfer_token=1e-3, measured_token=1e-7) < 0.01
    assert handoffs(measured_token=1e-3) > 0.5


def test_one_measured_path_tells_of_the_others():
    pool = PoolCandidate((Slot("prefill"), Slot("decode", measured_token=1e-3), Slot("decode")))
    slow = WhatIfJudge().judge(series(), LIMITS, Load(0.5), [pool])[0]
    assert slow.causes["handoff"] > 0.5


@pytest.mark.parametrize(
    ("load", "slot", "other"),
    [
        (Load(1.0, backlog=1e12), {}, {}),
        (Load(1.0), {"streams": 2**40, "stream_tokens": 2**40}, {}),
        (Load(1.0), {"streams": 2**40, "max_sequences": 2**60}, {}),
        (Load(1.0), {"streams": 10, "stream_tokens": 2**62}, {}),
        (Load(1.0), {}, {"times": LatencyModel(1e17, 1e17, 1e17, 1e17, 1e17, 1e17, True)}),
        (Load(1.0), {}, {"lengths": (FinishedRequest(2000, 0, 2**60),)}),
        (Load(1.0), {}, {"arrivals": tuple(RecentArrival(100.0 + n, 2**60) for n in range(9))}),
        (
            Load(1.0),
            {},
            {"arrivals": (RecentArrival(100.0, 20, work=0.1, weight=1e12),)},
        ),
    ],
)
def test_absurd_figures_take_no_longer_than_sensible_ones(load, slot, other):
    """They are peers', and a tick that never ends decides nothing for any model. Replayed one by
    one these would take hours, or more memory than there is."""
    judge = WhatIfJudge(seeds=1)
    (outcome,) = judge.judge(series(**other), LIMITS, load, [slots("aggregated", 2, **slot)])
    assert 0.0 <= outcome.miss <= 1.0


def lengthened(seconds: float) -> DemandSeries:
    """Four prompts a second; those of the last seconds are ten times as long, with long answers."""
    arrivals = []
    for number in range(1200):
        at = 0.25 * number
        tokens = 6000 if at >= 300.0 - seconds else 600
        arrivals.append(RecentArrival(at, tokens + number % 50, work=MODEL.prefill(tokens)))
    lengths = tuple(FinishedRequest(6000, 0, 2000) for _ in range(100))
    return series(arrivals=tuple(arrivals), lengths=lengths)


def test_a_new_mix_is_replayed_for_longer_than_it_has_lasted():
    """Streams of 2,000 tokens fill eight sequences of four workers only after seconds."""
    pool = slots("aggregated", 4, max_sequences=8)
    load = Load(4 * MODEL.prefill(6000))
    soon, later, whole = (
        WhatIfJudge().judge(lengthened(seconds), LIMITS, load, [pool])[0].miss
        for seconds in (6.0, 20.0, 60.0)
    )
    assert 0.3 < soon < later
    assert later == pytest.approx(whole, abs=0.1)


def test_while_a_router_is_silent_all_arrivals_are_replayed():
    """Of it there are none, and what the others bring alone is no new mix."""
    pool = slots("aggregated", 4, max_sequences=8)
    load, known = Load(4 * MODEL.prefill(6000)), lengthened(20.0)
    silent = replace(known, health=DemandHealth(9.0, silent=(NodeId("r"),)))
    (new,), (all_,) = (WhatIfJudge().judge(one, LIMITS, load, [pool]) for one in (known, silent))
    assert all_.causes != new.causes
    assert all_.miss == pytest.approx(
        WhatIfJudge().judge(lengthened(0.0), LIMITS, load, [pool])[0].miss, abs=0.1
    )


def test_a_worker_with_streams_has_room_for_more():
    """It is at work all the time, and four of its 256 sequences are in use."""
    traffic = series(1.0, lengths=tuple(FinishedRequest(2000, 0, 400) for _ in range(50)))
    pair = PoolCandidate((Slot("prefill", max_sequences=256), Slot("decode", max_sequences=256)))
    (outcome,) = WhatIfJudge(Handoffs("always")).judge(traffic, LIMITS, Load(0.1), [pair])
    assert outcome.utilisation["decode"] < 0.1
    full = PoolCandidate((Slot("prefill"), Slot("decode", max_sequences=1)))
    (outcome,) = WhatIfJudge(Handoffs("always")).judge(traffic, LIMITS, Load(0.1), [full])
    assert outcome.utilisation["decode"] > 0.5
