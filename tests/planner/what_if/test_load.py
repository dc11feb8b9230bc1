"""A load is what came lately: scaled, weighted, and the same for the same seed."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest

from pdserve.planner.recent_arrivals import RecentArrival
from pdserve.planner.what_if.load import OutputLengths, make_load

NONE = OutputLengths(())


def arrivals(count: int, apart: float = 0.5, weight: float = 1.0) -> list[RecentArrival]:
    return [
        RecentArrival(100 + apart * n, 10 + n, cached_tokens=5, weight=weight) for n in range(count)
    ]


def test_arrivals_are_replayed_in_order_from_zero():
    load = make_load(arrivals(10), NONE, 1.0, seed=1)
    assert [one.at for one in load] == [0.5 * n for n in range(10)]
    assert [one.prompt_tokens for one in load] == list(range(10, 20))


def test_a_forecast_of_twice_the_load_halves_the_time():
    load = make_load(arrivals(10), NONE, 2.0, seed=1)
    assert load[-1].at == 0.5 * 9 / 2
    assert len(load) == 10


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_factors_are_refused(factor: float):
    with pytest.raises(ValueError, match="scaled"):
        make_load(arrivals(3), NONE, factor, seed=1)


def test_the_newest_count():
    load = make_load(arrivals(30), NONE, 1.0, seed=1, most=10)
    assert [one.prompt_tokens for one in load] == list(range(30, 40))


@pytest.mark.parametrize("weight", [1.0, 2.5, 4.0])
def test_one_that_stands_for_several_comes_as_often(weight: float):
    load = make_load(arrivals(100, weight=weight), NONE, 1.0, seed=3)
    assert len(load) == pytest.approx(100 * weight, abs=2)
    assert load[-1].at == pytest.approx(0.5 * 99, abs=1.5)
    assert [one.at for one in load] == sorted(one.at for one in load)


def test_no_arrivals_are_no_load():
    assert make_load((), NONE, 1.0, seed=1) == ()


def test_the_last_token_is_always_computed():
    load = make_load([RecentArrival(0.0, 8, cached_tokens=8)], NONE, 1.0, seed=1)
    assert load[0].cached_tokens == 7


def test_the_same_seed_draws_the_same():
    lengths = OutputLengths([(n, n % 7 + 1) for n in range(500)])
    one, same, other = (make_load(arrivals(50), lengths, 1.0, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert [r.output_tokens for r in one] != [r.output_tokens for r in other]
    assert [r.at for r in one] == [r.at for r in other]


def test_lengths_follow_the_prompt():
    """Short prompts have long answers here, and long ones short answers."""
    random = Random(5)
    finished = [(300, random.randint(180, 220)) for _ in range(200)]
    finished += [(9_000, random.randint(1, 9)) for _ in range(200)]
    lengths = OutputLengths(finished)
    assert mean(lengths.draw(250, random) for _ in range(100)) > 150
    assert mean(lengths.draw(12_000, random) for _ in range(100)) < 10


def test_without_finished_requests_a_length_is_assumed():
    random = Random(1)
    assert NONE.draw(100, random) == 256
    assert all(1 <= NONE.rest(random) <= 256 for _ in range(50))


def test_streams_under_way_still_owe_something():
    lengths, random = OutputLengths([(1, 1), (1, 100), (1, 0)]), Random(1)
    rests = [lengths.rest(random) for _ in range(500)]
    assert min(rests) == 1
    assert max(rests) <= 100
    assert mean(rests) > 25


def test_rare_prompts_have_the_lengths_that_they_had_before():
    """The newest requests are long prompts; chats, which were frequent once, are coming back."""
    newest = [(9_000, 50)] * 200
    older = [(300, 2_000)] * 100
    random = Random(3)
    assert OutputLengths(newest).draw(300, random) == 50
    known = OutputLengths(newest, older)
    assert known.draw(300, random) == 2_000
    assert known.draw(9_000, random) == 50
    assert max(known.rest(random) for _ in range(200)) <= 50, (
        "streams under way are the newest ones"
    )


def test_equal_prompts_have_all_their_lengths():
    """Not the shortest ones, which come first in order."""
    finished = [(1024, output) for output in range(1, 501)]
    random = Random(4)
    for lengths in (OutputLengths(finished), OutputLengths([*finished, *[(100, 5)] * 50])):
        assert mean(lengths.draw(1024, random) for _ in range(400)) == pytest.approx(250, rel=0.1)
