"""Room set aside for prompts that are prefilled elsewhere, by the scheduler's own rules."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.engine_core.executor import StepResult
from pdserve.engine_core.scheduler.reservations import BlockReservations
from pdserve.engine_core.scheduler.scheduler import Scheduler
from pdserve.engine_core.scheduler.scheduler_state import SchedulerLimits
from pdserve.engine_core.scheduler.sequence import SequenceStatus
from pdserve.errors import InvalidRequest, Overloaded
from pdserve.kv.block_pool import BlockPool
from pdserve.messages.handoff import FirstToken, Handoff
from pdserve.messages.request import FirstTokenStats, GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids

SIZE = 4


def request(length: int, **changes: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([5] * length),
        sampling=sampling,
        **changes,  # type: ignore[arg-type]
    )


def scheduler(blocks: int = 20, unfilled: float = 0.5, **limits: int) -> Scheduler:
    given: dict[str, Any] = {"max_sequences": 4} | limits
    bounds = SchedulerLimits(max_model_len=100, vocab_size=50, unfilled=unfilled, **given)
    return Scheduler(BlockPool(blocks, SIZE), bounds)


def handoff(tokens: int) -> Handoff:
    return Handoff(
        tokens=tokens, parts=1, first=(FirstToken(9),), started=FirstTokenStats(0, 0, 0, 0)
    )


def test_budgets_are_counted_until_they_end():
    reservations = BlockReservations(10)
    some = scheduler()
    for handle in (1, 2):
        some.submit_remote(handle, request(8), 0.0)
        reservations.waiting.push(some.stem_of(handle))
    first, second = some.stem_of(1), some.stem_of(2)
    assert reservations.first() is first
    reservations.give(first, 7)
    assert (reservations.unfilled, reservations.unbound, len(reservations)) == (7, 7, 1)
    assert reservations.allows(3)
    assert not reservations.allows(4)
    reservations.bind(1)
    assert (reservations.unfilled, reservations.unbound) == (7, 0)
    reservations.unbind(1)
    reservations.unbind(1)
    assert reservations.unbound == 7
    reservations.end(first)
    reservations.end(first)
    reservations.end(second)
    assert (reservations.unfilled, reservations.unbound, len(reservations)) == (0, 0, 0)
    assert reservations.first() is None


def test_one_always_fits_however_large_and_the_next_waits_in_order():
    some = scheduler(unfilled=0.1)
    some.submit_remote(1, request(40), 0.0)
    some.submit_remote(2, request(4), 0.0)
    some.submit_remote(3, request(4, priority=1), 0.0)
    assert some.reserve(0.0) == [(3, 0)]
    assert not some.may_reserve
    some.abort(3)
    assert some.reserve(0.0) == [(1, 0)]
    some.prefill_here(1)
    assert some.reserve(0.0) == [(2, 0)]


def test_local_admission_leaves_room_for_what_was_reserved():
    some = scheduler(blocks=10)
    some.submit_remote(1, request(20), 0.0)
    assert some.reserve(0.0) == [(1, 0)]
    some.submit(2, request(24), 0.0)
    assert not some.schedule(0.0).chunks
    assert not some.has_work
    found = some.bind(1)
    assert found is not None
    assert not some.schedule(0.0).chunks
    some.activate(1, *found, handoff(20), 1.0)
    some.abort(1)
    assert some.schedule(0.0).chunks


def test_nobody_overtakes_who_waits_for_blocks():
    """Neither a later local one, nor a later remote one; by order of arrival over both."""
    some = scheduler(blocks=12, unfilled=1.0)
    some.submit(1, request(24), 0.0)
    plan = some.schedule(0.0)
    assert plan.chunks
    some.submit_remote(2, request(24), 0.0)  # 6 blocks, where 6 are left less one to grow
    assert some.reserve(0.0) == []
    some.submit(3, request(4), 0.0)
    assert [chunk.sequence.handle for chunk in some.schedule(0.0).chunks] == [1]
    some.abort(2)
    assert [chunk.sequence.handle for chunk in some.schedule(0.0).chunks] == [1, 3]
    some.submit(4, request(24), 0.0)
    assert [chunk.sequence.handle for chunk in some.schedule(0.0).chunks][-1] == 3
    some.submit_remote(5, request(4), 0.0)
    assert some.reserve(0.0) == []
    some.abort(4)
    assert some.reserve(0.0) == [(5, 0)]


def test_who_waits_for_the_limit_alone_stops_nobody():
    some = scheduler(blocks=20, unfilled=0.1)
    some.submit_remote(1, request(20), 0.0)
    some.submit_remote(2, request(20), 0.0)
    assert some.reserve(0.0) == [(1, 0)]
    some.submit(3, request(8), 0.0)
    assert [chunk.sequence.handle for chunk in some.schedule(0.0).chunks] == [3]


def test_remote_prompts_are_no_work_here_and_count_as_waiting():
    some = scheduler(max_waiting=2)
    some.submit_remote(1, request(20), 0.0)
    assert (some.uncomputed(), some.num_waiting, some.has_work) == (0, 1, False)
    some.reserve(0.0)
    assert some.num_waiting == 0
    some.submit(2, request(4), 0.0)
    with pytest.raises(Overloaded):
        some.submit_remote(3, request(4), 0.0)


def test_what_can_only_be_computed_here_is_refused():
    some = scheduler()
    for bad in (request(4, n=2, output=[[1], [2]]), request(4, output=[[1] * 8])):
        with pytest.raises(InvalidRequest):
            some.submit_remote(1, bad, 0.0)
    assert some.handles() == []


def test_an_activated_sequence_waits_with_its_blocks_and_runs_first():
    some = scheduler(max_sequences=1)
    some.submit(1, request(4), 0.0)
    some.schedule(0.0)
    some.submit(2, request(4), 0.0)
    some.submit_remote(3, request(8), 0.0)
    some.reserve(0.0)
    found = some.bind(3)
    assert found is not None
    (delta,) = some.activate(3, *found, handoff(8), 1.0)
    assert (delta.tokens, delta.finish) == ([9], None)
    assert [sequence.status for sequence in some.ready] == [SequenceStatus.READY]
    assert [chunk.sequence.handle for chunk in some.schedule(1.0).chunks] == [1]
    some.abort(1)
    (chunk,) = some.schedule(1.0).chunks
    assert (chunk.sequence.handle, chunk.start, chunk.count, chunk.samples) == (3, 8, 1, True)


def test_steps_are_not_foreseen_while_somebody_may_join():
    some = scheduler()
    some.submit(1, request(4), 0.0)
    plan = some.schedule(0.0)
    some.complete(plan, StepResult([5], [None]), 0.0)
    assert some.steady(5) == 5
    some.submit_remote(2, request(8), 0.0)
    assert some.steady(5) == 0
    some.reserve(0.0)
    assert some.steady(5) == 5
    found = some.bind(2)
    assert found is not None
    some.activate(2, *found, handoff(8), 1.0)
    assert some.steady(5) == 0
