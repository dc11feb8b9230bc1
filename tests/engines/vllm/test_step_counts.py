"""What each step computes, and for whom."""

from __future__ import annotations

import pytest

from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.vllm.choices import VllmChoice
from pdserve_engines.vllm.step_counts import StepCounts


def make(prompt: int, handle: int = 1, given: int = 0) -> VllmChoice:
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([1] * prompt),
        sampling=SamplingParams(max_tokens=10),
        output=[[2] * given] if given else [],
    )
    return VllmChoice(handle, 0, request, 0.0)


def step(
    counts: StepCounts,
    choices: list[VllmChoice],
    progress: dict[str, tuple[int, int] | None],
    took: float = 1.0,
) -> None:
    counts.note_step(took, choices, progress.get)


def test_a_prompt_in_two_chunks_and_its_output() -> None:
    counts, choice = StepCounts(), make(10)
    step(counts, [choice], {"1.0": (6, 0)})
    step(counts, [choice], {"1.0": (10, 0)})
    choice.first = 2.0
    step(counts, [choice], {"1.0": (11, 0)})
    step(counts, [choice], {"1.0": None})
    fields = counts.fields()
    assert (fields["steps"], fields["step_seconds"]) == (4, 4.0)
    assert fields["computed_tokens"] == 12
    assert choice.uncomputed == 0


def test_cached_tokens_are_not_computed() -> None:
    counts, choice = StepCounts(), make(10)
    step(counts, [choice], {"1.0": (10, 8)})
    assert choice.cached == 8
    assert counts.fields()["computed_tokens"] == 2
    counts.note_start(choice)
    assert counts.fields()["cached_tokens"] == 8


def test_a_choice_that_ends_with_its_first_token() -> None:
    """vLLM has forgotten it by then, so that what its output says is what is known."""
    counts, choice = StepCounts(), make(10)
    choice.cached = choice.skipped = 4
    step(counts, [choice], {})
    assert counts.fields()["computed_tokens"] == 6


def test_a_steps_time_is_shared_by_tokens() -> None:
    counts, long, short = StepCounts(), make(30, 1), make(10, 2)
    step(counts, [long, short], {"1.0": (30, 0), "2.0": (10, 0)}, took=4.0)
    assert (long.work, short.work) == (3.0, 1.0)
    idle = make(10, 3)
    step(counts, [idle], {"3.0": (0, 0)})
    assert idle.work == 0.0


def test_a_preempted_choice_is_computed_again() -> None:
    counts, choice = StepCounts(), make(10)
    step(counts, [choice], {"1.0": (10, 0)})
    step(counts, [choice], {"1.0": (0, 0)})
    step(counts, [choice], {"1.0": (10, 0)})
    fields = counts.fields()
    assert (fields["preemptions"], fields["computed_tokens"]) == (1, 20)


def test_the_time_between_tokens_is_that_of_steps_with_output() -> None:
    counts, choice = StepCounts(), make(4)
    step(counts, [choice], {"1.0": (4, 0)}, took=9.0)
    assert counts.fields()["itl"] == 0.0, "a prompt is no time between tokens"
    choice.first = 1.0
    step(counts, [choice], {"1.0": (5, 0)}, took=1.0)
    assert counts.fields()["itl"] == 1.0
    step(counts, [choice], {"1.0": (6, 0)}, took=2.0)
    assert counts.fields()["itl"] == pytest.approx(1.2)


def test_earlier_output_is_computed_like_a_prompt() -> None:
    counts, choice = StepCounts(), make(6, given=4)
    assert choice.uncomputed == 10
    step(counts, [choice], {"1.0": (10, 8)})
    assert counts.fields()["computed_tokens"] == 2, (
        "6 of the prompt and 2 of the output were cached"
    )
    assert choice.cached == 6
