"""How much of a prompt a step takes beside streams, by what steps took before."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.engine_core.scheduler.mixed_step_budget import MixedStepBudget

TARGET, LIMIT, LONG = 0.025, 2048, 32_768


def steps_beside(
    budget: MixedStepBudget, decode: float, noise: float = 0.05, seed: int = 1
) -> list[float]:
    """Seconds of the steps that compute a prompt of 32,768 tokens beside streams that take `decode`
    by themselves. A token takes 20 us, and 1 ns for each token before it."""
    random, took, done = Random(seed), [], 0
    for _ in range(30):
        budget.note(0, decode)
    while done < LONG:
        tokens = min(budget.tokens, LONG - done)
        seconds = decode + tokens * (2e-5 + 1e-9 * (done + tokens / 2))
        took.append(seconds * random.uniform(1 - noise, 1 + noise))
        budget.note(tokens, took[-1])
        done += tokens
    return sorted(took)


@pytest.mark.parametrize("decode", [0.004, 0.009, 0.018])
@pytest.mark.parametrize("seed", range(5))
def test_streams_keep_the_target_beside_a_long_prompt(decode: float, seed: int) -> None:
    took = steps_beside(MixedStepBudget(TARGET, LIMIT), decode, seed=seed)
    assert took[int(0.99 * len(took))] <= 1.2 * TARGET
    assert took[len(took) // 2] >= 0.75 * TARGET, "there was room for more of the prompt"


def test_without_a_target_a_step_takes_all_it_may() -> None:
    budget = MixedStepBudget(0.0, LIMIT)
    took = steps_beside(budget, 0.009)
    assert budget.tokens == LIMIT
    assert took[len(took) // 2] > 2 * TARGET


def test_a_prompt_goes_on_where_streams_alone_miss_the_target() -> None:
    budget = MixedStepBudget(TARGET, LIMIT)
    took = steps_beside(budget, 0.040)
    assert budget.tokens == 64
    assert len(took) <= LONG / 64


def test_what_becomes_faster_is_given_more_little_by_little() -> None:
    budget = MixedStepBudget(TARGET, LIMIT)
    budget.note(256, 0.5)
    assert budget.tokens == 64
    for _ in range(60):
        before = budget.tokens
        budget.note(before, 0.004 + before * 1e-5)
        assert budget.tokens <= 2 * before
    assert budget.tokens > 1000


def test_a_small_limit_is_never_exceeded_and_time_may_stand_still() -> None:
    budget = MixedStepBudget(TARGET, 8)
    for took in (0.0, 1e-9, 5.0):
        budget.note(8, took)
        assert budget.tokens == 8
