from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.repetition import Repetition


def plainly(tokens: list[int], most: int, times: int, least: int) -> bool:
    """The definition: some pattern, written so many times, is how the tokens end."""
    for size in range(least, most + 1):
        if len(tokens) >= size * times and tokens[-size * times :] == tokens[-size:] * times:
            return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(1, 4),
)
def test_it_sees_what_the_definition_says(tokens, most, times, least):
    repetition = Repetition(most, times, least)
    for end, token in enumerate(tokens, 1):
        assert repetition.feed(token) == plainly(tokens[:end], most, times, least)


def test_a_long_output_costs_no_more_per_token_than_a_short_one():
    """By what is remembered, not by the clock: no list grows with the output."""
    repetition = Repetition(64, 65536)
    for token in range(20_000):
        repetition.feed(token % 2)
    assert max(len(places) for places in repetition._places.values()) <= 65
    assert len(repetition._runs) <= 64
