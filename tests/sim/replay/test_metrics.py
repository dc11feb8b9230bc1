"""Numbers from records."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.messages.request import FirstTokenStats, TokenDelta
from pdserve.messages.tiers import CachedSource
from pdserve.sim.replay.config import ReplaySlo
from pdserve.sim.replay.metrics import (
    balance,
    errors_by_bucket,
    jain,
    meets_slo,
    prefills,
    quantile,
    spread,
    summary,
    tokens_by_source,
    weighted_spread,
)
from pdserve.sim.replay.plot import hit_rates
from pdserve.sim.replay.record import OUTCOMES, ReplayRecord


def record(number: int = 0, ttft: float = 1.0, **changes) -> ReplayRecord:
    values: dict[str, Any] = {
        "number": number,
        "arrival": 10.0,
        "prompt_tokens": 100,
        "wanted_tokens": 11,
        "output_tokens": 11,
        "first": 10.0 + ttft,
        "end": 10.0 + ttft + 2.0,
        "worker": "a",
        "outcome": "completed",
    }
    return ReplayRecord(**(values | changes))


def cold(length: int) -> float:
    return length / 100


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1), (0.5, 5), (0.51, 6), (0.9, 9), (0.99, 10), (1.0, 10)]
)
def test_quantiles_are_values_that_occurred(share: float, value: float) -> None:
    assert quantile(list(range(1, 11)), share) == value


def test_nothing_has_no_quantiles() -> None:
    assert spread([]) == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}


def test_jain_is_one_for_equals_and_least_for_one_who_has_all() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain([0.0, 0.0]) == 1.0


def test_values_that_occur_often_weigh_so_much() -> None:
    assert weighted_spread([(2.0, 10), (1.0, 90)]) == {
        "mean": 1.1,
        "p50": 1.0,
        "p90": 1.0,
        "p99": 2.0,
    }
    assert weighted_spread([]) == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}


def delta(tokens: int, prefill: str = "") -> TokenDelta:
    started = FirstTokenStats(0, 0.0, 0.1, 0.1, 90, prefill) if prefill else None
    return TokenDelta(1, 0, [7] * tokens, started=started)


def test_what_comes_at_once_came_evenly() -> None:
    one = record(first=-1.0, output_tokens=0)
    for at, tokens in ((11.0, 1), (11.5, 1), (13.5, 4)):
        one.take(delta(tokens), at)
    assert one.steps == [(0.5, 1), (0.5, 4)]
    assert "gaps" not in one.plain()


def test_where_a_prompt_was_prefilled_is_kept_as_the_header_says_it() -> None:
    one = record(first=-1.0, output_tokens=0)
    one.take(delta(1, "remote; node=p1; reason=rule"), 11.0)
    other = record(first=-1.0, output_tokens=0)
    other.take(delta(1, "local; node=a; reason=short_prompt"), 11.0)
    assert (one.prefill, one.prefill_worker, one.prefill_reason) == ("remote", "p1", "rule")
    assert prefills([one, one, other, record()]) == {
        "remote_share": pytest.approx(2 / 3),
        "remote": {"rule": 2},
        "local": {"short_prompt": 1},
        "received_tokens": 270,
    }


def test_prefill_workers_are_compared_with_each_other() -> None:
    remote = record(prefill="remote", prefill_worker="p1", received_tokens=100)
    modes = {"a": "decode", "p1": "prefill", "p2": "prefill"}
    assert balance([remote], modes) == pytest.approx(0.5)  # type: ignore[arg-type]


def test_times_of_a_record() -> None:
    assert record().ttft == pytest.approx(1.0)
    assert record().itl == pytest.approx(0.2)
    assert record(output_tokens=1).itl == -1.0
    assert record(first=-1.0).ttft == -1.0


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"ttft": 3.0}, True),
        ({"ttft": 3.01}, False),
        ({"ttft": 1.0, "end": 20.0}, False),
        ({"ttft": 1.0, "outcome": "failed"}, False),
        ({"ttft": 4.0, "prompt_tokens": 200}, True),
    ],
)
def test_good_is_soon_enough_and_fast_enough(changes, wanted: bool) -> None:
    slo = ReplaySlo(ttft=1.0, cold=2.0, itl=0.5)
    assert meets_slo(record(**changes), slo, cold) is wanted


def test_a_summary_counts_everybody_once() -> None:
    records = [record(i, outcome=outcome) for i, outcome in enumerate(OUTCOMES)]
    records += [record(99, cached_tokens=50)]
    numbers = summary(records, ReplaySlo(), cold, {"a": "aggregated", "b": "aggregated"})
    assert numbers["outcomes"] == dict.fromkeys(OUTCOMES, 1) | {"completed": 2}
    assert numbers["requests"] == len(OUTCOMES) + 1
    assert numbers["hit_rate"] == pytest.approx(0.25)
    assert numbers["good"] == pytest.approx(2 / 9)
    assert numbers["balance"] == pytest.approx(0.5)


def test_prompt_tokens_by_source_add_up() -> None:
    brought = FirstTokenStats(
        80, 0.0, 0.1, 0.1, sources=(CachedSource("host", 30), CachedSource("peer", 20, "b"))
    )
    made = record(cached_tokens=80)
    made.take(TokenDelta(1, 0, [], started=brought), 1.0)
    found = tokens_by_source([made, record(1)])
    assert found == {"computed": 120, "device": 30, "host": 30, "disk": 0, "peer": 20}


def test_predictions_are_judged_by_uncached_length() -> None:
    records = [
        record(0, predicted=0.5),
        record(1, predicted=2.0, prompt_tokens=5000, cached_tokens=4600),
        record(2, predicted=1.0, prompt_tokens=90_000),
        record(3),
    ]
    buckets = errors_by_bucket(records)
    assert list(buckets) == ["to 512", "over 32768"]
    assert buckets["to 512"]["count"] == 2
    assert buckets["to 512"]["ratio_p10"] == pytest.approx(0.5)
    assert buckets["to 512"]["ratio_p90"] == pytest.approx(2.0)
    assert buckets["over 32768"]["error_p50"] == pytest.approx(0.0)


def test_hit_rates_over_time() -> None:
    records = [record(i, arrival=float(i), cached_tokens=100 * (i >= 30)) for i in range(61)]
    points = list(hit_rates(records))
    assert [rate for at, rate in points if at < 29] == [0.0] * 29
    assert {rate for at, rate in points if at > 31} == {1.0}
    assert list(hit_rates([])) == []
