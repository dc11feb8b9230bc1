"""Random lives of a core whose device executes late: tokens are those of a core that waits for each
step, and nothing that the device still uses is given away. Planted bugs must show."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.scheduler.run_ahead import RunAhead
from pdserve.engine_core.scheduler.scheduler_state import SchedulerState
from pdserve.engine_core.scheduler.step_holds import StepHolds
from pdserve.engine_core.scheduler.step_pipeline import StepPipeline
from pdserve.errors import StepFailed
from pdserve.messages.engine import ClearCache, Command, DropKv, EngineSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.scripted import ENGINE, reference_entries, reference_tokens
from pdserve.token_ids import token_ids
from tests.engine_core.scheduler.late_device import LateDevice, LateStep
from tests.engine_core.test_random_schedules import BLOCK, CoreMachine
from tests.support.random_lives import run_lives
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.executor import StepPlan, StepResult
    from pdserve.engine_core.scheduler.step_pipeline import _Step


class AheadMachine(CoreMachine):
    """The same lives; the device works when it must, or sooner."""

    def prepare(self) -> None:
        self.random = random.Random(0)
        self.haste = 0.5
        self.device = LateDevice(self.watch, lambda: self.random.random() < self.haste)
        self.executor = self.device
        self.core = EngineCore(self.device, self.clock)

    @rule(seed=st.integers(0, 1000), haste=st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    def change_pace(self, seed: int, haste: float) -> None:
        self.random, self.haste = random.Random(seed), haste

    def one_step(self) -> None:
        self.device.pool = self.core.pool
        super().one_step()
        if self.device.violation is not None:
            raise self.device.violation
        pipeline = self.core._pipeline
        assert pipeline is not None
        self.visited["under way"] += pipeline.is_busy
        self.visited["zombies"] += self.fetching() > 0

    def fetching(self) -> int:
        """Blocks that are held for the step under way alone."""
        holds = self.core.scheduler._in_flight
        running = {block for each in self.core.scheduler.running for block in each.blocks}
        held = () if holds is None else holds._held
        return len({block for parts in held for part in parts for block in part} - running)

    def the_names_are_right(self) -> None:
        """And what they name is there: peers may read it at any time."""
        super().the_names_are_right()
        for sequence in self.core.scheduler.running:
            count = sequence.num_committed * BLOCK if self.spec.prefix_cache else 0
            written = b"".join(
                bytes(self.device._kv.view(block)) for block in sequence.blocks[: count // BLOCK]
            )
            assert written == b"".join(reference_entries(sequence.tokens[:count]))

    def run_to_the_end(self) -> None:
        super().run_to_the_end()
        pipeline = self.core._pipeline
        assert pipeline is not None
        self.visited["ahead"] += pipeline.steps_ahead


CORNERS = {"under way", "ahead", "zombies", "preempted", "cached", "completed", "aborted"}


@pytest.mark.timeout(900)  # minutes in long mode
def test_random_lives_with_a_late_device_are_those_without():
    AheadMachine.visited = CoreMachine.visited = Counter()
    lives = settings(max_examples=1500 if is_long() else 40, stateful_step_count=30)
    run_lives(AheadMachine, lives, missed)


def missed() -> set[str]:
    return {corner for corner in CORNERS if not AheadMachine.visited[corner]}


# ------------------------------------------------------------------ planted bugs


def zombies_give_their_blocks_back_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepHolds, "__contains__", lambda self, sequence: False)


def a_zombies_token_is_delivered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pdserve.engine_core.scheduler.step_pipeline._is_over", lambda sequence: False)


def a_token_is_delivered_twice(patch: pytest.MonkeyPatch) -> None:
    whole = StepPipeline._take_in

    def twice(self: StepPipeline, plan: StepPlan, *rest: object) -> None:
        whole(self, plan, *rest)  # type: ignore[arg-type]
        if self.steps_ahead % 3 == 2:
            whole(self, plan, *rest)  # type: ignore[arg-type]

    patch.setattr(StepPipeline, "_take_in", twice)


def masks_are_those_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    whole = StepPipeline._launch

    def launch(self: StepPipeline, plan: StepPlan, now: float) -> _Step:
        step = whole(self, plan, now)
        self._executor.sample(step.handle, plan)
        return step

    patch.setattr(StepPipeline, "_launch", launch)


def blocks_are_named_before_their_step_has_ended(patch: pytest.MonkeyPatch) -> None:
    whole = StepPipeline._sample

    def sample(self: StepPipeline, step: _Step) -> None:
        whole(self, step)
        for chunk in step.plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            if end >= sequence.commit_at:
                sequence.num_computed = end
                self._scheduler._commit(sequence)
                sequence.num_computed = chunk.start

    patch.setattr(StepPipeline, "_sample", sample)


def the_token_of_another_row_is_taken(patch: pytest.MonkeyPatch) -> None:
    whole = RunAhead.plan_next

    def plan_next(self: RunAhead, plan: StepPlan) -> StepPlan | None:
        found = whole(self, plan)
        for row, chunk in enumerate(() if found is None else found.chunks):
            chunk.token_from = row
        return found

    patch.setattr(RunAhead, "plan_next", plan_next)


def a_sequence_is_planned_past_its_end(patch: pytest.MonkeyPatch) -> None:
    whole = RunAhead.plan_next

    def plan_next(self: RunAhead, plan: StepPlan) -> StepPlan | None:
        longest = {id(chunk.sequence): chunk.sequence.max_len for chunk in plan.chunks}
        for chunk in plan.chunks:
            chunk.sequence.max_len += 9
        found = whole(self, plan)
        for chunk in plan.chunks:
            chunk.sequence.max_len = longest[id(chunk.sequence)]
        return found

    patch.setattr(RunAhead, "plan_next", plan_next)


HARMFUL = [
    zombies_give_their_blocks_back_early,
    a_zombies_token_is_delivered,
    a_token_is_delivered_twice,
    masks_are_those_of_the_step_before,
    blocks_are_named_before_their_step_has_ended,
    the_token_of_another_row_is_taken,
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", HARMFUL)
def test_a_planted_bug_shows(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    # Always the same lives: the cost is a property of the suite. Nothing is made smaller.
    lives = settings(
        max_examples=400, stateful_step_count=30, phases=[Phase.generate], derandomize=True
    )
    with pytest.raises(Exception):  # noqa: B017, PT011 - any oracle may be the one
        run_state_machine_as_test(AheadMachine, settings=lives)


def test_a_zombie_past_its_end_costs_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not planning it is thrift, not safety."""
    a_sequence_is_planned_past_its_end(monkeypatch)
    run_state_machine_as_test(AheadMachine, settings=settings(max_examples=10))


# ------------------------------------------------------------------ single stories


def request(prompt: list[int], **sampling: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=20, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return GenerateRequest(request_id="r", model="m", prompt=token_ids(prompt), sampling=params)


def engine(device: LateDevice) -> InlineEngine:
    spec = EngineSpec(
        engine=ENGINE, model="", block_size=BLOCK, max_model_len=48, options={"blocks": "64"}
    )
    return InlineEngine(EngineCore(device, ManualClock()), spec)


def test_decoding_runs_one_step_ahead_until_a_prompt_comes() -> None:
    device = LateDevice()
    made = engine(device)
    core = made.core
    assert isinstance(core, EngineCore)
    first = made.submit(request([5, 6, 7]))
    for _ in range(4):
        made.step()
    pipeline = core._pipeline
    assert pipeline is not None
    assert pipeline.is_busy
    assert pipeline.steps_ahead == 4
    second = made.submit(request([8, 9, 10, 11, 12]))
    made.step()  # takes in the step under way
    assert not pipeline.is_busy
    made.step()  # the prompt with it, and the next is begun
    assert pipeline.is_busy
    while core.has_work:
        made.step()
    assert first.tokens[0] == reference_tokens(first.request, max_len=48)
    assert second.tokens[0] == reference_tokens(second.request, max_len=48)
    assert made.close() == 0


def test_blocks_of_an_aborted_request_are_free_when_its_step_has_ended() -> None:
    freed: list[tuple[int, str]] = []
    made = engine(LateDevice())
    core = made.core
    assert isinstance(core, EngineCore)
    core.on_freed = lambda handle, phase: freed.append((handle, phase))
    ledger = made.submit(request([5, 6, 7]))
    made.step()
    made.step()
    made.abort(ledger)
    assert core.pool.counts().used > 0
    assert freed == []
    assert core.has_work
    made.step()
    assert core.pool.counts().used == 0
    assert freed == [(1, "decoding")]
    assert made.close() == 0


@pytest.mark.parametrize("order", [ClearCache(), DropKv(1), DropKv(2, ("",))])
@pytest.mark.parametrize("aborted", [True, False])
def test_an_order_to_forget_kv_leaves_nothing_of_requests_that_have_ended(
    order: Command, aborted: bool
) -> None:
    """Also if the device still computes their last step. The others go on as before."""
    device = LateDevice()
    made = engine(device)
    core = made.core
    assert isinstance(core, EngineCore)
    device.pool = core.pool
    tokens = reference_tokens(request([5, 6, 7], temperature=0.0), max_len=48)
    stopping = request([5, 6, 7], temperature=0.0, stop_token_ids=(tokens[6],))
    ended = made.submit(stopping)
    other = made.submit(request([8, 9], temperature=0.0))
    for _ in range(7):
        made.step()
    if aborted:
        made.abort(ended)
    assert core.scheduler._in_flight is not None
    core.handle(order)
    assert core.pool.counts().cached == 0
    while core.has_work:
        made.step()
    kept = len(other.request.prompt) + 20
    assert core.pool.counts().cached <= kept // BLOCK
    assert other.tokens[0] == reference_tokens(other.request, max_len=48)
    assert device.violation is None
    assert made.close() == 0


@pytest.mark.parametrize("held", [True, False])
def test_a_block_that_a_twin_replaces_is_held_while_the_device_reads_it(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests fill the same block at the same time; one copy is given back. Not to hold it is
    a planted bug."""
    if not held:
        monkeypatch.setattr(SchedulerState, "_hold_twins", lambda *args: None)
    device = LateDevice()
    made = engine(device)
    core = made.core
    assert isinstance(core, EngineCore)
    device.pool = core.pool
    ledgers = [made.submit(request([5, 6], temperature=0.0)) for _ in range(2)]
    while core.has_work:
        made.step()
    assert (device.violation is None) == held
    for ledger in ledgers:
        assert ledger.tokens[0] == reference_tokens(ledger.request, max_len=48)
    assert made.close() == 0


class Failing(LateDevice):
    """A device of which one call fails."""

    def __init__(self, method: str, number: int) -> None:
        super().__init__()
        self.method, self.number = method, number

    def begin(self, plan: StepPlan) -> LateStep:
        self.count("begin")
        return super().begin(plan)

    def sample(self, step: LateStep, plan: StepPlan) -> None:
        self.count("sample")
        super().sample(step, plan)

    def finish(self, step: LateStep) -> StepResult:
        result = super().finish(step)
        self.count("finish")
        return result

    def count(self, method: str) -> None:
        self.number -= method == self.method
        if self.number == 0:
            self.number = -1
            raise RuntimeError("the device fails")


@pytest.mark.parametrize("method", ["begin", "sample", "finish"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_call_that_fails_ends_the_requests_of_its_step_and_no_others(
    method: str, number: int
) -> None:
    device = Failing(method, number)
    made = engine(device)
    core = made.core
    assert isinstance(core, EngineCore)
    device.pool = core.pool
    lost = made.submit(request([5, 6, 7]))
    for _ in range(4):
        made.step()
    after = made.submit(request([8, 9]))
    while core.has_work:
        made.step()
    assert isinstance(lost.error, StepFailed)
    # What the steps before had brought was delivered.
    expected = reference_tokens(lost.request, max_len=48)
    assert lost.tokens[0] == expected[: number - 1]
    assert after.tokens[0] == reference_tokens(after.request, max_len=48)
    assert device.violation is None
    assert made.close() == 0


@pytest.mark.parametrize("stops", [False, True])
def test_a_core_that_breaks_while_it_takes_a_step_in_waits_for_the_next(
    stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with blocks of a request that has ended left to the step."""
    device = LateDevice()
    made = engine(device)
    core = made.core
    assert isinstance(core, EngineCore)
    ledger = made.submit(request([5, 6, 7]))
    made.submit(request([8, 9]))
    made.step()
    if stops:
        made.abort(ledger)
    monkeypatch.setattr(core.scheduler, "complete", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.step()
    assert device._under_way
    assert made.close() == 0
    assert not device._under_way


def test_a_core_that_closes_waits_for_its_device() -> None:
    device = LateDevice()
    made = engine(device)
    made.submit(request([5, 6, 7]))
    made.step()
    assert device._under_way
    assert made.close() == 0
    assert not device._under_way
