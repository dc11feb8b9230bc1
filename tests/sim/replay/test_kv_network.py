"""Moving KV in a replay takes the time that its bytes would take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.replay.run import ReplayResult, replay
from pdserve.sim.workloads.generate import MultiTurn, Unique
from pdserve.sim.workloads.trace_request import TraceRequest
from pdserve.worker.disagg.policy import PrefillCosts

SPLIT = ReplayConfig(
    workers=0,
    prefill=1,
    decode=2,
    disagg="always",
    block_size=64,
    kv_tokens=64_000,
    policy="round_robin",
    seed=1,
)
TOKEN_BYTES = 131_072
"""Of the default preset."""


def run(config: ReplayConfig, trace) -> ReplayResult:
    return replay(config, iter(trace))


def one(number: int, tokens: int, at: float = 0.0) -> TraceRequest:
    return TraceRequest(number, at, ((number, tokens),), 3)


def test_a_slow_network_delays_the_first_token_by_its_time() -> None:
    first = {}
    for bandwidth in (1e9, 1e15):
        (record,) = run(replace(SPLIT, bandwidth=bandwidth), [one(1, 2048)]).records
        first[bandwidth] = record.ttft
    # One chunk: nothing of it goes out while it is computed.
    assert first[1e9] - first[1e15] == pytest.approx(2048 * TOKEN_BYTES / 1e9, rel=0.01)


def test_two_that_share_a_sender_share_its_rate() -> None:
    config = replace(SPLIT, bandwidth=1e8)  # sending is by far the longest
    records = run(config, [one(1, 1000), one(2, 1000)]).records
    assert {record.worker for record in records} == {"decode-0", "decode-1"}
    alone = 1000 * TOKEN_BYTES / 1e8
    assert max(record.ttft for record in records) == pytest.approx(2 * alone, rel=0.05)


def test_two_that_share_nothing_do_not() -> None:
    config = replace(SPLIT, prefill=2, bandwidth=1e8)
    records = run(config, [one(1, 1000), one(2, 1000)]).records
    assert len({record.prefill_worker for record in records}) == 2
    alone = 1000 * TOKEN_BYTES / 1e8
    assert max(record.ttft for record in records) == pytest.approx(alone, rel=0.1)


@pytest.mark.parametrize("disagg", ["rule", "predict", "always", "never"])
def test_each_request_ends_once_whatever_is_chosen(disagg) -> None:
    trace = MultiTurn(requests=40, rate=2.0, question=700, output=30, pause=1.0)
    result = run(replace(SPLIT, disagg=disagg, workers=1), trace)
    assert {record.outcome for record in result.records} == {"completed"}
    chosen = [record for record in result.records if record.worker.startswith("decode")]
    assert all(record.prefill in ("remote", "local") for record in chosen)
    prefills = result.summary["prefills"]
    assert sum(prefills["remote"].values()) + sum(prefills["local"].values()) == len(chosen)
    assert result.summary["transfers"]["attempts_lost"] == 0
    if disagg != "predict":  # which may find that nobody is in the way here
        assert bool(prefills["remote"]) == (disagg != "never")


def test_streams_do_not_notice_prompts_that_are_prefilled_elsewhere() -> None:
    """A stream, then long prompts."""
    stream = TraceRequest(0, 0.0, ((0, 200),), 300)
    long = [one(number, 8000, at=0.5 + 0.1 * number) for number in range(1, 6)]
    longest = {}
    for disagg in ("always", "never"):
        config = replace(SPLIT, decode=1, disagg=disagg)
        records = run(config, [stream, *long]).records
        longest[disagg] = max(gap for gap, _ in records[0].steps)
    assert longest["never"] > 5 * longest["always"]


def test_unique_prompts_over_many_workers_leave_nothing() -> None:
    config = replace(SPLIT, prefill=2, routers=2, frontends=3, noise=0.3, bandwidth=2e9)
    result = run(config, Unique(requests=60, rate=10.0, input=3000, output=20))
    assert result.summary["outcomes"]["completed"] == 60


def test_a_decode_worker_begins_with_the_networks_true_rate(monkeypatch) -> None:
    guesses: list[float] = []
    guess = PrefillCosts.guess_transfer

    def watched(costs: PrefillCosts, token: float) -> None:
        guesses.append(token)
        guess(costs, token)

    monkeypatch.setattr(PrefillCosts, "guess_transfer", watched)
    config = replace(SPLIT, bandwidth=1e9, disagg="predict", prefill=2)
    (record,) = run(config, [one(1, 8000)]).records
    assert guesses[-1] == pytest.approx(TOKEN_BYTES / 1e9, rel=0.01)
    assert record.prefill_reason == "predicted_local"  # 1 s on the network, 0.2 s here
