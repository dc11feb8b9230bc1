"""Whole replays: small clusters, every request accounted for."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from pdserve.errors import ConfigError
from pdserve.frontend.dispatch.cluster_client import ClusterClient
from pdserve.frontend.routing_hints import NO_HINTS
from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.replay.run import ReplayFailed, ReplayResult, replay
from pdserve.sim.workloads.generate import Agentic, MultiTurn, SharedPrefix, Unique
from pdserve.sim.workloads.trace_request import TraceRequest

SMALL = ReplayConfig(workers=3, block_size=64, kv_tokens=64_000, policy="ttft", seed=1)


def run(config: ReplayConfig, trace) -> ReplayResult:
    return replay(config, iter(trace))


@pytest.mark.parametrize(
    "trace",
    [
        Unique(requests=40, rate=5.0, input=500, output=20),
        SharedPrefix(requests=40, rate=5.0, groups=4, prefix=640, question=100, output=20),
        MultiTurn(requests=40, rate=2.0, question=100, output=30, pause=1.0),
        Agentic(requests=40, rate=1.0, system=500, context=500, step_input=100, output=20),
    ],
    ids=lambda trace: trace.kind,
)
def test_each_request_ends_once_and_well(trace) -> None:
    result = run(SMALL, trace)
    assert [record.number for record in result.records] == list(range(40))
    assert {record.outcome for record in result.records} == {"completed"}
    for record in result.records:
        assert record.output_tokens == record.wanted_tokens
        assert record.arrival <= record.routed <= record.first <= record.end
        assert 0 <= record.cached_tokens < record.prompt_tokens
    assert sum(w["finished"] for w in result.workers) == 40
    assert sum(w["prompt_tokens"] for w in result.workers) == sum(
        record.prompt_tokens for record in result.records
    )
    assert sum(w["cached_tokens"] for w in result.workers) == sum(
        record.cached_tokens for record in result.records
    )
    assert sum(result.summary["outcomes"].values()) == 40


def test_a_later_turn_finds_the_earlier_ones_in_the_cache() -> None:
    trace = MultiTurn(requests=60, rate=0.5, question=200, output=100, system=500, pause=2.0)
    result = run(replace(SMALL, workers=1), trace)
    records = {record.number: record for record in result.records}
    followed = [request for request in trace if request.after is not None]
    assert followed
    for request in followed:
        assert request.after is not None
        before, now = records[request.after], records[request.number]
        said = before.prompt_tokens + before.output_tokens
        assert now.prompt_tokens == said + request.pieces[0][1]
        # The last token of an answer has no KV; full blocks alone are kept.
        assert now.cached_tokens >= (said - 1) // 64 * 64
        assert now.arrival >= before.end + request.pause - 1e-6


@pytest.mark.parametrize("policy", ["ttft", "kv_load", "mooncake", "sticky"])
def test_routers_know_where_prefixes_are(policy: str) -> None:
    """Chance alone finds one of four workers."""
    trace = SharedPrefix(requests=160, rate=4.0, groups=20, prefix=6400, question=64, output=8)
    config = replace(SMALL, workers=4, kv_tokens=640_000)
    knowing, blind = (run(replace(config, policy=p), trace).summary for p in (policy, "random"))
    assert knowing["hit_rate"] > blind["hit_rate"] + 0.1
    assert knowing["hit_rate"] > 0.7


GAP = [TraceRequest(0, 0.0, ((0, 500),), 2_000), TraceRequest(1, 900.0, ((0, 500),), 20)]
"""The first answer takes seconds, the second request finds it cached."""


def test_of_an_idle_time_the_last_part_is_replayed() -> None:
    whole, short = (replay(SMALL, iter(GAP), most_idle=idle) for idle in (inf, 60.0))
    assert [one.arrival for one in short.records] == pytest.approx([0.0, 900.0])
    for record, same in zip(short.records, whole.records, strict=True):
        assert record.end == pytest.approx(same.end)
        assert record.ttft == pytest.approx(same.ttft)
        assert record.cached_tokens == same.cached_tokens
    first, second = short.records
    assert first.end > 2.0, "it is not idle before"
    lived = [at for at, _ in short.load if first.end < at < second.arrival]
    assert len(lived) == pytest.approx(60.0 / SMALL.sample_every, abs=2)


def test_a_follower_that_pauses_is_no_idle_time() -> None:
    first = TraceRequest(0, 0.0, ((0, 500),), 20, "s")
    after = TraceRequest(1, 0.0, ((1, 10),), 20, "s", 0, pause=300.0)
    later = TraceRequest(2, 1000.0, ((2, 500),), 20)
    result = replay(SMALL, iter((first, after, later)), most_idle=60.0)
    one, other, last = result.records
    assert other.arrival == pytest.approx(one.end + 300.0)
    assert last.arrival == pytest.approx(1000.0)
    lived = [at for at, _ in result.load if one.end < at < other.arrival]
    assert len(lived) == pytest.approx(300.0 / SMALL.sample_every, abs=2)


def test_what_follows_a_request_that_was_refused_is_not_asked() -> None:
    long = TraceRequest(0, 0.0, ((0, 70_000),), 5, "s")
    after = TraceRequest(1, 0.0, ((1, 10),), 5, "s", 0)
    other = TraceRequest(2, 0.0, ((2, 10),), 5)
    result = run(replace(SMALL, kv_tokens=6400), [long, after, other])
    assert [record.outcome for record in result.records] == ["failed", "not asked", "completed"]
    assert "ContextLengthExceeded" in result.records[0].reason


def test_more_than_routers_may_hold_is_rejected_and_nothing_is_lost() -> None:
    config = replace(SMALL, workers=1, router_options={"hold_limit": "3"})
    burst = [TraceRequest(i, 0.0, ((i, 20_000),), 2) for i in range(20)]
    outcomes = run(config, burst).summary["outcomes"]
    assert outcomes["rejected"] > 0
    assert outcomes["completed"] > 3
    assert outcomes["rejected"] + outcomes["completed"] == 20


def test_a_deadline_ends_what_takes_too_long() -> None:
    config = replace(SMALL, workers=1, patience=0.5)
    burst = [TraceRequest(i, 0.0, ((i, 20_000),), 2) for i in range(10)]
    outcomes = run(config, burst).summary["outcomes"]
    assert outcomes["deadline"] > 0
    assert outcomes["deadline"] + outcomes["completed"] + outcomes["rejected"] == 10


@pytest.mark.parametrize("routers", [2, 4])
def test_several_routers_share_the_work(routers: int) -> None:
    config = replace(SMALL, routers=routers, frontends=3 * routers)
    result = run(config, Unique(requests=60, rate=10.0, input=500, output=20))
    assert result.summary["outcomes"]["completed"] == 60


def test_one_seed_is_one_replay_and_another_is_another() -> None:
    trace = SharedPrefix(requests=60, rate=10.0, groups=4, prefix=640, question=100, output=20)
    noisy = replace(SMALL, noise=0.3, routers=2, frontends=3)
    one, same, other = (run(replace(noisy, seed=seed), trace).plain() for seed in (1, 1, 2))
    assert one == same
    assert one["requests"] != other["requests"]


def test_a_slow_worker_does_not_get_more_than_its_share() -> None:
    trace = Unique(requests=200, rate=8.0, input=4000, output=20)
    result = run(replace(SMALL, workers=4, slow_share=0.25, slow_factor=3.0), trace)
    computed = [worker["computed_tokens"] for worker in result.workers]
    assert computed[-1] < min(computed[:-1])


def test_a_long_system_prompt_of_all_does_not_send_all_to_one() -> None:
    trace = SharedPrefix(requests=150, rate=60.0, groups=1, prefix=8192, question=500, output=50)
    result = run(replace(SMALL, workers=4, kv_tokens=640_000), trace)
    shares = [worker["finished"] / 150 for worker in result.workers]
    assert max(shares) < 0.6
    assert result.summary["hit_rate"] > 0.5


def test_routers_do_not_know_how_long_an_answer_will_be() -> None:
    """Two traces that differ in nothing else begin alike."""
    short, long = (
        [TraceRequest(i, i / 100, ((i, 2000),), output) for i in range(12)] for output in (2, 900)
    )
    config = replace(SMALL, workers=12)
    a, b = (run(config, trace).records for trace in (short, long))
    assert a[0].worker == b[0].worker
    assert a[0].predicted == b[0].predicted


def test_predictions_are_made_and_judged() -> None:
    result = run(SMALL, Unique(requests=80, rate=5.0, input=2000, output=20))
    buckets = result.summary["prediction"]
    assert sum(one["count"] for one in buckets.values()) == 80
    assert all(one["ratio_p10"] <= one["ratio_p50"] <= one["ratio_p90"] for one in buckets.values())


def test_requests_of_the_warm_up_are_served_and_not_counted() -> None:
    trace = Unique(requests=80, rate=5.0, input=2000, output=20)
    whole, late = run(SMALL, trace), run(replace(SMALL, warm_up=8.0), trace)
    assert late.records == whole.records
    counted = [record for record in whole.records if record.arrival >= 8.0]
    assert 0 < late.summary["requests"] == len(counted) < 80


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workers": 0}, "workers must be at least 1"),
        ({"slow_share": 2.0}, "slow 2:1"),
        ({"noise": -1.0}, "noise"),
        ({"warm_up": -1.0}, "warm-up must not be negative"),
        ({"kv_tokens": 3}, "less than one block"),
        ({"policy": "tfft"}, "did you mean"),
        ({"router_options": {"hold": "1"}}, "routers have no option 'hold'"),
        ({"router_options": {"hold_work": "long"}}, "is no number"),
        ({"router_options": {"queue_order": "lifo"}}, "queue-order must be one of"),
        ({"engine_options": {"preset": "nothing"}}, "nothing"),
    ],
)
def test_what_is_not_possible_is_said(change, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(replace(SMALL, **change), [])


def test_a_trace_without_requests_is_over_at_once() -> None:
    result = run(SMALL, [])
    assert result.records == []
    assert result.summary["requests"] == 0


def test_a_request_is_asked_for_its_tenant_where_the_trace_says(monkeypatch) -> None:
    asked = {}

    async def note(self, request, sink, hints=NO_HINTS, on_placed=None, **others):
        asked[request.request_id] = (self._node.id, hints.tenant, hints.weight, request.priority)
        return await real(self, request, sink, hints, on_placed, **others)

    real = ClusterClient.open
    monkeypatch.setattr(ClusterClient, "open", note)
    trace = [
        TraceRequest(0, 0.0, ((0, 10),), 2),
        TraceRequest(1, 0.0, ((1, 10),), 2, tenant="a", weight=3.0, priority=2, frontend=0),
    ]
    result = run(replace(SMALL, frontends=2, routers=2), trace)
    assert asked == {"r0": ("frontend-0", "", 1.0, 0), "r1": ("frontend-0", "a", 3.0, 2)}
    assert [record.tenant for record in result.records] == ["", "a"]
    assert {record.router for record in result.records} <= {"router-0", "router-1"}
    assert all(record.router for record in result.records)


def test_a_request_that_an_error_in_a_callback_lost_is_not_waited_for(monkeypatch) -> None:
    """Without an end to it, virtual time would go on for ever."""

    def break_off(channel: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("pdserve.worker.request_streams._FrontendStream._flush", break_off)
    with pytest.raises(ReplayFailed, match=r"1 errors in callbacks: .*ZeroDivisionError"):
        run(SMALL, Unique(requests=1, rate=5.0, input=500, output=20))
