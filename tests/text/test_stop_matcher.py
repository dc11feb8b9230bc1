"""Stop strings are found as a naive search over the whole text finds them."""

from __future__ import annotations

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from pdserve.text.stop_matcher import StopMatcher
from tests.support.seeds import is_long, number_for, run_seed

EXAMPLES = 3000 if is_long() else 300
SEED = number_for(run_seed(), __name__)

letters = st.text(alphabet="ab", max_size=6)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


def naive(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[int, str] | None:
    """(end of the match, stop string): first completed, then first listed."""
    allowed_from = sum(map(len, pieces[:min_tokens]))
    text = "".join(pieces)
    for end in range(allowed_from + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


def tokens_up_to(pieces: list[str], end: int) -> int:
    count = 0
    while sum(map(len, pieces[:count])) < end:
        count += 1
    return count


@seed(SEED)
@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(st.lists(letters, max_size=12), stop_lists, st.booleans(), st.integers(0, 4))
def test_the_outcome_is_that_of_a_search_over_the_whole_text(pieces, stops, include, min_tokens):
    matcher = StopMatcher(stops, include_stop=include, min_tokens=min_tokens)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            break
    expected = naive(pieces, stops, min_tokens)
    text = "".join(pieces)
    if expected is None:
        assert matcher.matched is None
        assert shown + matcher.flush() == text
        assert matcher.tokens == len(pieces)
        return
    end, stop = expected
    assert matcher.matched == stop
    assert shown == text[: end if include else end - len(stop)]
    assert matcher.tokens == tokens_up_to(pieces, end)


@seed(SEED)
@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(st.lists(letters, max_size=12), stop_lists)
def test_exactly_what_may_become_a_stop_string_is_held_back(pieces, stops):
    matcher = StopMatcher(stops)
    shown, text = "", ""
    for piece in pieces:
        shown += matcher.feed(piece)
        text += piece
        if matcher.matched is not None:
            return
        starts = [stop[:size] for stop in stops for size in range(len(stop))]
        needed = max((len(start) for start in starts if text.endswith(start)), default=0)
        assert len(text) - len(shown) == needed
        assert needed < max(map(len, stops), default=1)


def test_text_without_a_stop_string_is_shown_at_once():
    matcher = StopMatcher([])
    assert matcher.feed("anything </s") == "anything </s"
    assert matcher.flush() == ""


def test_a_stop_string_across_tokens_ends_the_text_before_it():
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.feed(text) for text in ["Hi.", "\n", "\nUs", "er", ": x"]] == [
        "Hi.",
        "",
        "",
        "",
        "",
    ]
    assert matcher.matched == "\n\nUser:"
    assert matcher.tokens == 5


def test_a_start_that_leads_nowhere_is_shown_as_soon_as_that_is_known():
    matcher = StopMatcher(["</tool>"])
    assert matcher.feed("a </to") == "a "
    assert matcher.feed("p") == "</top"


def test_the_stop_string_stays_when_asked_for():
    matcher = StopMatcher(["END"], include_stop=True)
    assert matcher.feed("the END of it") == "the END"
    assert matcher.matched == "END"


def test_of_two_completed_at_once_the_first_listed_wins():
    for stops, matched, text in [(["b", "ab"], "b", "xa"), (["ab", "b"], "ab", "x")]:
        matcher = StopMatcher(stops)
        assert matcher.feed("xab") == text
        assert matcher.matched == matched


def test_what_flush_gives_can_still_complete_nothing():
    matcher = StopMatcher(["abc"])
    assert matcher.feed("ab") == ""
    assert matcher.flush() == "ab"
    assert matcher.flush() == ""


def test_text_without_a_token_of_its_own_is_not_counted():
    matcher = StopMatcher(["\ufffd!"])
    assert matcher.feed("a") == "a"
    assert matcher.feed("\ufffd", tokens=0) == ""
    assert matcher.tokens == 1


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_long_stop_strings_of_one_character_cost_linear_time():
    matcher = StopMatcher(["a" * 1000 + "b"])
    assert sum(len(matcher.feed("a" * 10)) for _ in range(10_000)) == 100_000 - 1000


def test_the_choices_of_a_request_share_what_is_made_of_its_stop_strings():
    """A hundred choices of one request would each take 50 ms else."""
    stops = tuple(f"{number:x}" * 1000 for number in range(16))
    assert StopMatcher(stops)._root is StopMatcher(stops)._root
