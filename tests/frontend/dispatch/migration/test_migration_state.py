from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdserve import errors
from pdserve.frontend.dispatch.migration.migration_state import (
    Exclusions,
    LifeStatus,
    PoisonTracker,
    ReceivedTokens,
    WorkerDeath,
    migration_reason,
    outweighs,
    prewarm_request,
)
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.request import GenerateRequest, SamplingParams, TokenDelta, TokenLogprob

if TYPE_CHECKING:
    from pdserve.errors import PdserveError

A, B, C = (NodeLife(NodeId(name), 1) for name in "abc")


def request(n: int = 1, **changes: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=900, temperature=0.7, seed=3, stop_token_ids=(4,))
    fields: dict[str, Any] = {"request_id": "r", "model": "m", "prompt": [1, 2], "n": n}
    return GenerateRequest(**{"sampling": sampling} | fields | changes)


# ---------------------------------------------------------------------- why it goes on


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("WorkerLost", "worker_lost"),
        ("LinkLost", "worker_lost"),
        ("DialTimeout", "worker_lost"),
        ("EngineDied", "engine_died"),
        ("EngineStalled", "engine_stalled"),
        ("StepFailed", "step_failed"),
        ("Draining", "drain"),
        ("NotReady", "not_ready"),
    ],
)
def test_what_another_worker_may_cure(name: str, reason: str) -> None:
    assert migration_reason(getattr(errors, name)("words")) == reason


def test_all_else_is_final() -> None:
    final = {
        *("InvalidRequest", "ContextLengthExceeded", "PayloadTooLarge", "DeadlineExceeded"),
        *("EngineError", "Cancelled", "Overloaded", "NoWorker", "NoRouter", "Poisoned"),
    }
    for name in final:
        kind: type[PdserveError] = getattr(errors, name)
        assert migration_reason(kind("words")) is None, name


def test_only_that_a_worker_goes_is_news() -> None:
    assert outweighs("drain", "kv")
    assert not outweighs("drain", "drain")
    assert not outweighs("itl", "kv")


# ---------------------------------------------------------------------- what has come


def test_nothing_received_is_the_request_itself() -> None:
    wanted = request(n=2)
    assert ReceivedTokens(wanted).continuation(wanted) is wanted


def test_a_continuation_has_every_token_of_every_choice() -> None:
    wanted = request(n=3)
    received = ReceivedTokens(wanted)
    first, second = list(range(700)), [2**31, 5]
    for token in first:
        received.take(0, [token])
    received.take(1, second)
    received.ended.add(1)
    went_on = received.continuation(wanted)
    assert went_on.output == [first, second, []]
    assert went_on.ended == (1,)
    assert (went_on.prompt, went_on.sampling) == (wanted.prompt, wanted.sampling)
    assert (received.live, received.longest, received.shortest) == ([0, 2], 700, 0)


def test_what_was_given_before_is_given_again() -> None:
    wanted = request(n=2, output=[[5], [6, 7]], ended=(1,))
    received = ReceivedTokens(wanted)
    received.take(0, [8])
    assert received.continuation(wanted).output == [[5, 8], [6, 7]]
    assert received.continuation(wanted).ended == (1,)


def test_logprobs_of_the_prompt_are_dropped_once_every_choice_has_them() -> None:
    wanted = request(n=2, sampling=SamplingParams(max_tokens=9, prompt_logprobs=1))
    received = ReceivedTokens(wanted)
    told = [TokenLogprob(2, -1.0, 1, [])]
    for choice, left in ((0, 1), (1, None)):
        received.take(choice, [7])
        once = received.scored_once(TokenDelta(0, choice, [7], prompt_logprobs=told))
        again = received.scored_once(TokenDelta(0, choice, [8], prompt_logprobs=told))
        assert (once.prompt_logprobs, again.prompt_logprobs) == (told, None)
        assert again.tokens == [8]
        assert received.continuation(wanted).sampling.prompt_logprobs == left


def test_a_warm_up_wants_one_token_of_one_choice() -> None:
    sampling = SamplingParams(max_tokens=9, logprobs=3, prompt_logprobs=1, min_tokens=8)
    wanted = request(n=4, sampling=sampling, ended=(2,), cache_salt="s")
    made = prewarm_request(wanted, [5, 6], A, 4.0)
    assert (made.n, made.output, made.ended, made.cache_salt) == (1, [[5, 6]], (), "s")
    assert made.sampling == SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    assert (made.source, made.source_epoch, made.deadline) == ("a", 1, 4.0)
    assert prewarm_request(wanted, [5, 6], None, 4.0).source == ""


# ---------------------------------------------------------------------- who is left out


def test_workers_are_left_out_for_a_life_or_a_while() -> None:
    left_out = Exclusions()
    assert not left_out
    left_out.add(A, None)
    left_out.add(B, 10.0)
    present: dict[NodeId, int] = {A[0]: 1, B[0]: 1}
    assert left_out.at(5.0, present.get) == ("a", "b")
    assert left_out.next_end(5.0) == 10.0
    assert left_out.at(10.0, present.get) == ("a",)
    assert left_out.next_end(10.0) is None
    del present[A[0]]
    assert left_out.at(10.0, present.get) == ("a",), "routers may not have heard"
    present[A[0]] = 2
    assert left_out.at(10.0, present.get) == ()


def test_what_was_for_life_may_end_after_all() -> None:
    left_out = Exclusions()
    left_out.add(A, None)
    left_out.add(B, 3.0)
    left_out.relax(5.0)
    present: dict[NodeId, int] = {A[0]: 1, B[0]: 1}
    assert left_out.at(4.0, present.get) == ("a",)
    assert left_out.at(5.0, present.get) == ()


# ---------------------------------------------------------------------- who died


def test_dead_engines_count_at_once_and_lost_workers_when_they_are_known_to_be_dead() -> None:
    standings: dict[NodeLife, LifeStatus] = {A: "here", B: "doubtful", C: "here"}
    standing = standings.__getitem__
    deaths = PoisonTracker(2)
    deaths.add(WorkerDeath(C, "drain", 0.0, alone=True))
    deaths.add(WorkerDeath(C, "not_ready", 0.0, alone=True))
    assert not deaths.suspect(0.0, standing)
    deaths.add(WorkerDeath(A, "engine_died", 0.0, alone=False))
    assert deaths.suspect(90.0, standing)
    deaths.add(WorkerDeath(B, "worker_lost", 0.0, alone=True))
    assert deaths.condemn(standing) == []
    assert deaths.may_condemn(standing)
    standings[B] = "died"
    assert deaths.condemn(standing) == ["a", "b"]
    standings[B] = "gone"
    assert deaths.condemn(standing) == []
    assert not deaths.may_condemn(standing)
    deaths.clear()
    assert not deaths.suspect(0.0, standing)


def test_nobody_is_condemned_for_what_happened_in_company() -> None:
    deaths = PoisonTracker(3)
    for number in range(4):
        assert deaths.suspect(0.0, lambda life: "died") == (number > 1)
        deaths.add(WorkerDeath(A, "engine_died", 0.0, alone=False))
        assert deaths.condemn(lambda life: "died") == []
    deaths.add(WorkerDeath(B, "worker_lost", 0.0, alone=True))
    assert deaths.condemn(lambda life: "died") == ["a", "a", "a", "a", "b"]
    assert deaths.condemn(lambda life: "here") == [], "that one is still there"


def test_who_was_lost_a_moment_ago_may_be_dead() -> None:
    deaths = PoisonTracker(2)
    deaths.add(WorkerDeath(A, "worker_lost", 10.0, alone=False))
    assert deaths.suspect(10.0, lambda life: "here")
    assert not deaths.suspect(16.0, lambda life: "here")
    assert deaths.suspect(16.0, lambda life: "doubtful")


def test_with_a_limit_of_one_the_first_death_condemns_and_without_none_does() -> None:
    for limit, dead in ((1, ["a"]), (0, [])):
        deaths = PoisonTracker(limit)
        deaths.add(WorkerDeath(A, "engine_died", 0.0, alone=False))
        assert deaths.condemn(lambda life: "died") == dead
        assert not deaths.suspect(0.0, lambda life: "died")
