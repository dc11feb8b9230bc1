"""Only sequences that still run are sampled, each by its own row."""

from __future__ import annotations

import torch

from pdserve.engine_core.executor import ScheduledChunk, StepPlan
from pdserve_engines.torch.step_in_flight import StepInFlight
from tests.engines.torch.checkpoints import checkpoint
from tests.engines.torch.driver import loaded, sequence


def test_rows_are_those_of_the_chunks_that_are_left() -> None:
    chunks = [ScheduledChunk(sequence([5], handle=n), 0, 1, samples=True) for n in range(4)]
    step = StepInFlight(StepPlan(chunks), torch.arange(8).view(4, 2))
    assert step.rows_of(StepPlan([chunks[1], chunks[3]])).tolist() == [[2, 3], [6, 7]]
    assert step.rows_of(StepPlan(list(chunks))) is step.hidden


def test_a_sequence_that_has_ended_costs_no_other_its_token() -> None:
    executor = loaded(checkpoint("llama")[0], options={"async_scheduling": "on"})
    chunks = []
    for number, prompt in enumerate(([1, 2, 3], [4, 5], [6, 7, 8, 9])):
        one = sequence(prompt, handle=number)
        one.blocks = [number]
        chunks.append(ScheduledChunk(one, 0, len(prompt), samples=True))
    whole = executor.begin(StepPlan(chunks))
    executor.sample(whole, StepPlan(chunks))
    expected = executor.finish(whole).tokens
    again = executor.begin(StepPlan(chunks))
    executor.sample(again, StepPlan(chunks[1:]))
    assert executor.finish(again).tokens == expected[1:]
    none = executor.begin(StepPlan(chunks))
    assert executor.finish(none).tokens == []
    executor.close()
