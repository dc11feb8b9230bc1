from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.repetition import RepetitionDetector
from tests.support.seeds import number_for


def plainly(tokens: list[int], most: int, times: int, least: int) -> bool:
    """The definition: some pattern, written so many times, is how the tokens end."""
    for size in range(least, most + 1):
        if len(tokens) >= size * times and tokens[-size * times :] == tokens[-size:] * times:
            return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(1, 4),
    st.sampled_from([0, 1, 7, 30]),
)
def test_it_sees_what_the_definition_says(tokens, most, times, least, after):
    repetition = RepetitionDetector(most, times, least, after)
    for end, token in enumerate(tokens, 1):
        wanted = end >= after and plainly(tokens[:end], most, times, least)
        assert repetition.feed(token * 70_000) == wanted


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.integers(2, 40),
    st.lists(st.integers(0, 99), max_size=3),
)
def test_it_sees_patterns_far_longer_than_what_it_remembers(pattern, times, before):
    repetition = RepetitionDetector(len(pattern), times)
    tokens = before + pattern * (times + 1)
    found = next(end for end, token in enumerate(tokens, 1) if repetition.feed(token))
    assert plainly(tokens[:found], len(pattern), times, 1)
    assert not any(plainly(tokens[:end], len(pattern), times, 1) for end in range(found))


TEXTS: dict[str, Callable[[int], int]] = {
    "the same token": lambda at: 7,
    "two tokens in turn": lambda at: at % 2,
    "chance": lambda at: number_for("repetition", str(at)) % 2,
    "a long pattern": lambda at: number_for("repetition", str(at % 512)) % 3,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("arguments", [(1024, 65536), (1024, 2, 512), (1024, 65536, 1, 2500)])
def test_a_token_costs_a_handful_of_looks_and_each_is_compared_once(name, arguments, monkeypatch):
    """By counts, not by the clock: whatever the output is."""
    looks = compared = 0
    number = RepetitionDetector._number

    def counted(self: RepetitionDetector, begin: int, end: int) -> int:
        nonlocal looks, compared
        looks += 1
        compared += end - begin + 1
        return number(self, begin, end)

    monkeypatch.setattr(RepetitionDetector, "_number", counted)
    repetition = RepetitionDetector(*arguments)
    tokens = 3000
    for at in range(tokens):
        if repetition.feed(TEXTS[name](at)):
            break
    assert looks < 2 * 20 * tokens
    assert compared <= 2 * 1024 * tokens
    assert len(repetition._history) <= 4 * (4 * 1024 + 2)
    assert sum(map(len, repetition._due.values())) <= 1024


def test_nothing_is_planned_before_the_first_token():
    """A request may have many choices, each with a detector of its own."""
    assert not RepetitionDetector(1024, 65536)._due


def test_a_long_output_is_not_remembered():
    repetition = RepetitionDetector(64, 65536)
    for token in range(20_000):
        repetition.feed(token % 2)
    assert len(repetition._history) <= 4 * (4 * 64 + 2)
    assert len(repetition._due) <= 64
