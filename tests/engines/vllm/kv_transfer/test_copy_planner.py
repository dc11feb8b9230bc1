"""Which blocks a step copies, and when staging blocks are free again."""

from __future__ import annotations

import random

import pytest

from pdserve.engine_core.staged_kv.port import StagedBlocks
from pdserve_engines.vllm.kv_transfer.copy_planner import Copied, CopyPlanner, LetGo, StepCopies

SIZE = 4
OURS = list(range(100, 120))
"""vLLM's blocks of a request."""


def planner(ranks: int = 1) -> CopyPlanner:
    return CopyPlanner(SIZE, ranks)


def staged(first: int, tokens: int) -> StagedBlocks:
    count = -(-tokens // SIZE) - first
    return StagedBlocks(first, tuple(range(count)), tokens)


def plan(planner: CopyPlanner, **computed: int) -> StepCopies:
    return planner.plan(computed, lambda key: OURS)


# ------------------------------------------------------------------ loads


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 7, 8, 9])
def test_all_but_the_last_token_is_loaded(tokens: int):
    """A single token is not worth a load: its block is not copied, and the staging is let go."""
    p = planner()
    p.expect_load("r", staged(0, tokens))
    assert p.matched("r", 0, tokens) == tokens - 1
    p.allocated("r", tokens - 1, OURS)
    step = plan(p, r=tokens)
    if tokens == 1:
        assert step.loads == {}
        assert p.take_events() == [LetGo("r", 0)]
        return
    assert step.loads == {"r": [(100 + at, at) for at in range(-(-tokens // SIZE))]}
    assert p.take_events() == []
    p.reported(step.number, 1, [])
    assert p.take_events() == [LetGo("r", 0)]
    assert p.matched("r", 0, tokens) == 0


def test_blocks_that_vllm_has_itself_are_not_loaded():
    p = planner()
    p.expect_load("r", staged(1, 14))
    assert p.matched("r", 8, 14) == 5
    p.allocated("r", 5, OURS)
    assert plan(p, r=14).loads == {"r": [(102, 1), (103, 2)]}


def test_a_lost_prefix_makes_the_staged_blocks_useless():
    p = planner()
    p.expect_load("r", staged(2, 14))
    assert p.matched("r", 4, 14) == 0
    p.allocated("r", 0, OURS)
    assert p.take_events() == [LetGo("r", 14 - 1 - 4)]


def test_a_request_that_vllm_asks_about_again_is_loaded_once():
    p = planner()
    p.expect_load("r", staged(0, 10))
    assert p.matched("r", 0, 10) == p.matched("r", 0, 10) == 9
    p.allocated("r", 9, OURS)
    assert plan(p, r=10).loads
    assert p.matched("r", 0, 10) == 0
    p.allocated("r", 0, OURS)
    assert plan(p, r=10).loads == {}
    assert p.take_events() == []


def test_tokens_from_the_first_block_on_that_failed_are_computed():
    p = planner(ranks=2)
    p.expect_load("r", staged(0, 14))
    p.matched("r", 0, 14)
    p.allocated("r", 13, OURS)
    step = plan(p, r=14)
    p.reported(step.number, 1, [])
    assert p.take_events() == []
    p.reported(step.number, 1, [102])
    assert p.take_events() == [LetGo("r", 14 - 8)]


def test_an_aborted_load_keeps_its_staging_until_the_step_is_done():
    p = planner()
    p.expect_load("r", staged(0, 10))
    p.matched("r", 0, 10)
    p.allocated("r", 9, OURS)
    step = plan(p, r=10)
    p.finished("r")
    assert p.take_events() == []
    p.reported(step.number, 1, [])
    assert p.take_events() == [LetGo("r", 0)]


def test_a_failed_load_that_ends_its_request_is_counted_too():
    p = planner()
    p.expect_load("r", staged(0, 10))
    p.matched("r", 0, 10)
    p.allocated("r", 9, OURS)
    step = plan(p, r=10)
    p.finished("r")
    p.reported(step.number, 1, [OURS[1]])
    assert p.take_events() == [LetGo("r", 6)]


def test_an_abort_before_the_load_lets_go_at_once():
    p = planner()
    p.expect_load("r", staged(0, 10))
    p.finished("r")
    assert p.take_events() == [LetGo("r", 0)]
    p.finished("r")
    assert p.take_events() == []


def test_a_refused_request_is_forgotten():
    p = planner()
    p.expect_load("r", staged(0, 10))
    p.expect_save("s", staged(0, 10))
    p.forget("r")
    p.forget("s")
    p.finished("r")
    assert plan(p, r=10, s=10) == StepCopies(1)
    assert p.take_events() == []


# ------------------------------------------------------------------ saves


def test_full_blocks_are_saved_as_they_are_computed_and_the_last_one_with_the_end():
    p = planner()
    p.expect_save("r", staged(0, 14))
    first = plan(p, r=6)
    assert first.saves == [(100, 0)]
    p.reported(first.number, 1, [])
    assert p.take_events() == [Copied("r", 6)]
    assert plan(p, r=7) == StepCopies(2)
    last = plan(p, r=14)
    assert last.saves == [(101, 1), (102, 2), (103, 3)]
    p.finished("r")
    p.reported(last.number, 1, [])
    assert p.take_events() == [Copied("r", 14), LetGo("r", 0)]


def test_what_the_peer_has_is_not_saved_and_what_vllm_has_cached_is():
    p = planner()
    p.expect_save("r", staged(1, 14))
    assert plan(p, r=12).saves == [(101, 0), (102, 1)]


def test_nothing_is_saved_twice_after_a_preemption():
    p = planner()
    p.expect_save("r", staged(0, 14))
    p.reported(plan(p, r=8).number, 1, [])
    p.take_events()
    assert plan(p, r=4) == StepCopies(2)
    assert plan(p, r=14).saves == [(102, 2), (103, 3)]


def test_an_aborted_save_keeps_its_staging_until_the_step_is_done():
    p = planner(ranks=2)
    p.expect_save("r", staged(0, 14))
    step = plan(p, r=8)
    p.finished("r")
    p.reported(step.number, 1, [])
    assert p.take_events() == []
    p.reported(step.number, 1, [])
    assert p.take_events() == [LetGo("r", 0)]


def test_nothing_is_copied_any_more_after_a_step_that_one_rank_could_not_save():
    p = planner(ranks=2)
    p.expect_save("r", staged(0, 12))
    first, second = plan(p, r=4), plan(p, r=8)
    p.reported(first.number, 1, [], saved=False)
    p.reported(first.number, 1, [])
    p.reported(second.number, 2, [])
    assert p.take_events() == []
    last = plan(p, r=12)
    p.finished("r")
    p.reported(last.number, 2, [])
    assert p.take_events() == [LetGo("r", 0)]
    p.expect_save("r", staged(0, 4))
    p.reported(plan(p, r=4).number, 2, [])
    assert p.take_events() == [Copied("r", 4), LetGo("r", 0)]


def test_steps_without_copies_have_no_number():
    p = planner()
    p.expect_save("r", staged(0, 14))
    assert plan(p, other=3) == StepCopies(1)
    assert plan(p, r=3) == StepCopies(1)
    assert plan(p, r=4).number == 1
    assert plan(p, r=8).number == 2


def test_reports_of_unknown_steps_do_nothing(caplog):
    p = planner()
    p.reported(7, 1, [])
    assert p.take_events() == []
    assert "step 7" in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_every_request_lets_go_once_whatever_happens(seed: int):
    """Steps overlap, as with vLLM's asynchronous scheduling; requests end at any time."""
    rng = random.Random(seed)
    p = planner(ranks=2)
    events: list[Copied | LetGo] = []
    under_way: list[int] = []
    alive: dict[str, int] = {}
    for number in range(60):
        key = f"r{number}"
        tokens = rng.randint(1, 18)
        if rng.random() < 0.5:
            p.expect_load(key, staged(0, tokens))
            if rng.random() < 0.8:
                p.allocated(key, p.matched(key, 0, tokens), OURS)
        else:
            p.expect_save(key, staged(0, tokens))
        alive[key] = 0
        for other in alive:
            alive[other] += rng.randint(0, 9)
        step = plan(p, **alive)
        if step.loads or step.saves:
            under_way += [step.number, step.number]
        for other in [one for one in alive if rng.random() < 0.3]:
            p.finished(other)
            del alive[other]
        while under_way and rng.random() < 0.6:
            p.reported(under_way.pop(0), 1, [])
        events += p.take_events()
    for other in alive:
        p.finished(other)
    for rest in under_way:
        p.reported(rest, 1, [])
    events += p.take_events()
    gone = [event.key for event in events if isinstance(event, LetGo)]
    assert sorted(gone) == sorted(f"r{number}" for number in range(60))
    for place, event in enumerate(events):
        if isinstance(event, LetGo):
            assert not any(other.key == event.key for other in events[place + 1 :])
