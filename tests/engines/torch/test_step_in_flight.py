"""Only sequences that still run are sampled, each by its own row; and the host waits for a step in
`finish` alone, whatever its requests want. Planted reads must show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve import accel
from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.engine_loader import load_core
from pdserve.engine_core.executor import ScheduledChunk, StepPlan
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.sampling import filters, sampler
from pdserve_engines.torch.sampling.logprobs import look_up, records
from pdserve_engines.torch.step_in_flight import StepInFlight
from tests.engines.torch.checkpoints import checkpoint
from tests.engines.torch.cuda.graphs.engines import Story, tell
from tests.engines.torch.driver import loaded, sequence, spec
from tests.engines.torch.late_reads import LateReads

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve_engines.torch.sampling.logprobs import LogprobWishes


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


# ------------------------------------------------------------------ nothing waits for the device

needs_exact = pytest.mark.skipif(not accel.NATIVE, reason="batches change the last bits of logits")


def told(seed: int, *, ahead: str, requests: int = 12, one_by_one: bool = False) -> Story:
    """The story of an engine whose logits are equal in any batch."""
    core = load_core("torch", ManualClock())
    assert isinstance(core, EngineCore)
    fields = {"max_sequences": 12, "max_batch_tokens": 40, "kv_memory": 1 << 18}
    options = {"async_scheduling": ahead}
    core.load(spec(checkpoint("llama")[0], options=options, **fields), lambda progress: None)
    assert isinstance(core._executor, TorchExecutor)
    core._executor._sampler.one_by_one = one_by_one
    return tell(core, seed, requests)


def check_equal(late: Story, plain: Story) -> None:
    """What was aborted may have come a step further in one of the two, or to its first token."""
    for key in late.tokens.keys() ^ plain.tokens.keys():
        assert key not in late.finishes
        assert key not in plain.finishes
    for key in late.tokens.keys() & plain.tokens.keys():
        common = min(len(late.tokens[key]), len(plain.tokens[key]))
        assert late.tokens[key][:common] == plain.tokens[key][:common]
        assert late.logprobs[key][:common] == plain.logprobs[key][:common]
        if key in late.finishes and key in plain.finishes:
            assert late.finishes[key] == plain.finishes[key]
            assert len(late.tokens[key]) == len(plain.tokens[key])
    both = late.finishes.keys() & plain.finishes.keys()
    assert len(both) >= len(plain.tokens) // 2


@needs_exact
@pytest.mark.parametrize("one_by_one", [False, True])
def test_random_lives_read_nothing_before_their_step_is_finished(
    monkeypatch: pytest.MonkeyPatch, one_by_one: bool, seed: int, long: bool
) -> None:
    """With top_p, logprobs, alternatives and tokens asked for; all as without a step ahead."""
    for number in range(100 if long else 2):
        plain = told(seed + number, ahead="off")
        with monkeypatch.context() as patch:
            device = LateReads(patch)
            late = told(seed + number, ahead="on", one_by_one=one_by_one)
        if device.violation is not None:
            raise device.violation
        check_equal(late, plain)
        assert late.stats.steps_ahead > 0
        assert device.waits >= late.stats.steps_ahead


by_sorting = filters.border_by_sorting


def top_p_looks_whether_its_guess_is_wide_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(filters, "border_by_sorting", by_sorting)
    patch.setattr(filters, "_NUCLEUS_GUESS", 8)


def logprobs_are_looked_up_when_tokens_are_read(patch: pytest.MonkeyPatch) -> None:
    """Which waits for the step that was begun since."""
    found: dict[int, tuple[Any, ...]] = {}

    def later(raw: torch.Tensor, tokens: torch.Tensor, wishes: LogprobWishes) -> list[Any]:
        found[id(wishes)] = (raw, tokens, wishes)
        return []

    def at_last(tokens: Any, wishes: LogprobWishes, _: Any) -> Any:
        return records(tokens, wishes, look_up(*found[id(wishes)]))

    patch.setattr(sampler, "look_up", later)
    patch.setattr(sampler, "records", at_last)


def alternatives_are_read_when_they_are_launched(patch: pytest.MonkeyPatch) -> None:
    def eager(raw: torch.Tensor, tokens: torch.Tensor, wishes: LogprobWishes) -> list[Any]:
        return [torch.tensor(each.tolist()) for each in look_up(raw, tokens, wishes)]

    patch.setattr(sampler, "look_up", eager)


def the_draw_looks_for_rows_without_numbers(patch: pytest.MonkeyPatch) -> None:
    whole = sampler._choose

    def choose(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return whole(logits.nan_to_num() if logits.isnan().any() else logits, *rest)

    patch.setattr(sampler, "_choose", choose)


@needs_exact
@pytest.mark.parametrize(
    "plant",
    [
        top_p_looks_whether_its_guess_is_wide_enough,
        logprobs_are_looked_up_when_tokens_are_read,
        alternatives_are_read_when_they_are_launched,
        the_draw_looks_for_rows_without_numbers,
    ],
)
def test_a_planted_read_shows(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateReads(monkeypatch)
    plant(monkeypatch)
    told(1, ahead="on", requests=6)
    assert device.violation is not None
    assert "waits for the device" in str(device.violation)
