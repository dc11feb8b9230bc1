from __future__ import annotations

from msgspec.structs import replace

from pdserve.worker.disagg.credits import Credits
from tests.worker.disagg.cluster import CAPABILITIES

ENGINE = replace(CAPABILITIES, max_batch_tokens=1000, max_sequences=8)


def took(*lengths: int) -> Credits:
    credits = Credits()
    for length in lengths:
        credits.took(length)
    return credits


def test_an_idle_engine_takes_two_steps_of_what_usually_comes():
    assert took().left(0, 0, ENGINE) == 2
    assert took(250).left(0, 0, ENGINE) == 8
    assert took(500).left(0, 0, ENGINE) == 4
    assert took(5000).left(0, 0, ENGINE) == 2


def test_there_is_always_one_that_computes_and_one_that_is_opened():
    credits = took(50_000)
    assert credits.left(1, 50_000, ENGINE) == 1
    assert credits.left(2, 100_000, ENGINE) == 0


def test_what_is_in_hand_counts():
    credits = took(500)
    assert credits.left(2, 1000, ENGINE) == 2
    assert credits.left(4, 2000, ENGINE) == 0
    assert credits.left(8, 80, ENGINE) == 0


def test_a_share_bounds_the_tokens_that_a_step_may_find():
    assert took(50).left(0, 0, ENGINE, 0.25) == 5
    assert took(50).left(2, 100, ENGINE, 0.25) == 3
    assert took(50).left(5, 250, ENGINE, 0.25) == 0
    assert took(100).left(0, 0, ENGINE, 0.5) == 5


def test_a_share_leaves_one_prompt_however_long():
    assert took(5000).left(0, 0, ENGINE, 0.25) == 1
    assert took(5000).left(1, 5000, ENGINE, 0.25) == 0


def test_no_more_than_the_engine_runs():
    assert took(1).left(0, 0, ENGINE) == 8
    assert took(1).left(7, 7, ENGINE) == 1
