"""The record of a hand-over, its ids, and answers to a cancelled transfer."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.errors import TransferRefused
from pdserve_engines.tensorrt_llm.handoff import (
    CancelAnswer,
    ContextState,
    attempt_id,
    cancel_answer,
    context_arguments,
    context_state,
    generation_arguments,
    make_ticket,
    read_state,
)
from tests.engines.tensorrt_llm.fake_llm import DisaggregatedParams

FIELDS = frozenset(field.name for field in fields(DisaggregatedParams))

states = st.builds(
    ContextState,
    request=st.integers(0, (1 << 63) - 1),
    first=st.integers(0, 1 << 20).map(lambda token: (token,)),
    state=st.binary(max_size=100),
    context_request=st.none() | st.integers(0, 1 << 40),
    draft=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


@given(states)
def test_what_the_prefill_engine_says_reaches_the_decode_engine(state) -> None:
    told = DisaggregatedParams(
        request_type="context_only",
        first_gen_tokens=list(state.first),
        ctx_request_id=state.context_request,
        opaque_state=state.state,
        draft_tokens=list(state.draft),
    )
    read = read_state(context_state(state.request, state.first[0], told))
    assert read == state
    made = DisaggregatedParams(**generation_arguments(read, FIELDS))
    assert made.request_type == "generation_only"
    assert made.disagg_request_id == state.request
    assert made.first_gen_tokens == told.first_gen_tokens
    assert made.ctx_request_id == told.ctx_request_id
    assert (made.opaque_state or b"") == told.opaque_state
    assert (made.draft_tokens or []) == told.draft_tokens


def test_a_release_without_the_id_does_without() -> None:
    assert context_arguments(5, FIELDS)["disagg_request_id"] == 5
    assert "disagg_request_id" not in context_arguments(5, FIELDS - {"disagg_request_id"})
    state = ContextState(request=5, first=(1,), state=b"x")
    assert "disagg_request_id" not in generation_arguments(state, FIELDS - {"disagg_request_id"})


def test_a_record_that_the_release_cannot_take_is_refused() -> None:
    state = ContextState(request=5, first=(1,), endpoint="tcp://p:1")
    with pytest.raises(TransferRefused, match="no ctx_info_endpoint"):
        generation_arguments(state, FIELDS)


@given(st.binary(max_size=60))
def test_bytes_of_others_are_refused_and_nothing_else_happens(data) -> None:
    with contextlib.suppress(TransferRefused):
        assert isinstance(read_state(data), ContextState)


@pytest.mark.parametrize("first", [(), (1, 2)])
def test_a_record_has_one_first_token(first) -> None:
    with pytest.raises(TransferRefused):
        read_state(msgspec.msgpack.encode([5, list(first)]))


def test_ids_differ_for_every_attempt_and_life_and_are_the_same_at_both_ends() -> None:
    seen = set()
    for handle in range(20):
        for attempt in range(3):
            for life in (7, 1 << 61):
                ticket = make_ticket(handle, attempt, life, 3, 10)
                seen.add(attempt_id(ticket))
                assert attempt_id(replace(ticket)) == attempt_id(ticket)
    assert len(seen) == 120
    assert all(1 << 40 <= number < 1 << 63 for number in seen)


def test_tickets_of_other_engines_are_refused() -> None:
    ticket = replace(make_ticket(1, 1, 1, 1, 1), backend="shm")
    with pytest.raises(TransferRefused, match="only to TensorRT-LLM"):
        attempt_id(ticket)


def test_only_three_answers_free_the_blocks() -> None:
    assert {answer.value for answer in CancelAnswer if answer.safe} == {
        "NotFound",
        "AlreadyComplete",
        "CancelledBeforeAdvertise",
    }
    assert [answer for answer in CancelAnswer if answer.restart] == [CancelAnswer.BACKEND_UNHEALTHY]
    assert not any(answer.safe and answer.restart for answer in CancelAnswer)


@pytest.mark.parametrize("answer", CancelAnswer)
def test_answers_are_read_in_every_spelling_and_unknown_ones_are_not_safe(answer) -> None:
    member = SimpleNamespace(name=f"k{answer.value}")
    for said in (answer.value, f"k{answer.value}", member):
        assert cancel_answer(said) is answer
    assert cancel_answer(None) is None
    unknown = cancel_answer("Perhaps")
    assert unknown is not None
    assert not unknown.safe
