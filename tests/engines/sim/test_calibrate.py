"""Calibration without a model: an executor whose steps take a known time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.engine_core.executor import StepPlan, StepResult
from pdserve.perf_model.step_time import read_timing
from pdserve_engines.sim import calibrate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from pdserve.engine_core.executor import ModelInfo, ProgressFn
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.messages.engine import EngineSpec
    from pdserve_engines.sim.roofline_fit import StepSample


class Clockwork:
    """Every token of a step takes a millisecond, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.released = 0

    def load(self, spec: EngineSpec, progress: ProgressFn) -> ModelInfo:
        raise NotImplementedError

    def allocate(self, num_blocks: int) -> None:
        raise NotImplementedError

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.now += 0.001 * plan.num_tokens
        return StepResult([0] * len(plan.chunks), [None] * len(plan.chunks))

    def release(self, sequences: Seq[Sequence]) -> None:
        self.released += len(sequences)

    def close(self) -> None:
        pass


def measure(executor: Clockwork, todo: list[calibrate.Point], **how: int) -> Iterator[StepSample]:
    return calibrate.measure(executor, todo, timer=lambda: executor.now, **how)


def test_points_stay_within_the_models_length():
    for longest in (300, 2048):
        for prefill, contexts in calibrate.points(longest):
            assert all(start + count < longest for start, count in prefill)
            assert all(context + 1 < longest for context in contexts)
    assert len(calibrate.points(2048)) > len(calibrate.points(300)) > 8


def test_each_point_is_a_step_of_its_own_blocks():
    executor = Clockwork()
    todo = calibrate.points(600)
    blocks = max(calibrate._blocks_of(point, 16) for point in todo)
    samples = list(measure(executor, todo, block_size=16, num_blocks=blocks, repeats=3))
    assert len(samples) == len(todo)
    assert len(executor.plans) == 4 * len(todo)
    for plan in executor.plans:
        used = [block for chunk in plan.chunks for block in chunk.sequence.blocks]
        assert len(used) == len(set(used))
        for chunk in plan.chunks:
            assert chunk.start + chunk.count == len(chunk.sequence.tokens)
            assert len(chunk.sequence.blocks) * 16 >= len(chunk.sequence.tokens)
    assert executor.released == sum(len(plan.chunks) for plan in executor.plans)
    for sample in samples:
        tokens = sample.decodes + sum(count for _, count in sample.prefill)
        assert sample.seconds == pytest.approx(0.001 * tokens)


def test_the_file_it_writes_can_be_loaded(monkeypatch, tmp_path: Path, capsys):
    executor = Clockwork()
    monkeypatch.setattr(
        calibrate,
        "_measure_torch",
        lambda arguments: measure(
            executor, calibrate.points(600), block_size=32, num_blocks=999, repeats=1
        ),
    )
    path = tmp_path / "timing.json"
    assert calibrate.main(["--model", "m", "--out", str(path)]) == 0
    model = read_timing(path)
    assert model.step([(0, 100)], 0, 0, 1) == pytest.approx(0.1)
    assert "held out" in capsys.readouterr().out
