"""Prompts that are computed here, seen between two steps of the engine."""

from __future__ import annotations

from pdserve.worker.disagg.local_prompts import LocalPrompts


def test_one_prompt_counts_as_the_engine_tells() -> None:
    prompts = LocalPrompts()
    assert prompts.backlog(700) == 700
    prompts.add(1, 25_000)
    assert prompts.backlog(0) == 0
    assert prompts.backlog(7_000) == 7_000


def test_prompts_that_came_within_a_step_count_at_once() -> None:
    prompts = LocalPrompts()
    prompts.add(1, 25_000)
    prompts.add(2, 20_000)
    prompts.add(3, 6_000)
    assert prompts.backlog(7_000) == 26_000
    assert prompts.backlog(33_000) == 33_000, "the engine has seen them"
    prompts.done(1)
    assert prompts.backlog(0) == 6_000
    prompts.done(2)
    prompts.done(2)
    prompts.done(3)
    assert prompts.backlog(0) == 0
