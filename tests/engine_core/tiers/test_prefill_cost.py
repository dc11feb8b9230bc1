"""What prefill costs, learnt from steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from pdserve.engine_core.executor import StepPlan
from pdserve.engine_core.tiers.prefill_cost import StepCost


def plan(*chunks: tuple[int, int]) -> StepPlan:
    """A step of chunks, each (first token, number of tokens)."""
    made = [SimpleNamespace(start=start, count=count) for start, count in chunks]
    return StepPlan(cast("list[Any]", made))


def seconds(start: int, count: int) -> float:
    """What the engine of these tests takes."""
    end = start + count
    return 0.004 + 2e-5 * count + 3e-9 * (end * end - start * start)


def test_it_learns_an_engines_price_within_a_tenth() -> None:
    cost = StepCost()
    for start, count in [(0, 64), (64, 512), (576, 1024), (0, 2048), (2048, 2048), (4096, 256)] * 3:
        cost.note(plan((start, count)), count, seconds(start, count))
    for length, cached in ((3000, 0), (3000, 2000), (6000, 4000)):
        expected = seconds(cached, length - cached)
        assert abs(cost.prefill(length, cached) - expected) < 0.1 * expected


def test_decode_steps_teach_nothing() -> None:
    cost = StepCost()
    before = cost.prefill(1000)
    for _ in range(50):
        cost.note(plan(*[(5000, 1)] * 64), 64, 9.0)
    assert cost.prefill(1000) == before


def test_the_first_step_counts_already() -> None:
    cost = StepCost()
    guess = cost.prefill(1000)
    cost.note(plan((0, 1000)), 1000, 10 * guess)
    assert cost.prefill(1000) > 5 * guess
