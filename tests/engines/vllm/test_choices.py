"""One choice, from vLLM's outputs to our deltas."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pdserve.messages.request import GenerateRequest, SamplingParams, TokenLogprob
from pdserve.testing.output_checker import OutputChecker
from pdserve.token_ids import token_ids
from pdserve_engines.vllm.choices import VllmChoice, finish_reason, request_id

STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)
QUEUED, SCHEDULED, PREEMPTED = 1, 2, 3
MAX_LEN = 100


@dataclass
class Event:
    type: int
    timestamp: float


@dataclass
class PrefillStats:
    num_cached_tokens: int


class Vector:
    """What is used of a torch tensor with an embedding."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def float(self) -> Vector:
        return self

    def cpu(self) -> Vector:
        return self

    def numpy(self) -> Vector:
        return self

    def astype(self, dtype: str) -> Vector:
        assert dtype == "<f4"
        return self

    def tobytes(self) -> bytes:
        return struct.pack(f"<{len(self.values)}f", *self.values)


@dataclass
class Rows:
    """`LogprobsLists` and `LogprobsTensors` of vLLM 0.32.0 (`v1/outputs.py`)."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any = None
    selected_token_ranks: Any = None


@dataclass
class Output:
    """`EngineCoreOutput` of vLLM 0.32.0 (`v1/engine/__init__.py`), as far as it is read."""

    new_token_ids: list[int]
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    new_logprobs: Rows | None = None
    new_prompt_logprobs_tensors: Rows | None = None
    pooling_output: Vector | None = None
    events: list[Event] | None = None
    prefill_stats: PrefillStats | None = None


def make(output: list[list[int]] | None = None, **changes: Any) -> VllmChoice:
    fields = SamplingParams.__struct_fields__
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([1, 2, 3, 4]),
        sampling=SamplingParams(**({"max_tokens": 10} | sampling)),
        output=output or [],
        **changes,
    )
    return VllmChoice(7, 0, request, 100.0)


def test_ids_of_choices_differ() -> None:
    ids = {request_id(handle, choice) for handle in range(130) for choice in range(130)}
    assert len(ids) == 130 * 130


@pytest.mark.parametrize(
    ("number", "reason"),
    [(STOP, "stop"), (LENGTH, "length"), (ABORT, "abort"), (ERROR, "error"), (REPETITION, "stop")],
)
def test_reasons(number: int, reason: str) -> None:
    assert finish_reason(number) == reason


def test_an_unknown_reason_is_no_end_like_another() -> None:
    with pytest.raises(KeyError):
        finish_reason(5)


# ------------------------------------------------------------------ deltas


def test_a_choice_from_its_first_token_to_its_end() -> None:
    choice = make(stop_token_ids=(9,))
    checker = OutputChecker(choice.request)
    first = Output(
        [5],
        events=[Event(QUEUED, 50.0), Event(SCHEDULED, 50.5)],
        prefill_stats=PrefillStats(3),
    )
    choice.note_cached(first)
    choice.work = 0.25
    delta = choice.take(first, 101.0)
    assert delta is not None
    checker.take(delta)
    assert delta.started is not None
    started = delta.started
    assert (started.cached_tokens, started.queue_seconds) == (3, 0.5)
    assert (started.prefill_seconds, started.work_seconds) == (0.5, 0.25)
    last = choice.take(Output([6, 9], STOP, stop_reason=9), 102.0)
    assert last is not None
    checker.take(last)
    assert checker.tokens == [[5, 6, 9]]
    finish = checker.finishes[0]
    assert finish is not None
    assert (finish.reason, finish.stop_reason) == ("stop", 9)
    assert (finish.prompt_tokens, finish.completion_tokens) == (4, 3)
    assert (finish.queue_seconds, finish.prefill_seconds) == (0.5, 0.5)


def test_an_output_without_tokens_or_end_is_no_delta() -> None:
    choice = make()
    assert choice.take(Output([], events=[Event(QUEUED, 1.0)]), 101.0) is None
    delta = choice.take(Output([5]), 101.0)
    assert delta is not None
    assert delta.started is not None


def test_an_end_token_is_not_named_as_a_stop() -> None:
    for ignored, named in ((False, None), (True, 2)):
        choice = make(eos_token_ids=(2,), stop_token_ids=(2,), ignore_eos=ignored)
        delta = choice.take(Output([2], STOP, stop_reason=2), 101.0)
        assert delta is not None
        assert delta.finish is not None
        assert delta.finish.stop_reason == named


def test_a_repetition_is_a_stop_without_a_token() -> None:
    delta = make().take(Output([5], REPETITION, stop_reason="repetition_detected"), 101.0)
    assert delta is not None
    assert delta.finish is not None
    assert (delta.finish.reason, delta.finish.stop_reason) == ("stop", None)


def test_an_error_says_so() -> None:
    delta = make().take(Output([], ERROR), 101.0)
    assert delta is not None
    assert delta.finish is not None
    assert delta.finish.reason == "error"
    assert delta.finish.message


def test_usage_of_a_continued_choice_counts_what_was_given() -> None:
    choice = make([[5, 6, 7]])
    assert choice.total == 7
    delta = choice.take(Output([8], LENGTH), 101.0)
    assert delta is not None
    assert delta.finish is not None
    assert delta.tokens == [8]
    assert (delta.finish.prompt_tokens, delta.finish.completion_tokens) == (4, 4)


def test_cached_tokens_are_those_of_the_prompt() -> None:
    """A continued request finds its earlier output in the cache, too."""
    choice = make([[5, 6, 7]])
    output = Output([8], prefill_stats=PrefillStats(6))
    choice.note_cached(output)
    assert choice.cached == 4


def test_cached_tokens_after_a_preemption_are_not_those_of_the_start() -> None:
    choice = make()
    choice.take(Output([5]), 101.0)
    choice.note_cached(Output([6], prefill_stats=PrefillStats(4)))
    assert choice.cached == 0


def test_preemptions_are_counted_and_the_first_start_counts() -> None:
    choice = make()
    events = [Event(QUEUED, 10.0), Event(SCHEDULED, 11.0), Event(PREEMPTED, 12.0)]
    choice.take(Output([5], events=[*events, Event(SCHEDULED, 15.0)]), 106.0)
    delta = choice.take(Output([6], LENGTH, events=[Event(PREEMPTED, 16.0)]), 107.0)
    assert delta is not None
    assert delta.finish is not None
    assert (delta.finish.preemptions, delta.finish.queue_seconds) == (2, 1.0)


def test_times_are_never_negative() -> None:
    """vLLM's clock and ours differ: a wait that is longer than we have waited is cut."""
    choice = make()
    events = [Event(QUEUED, 10.0), Event(SCHEDULED, 60.0)]
    delta = choice.take(Output([5], LENGTH, events=events), 101.0)
    assert delta is not None
    assert delta.finish is not None
    assert (delta.finish.queue_seconds, delta.finish.prefill_seconds) == (1.0, 0.0)


# ------------------------------------------------------------------ logprobs


def test_logprobs_are_the_sampled_token_and_the_likeliest() -> None:
    rows = Rows(
        np.array([[5, 8, 9], [6, 6, 7], [0, 0, 0]]),
        np.array([[-2.0, -1.5, -0.5], [-0.1, -0.1, -3.0], [0.0, 0.0, 0.0]]),
        sampled_token_ranks=np.array([3, 1, 1]),
    )
    delta = make(logprobs=2).take(Output([5, 6], new_logprobs=rows), 101.0)
    assert delta is not None
    assert delta.logprobs == [
        TokenLogprob(5, -2.0, 3, [(9, -0.5), (8, -1.5)]),
        TokenLogprob(6, -0.1, 1, [(6, -0.1), (7, -3.0)]),
    ]


def test_alternatives_that_other_requests_want_are_left_out() -> None:
    rows = Rows(
        np.array([[5, 9, 8, 7]]),
        np.array([[-2.0, -0.5, -1.5, -3.0]]),
        sampled_token_ranks=np.array([3]),
    )
    delta = make(logprobs=1).take(Output([5], new_logprobs=rows), 101.0)
    assert delta is not None
    assert delta.logprobs == [TokenLogprob(5, -2.0, 3, [(9, -0.5)])]


def test_chosen_tokens_are_found_among_all() -> None:
    rows = Rows(
        np.array([[5, 9, 8, 5, 7]]),
        np.array([[-2.0, -0.5, -1.5, -2.0, -3.0]]),
        sampled_token_ranks=np.array([3]),
    )
    choice = make(logprobs=0, logprob_token_ids=(7, 5, 9))
    delta = choice.take(Output([5], new_logprobs=rows), 101.0)
    assert delta is not None
    assert delta.logprobs == [TokenLogprob(5, -2.0, 3, [(9, -0.5), (5, -2.0), (7, -3.0)])]


def test_logprobs_that_were_not_asked_for_are_left_out() -> None:
    rows = Rows(np.array([[5]]), np.array([[-2.0]]), sampled_token_ranks=np.array([1]))
    delta = make().take(Output([5], new_logprobs=rows), 101.0)
    assert delta is not None
    assert delta.logprobs is None


def test_prompt_logprobs_come_with_the_first_token() -> None:
    """Also if vLLM has them before it, and without those of earlier output."""
    tensors = Rows(
        np.array([[2, 9], [3, 3], [4, 8], [5, 5], [6, 6]]),
        np.array([[-2.0, -1.0], [-0.5, -0.5], [-3.0, -0.1], [0.0, 0.0], [0.0, 0.0]]),
        selected_token_ranks=np.array([4, 1, 2, 1, 1]),
    )
    choice = make([[5, 6]], prompt_logprobs=1)
    assert choice.take(Output([], new_prompt_logprobs_tensors=tensors), 101.0) is None
    delta = choice.take(Output([7]), 101.0)
    assert delta is not None
    assert [(each.token, each.rank) for each in delta.prompt_logprobs or []] == [
        (2, 4),
        (3, 1),
        (4, 2),
    ]
    later = choice.take(Output([8]), 102.0)
    assert later is not None
    assert later.prompt_logprobs is None


# ------------------------------------------------------------------ ends without vLLM


@pytest.mark.parametrize(
    ("given", "fields", "reason", "stop"),
    [
        ([5, 9], {"stop_token_ids": (9,)}, "stop", 9),
        ([5, 2], {"eos_token_ids": (2,)}, "stop", None),
        ([5, 2], {"eos_token_ids": (2,), "stop_token_ids": (2,)}, "stop", None),
        ([5] * 10, {}, "length", None),
        ([5] * 96, {"max_tokens": 500}, "length", None),
        ([9] * 10, {"stop_token_ids": (9,), "min_tokens": 10}, "length", None),
    ],
)
def test_earlier_output_may_have_ended_a_choice(
    given: list[int], fields: dict[str, Any], reason: str, stop: int | None
) -> None:
    choice = make([given], **fields)
    delta = choice.ended_before(101.0, MAX_LEN)
    assert delta is not None
    checker = OutputChecker(choice.request)
    checker.take(delta)
    finish = checker.finishes[0]
    assert finish is not None
    assert (finish.reason, finish.stop_reason) == (reason, stop)
    assert finish.completion_tokens == len(given)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ([], {"stop_token_ids": (9,)}),
        ([9, 5], {"stop_token_ids": (9,)}),
        ([5, 2], {"eos_token_ids": (2,), "ignore_eos": True}),
        ([5, 9], {"stop_token_ids": (9,), "min_tokens": 2}),
        ([5] * 9, {}),
        ([5] * 95, {"max_tokens": 500}),
    ],
)
def test_other_output_is_continued(given: list[int], fields: dict[str, Any]) -> None:
    assert make([given], **fields).ended_before(101.0, MAX_LEN) is None


# ------------------------------------------------------------------ vectors


def test_a_vector_is_one_delta_without_tokens() -> None:
    choice = make(pooling="last", max_tokens=1)
    output = Output([], STOP, pooling_output=Vector([0.5, -2.0]), prefill_stats=PrefillStats(4))
    choice.note_cached(output)
    delta = choice.vector(output, 101.0)
    checker = OutputChecker(choice.request)
    checker.take(delta)
    finish = checker.finishes[0]
    assert finish is not None
    assert struct.unpack("<2f", finish.embedding) == (0.5, -2.0)
    assert (finish.completion_tokens, finish.cached_tokens) == (0, 4)
