"""Turns of conversations, told from block hashes."""

from __future__ import annotations

from pdserve.kv.tiers.turns import TurnTracker


def chain(text: str) -> list[bytes]:
    """A hash for each letter, which depends on the letters before it."""
    return [text[: end + 1].encode() for end in range(len(text))]


def test_a_prompt_that_repeats_an_earlier_one_is_its_next_turn() -> None:
    tracker = TurnTracker()
    assert [tracker.turn(chain(text)) for text in ("sab", "sabcd", "sabcdef")] == [1, 2, 3]


def test_a_shared_system_prompt_makes_no_turn() -> None:
    tracker = TurnTracker()
    assert [tracker.turn(chain(text)) for text in ("sab", "scd", "sef")] == [1, 1, 1]


def test_a_prompt_that_many_continue_is_no_conversation() -> None:
    """A question so short that its last full block is the system prompt's."""
    tracker = TurnTracker()
    tracker.turn(chain("s"))
    turns = [tracker.turn(chain("s" + letter * 2)) for letter in "abcdefgh"]
    assert turns == [2] * 4 + [1] * 4
    assert tracker.turn(chain("saabb")) == 3, "its own turns still count"


def test_an_answer_that_is_edited_is_the_same_turn() -> None:
    tracker = TurnTracker()
    tracker.turn(chain("sab"))
    assert [tracker.turn(chain(text)) for text in ("sabc", "sabd")] == [2, 2]


def test_a_prompt_that_is_sent_again_counts_as_a_turn_for_a_while() -> None:
    tracker = TurnTracker()
    assert [tracker.turn(chain("sab")) for _ in range(7)] == [1, 2, 3, 4, 5, 1, 1]
    assert tracker.turn(chain("sabc")) == 1


def test_a_short_prompt_tells_nothing() -> None:
    tracker = TurnTracker()
    assert tracker.turn([]) == 1
    assert len(tracker) == 0


def test_memory_is_bounded_and_a_conversation_that_goes_on_is_kept() -> None:
    tracker = TurnTracker(most=3)
    tracker.turn(chain("ab"))
    for other in ("xy", "uv"):
        tracker.turn(chain(other))
    assert tracker.turn(chain("abc")) == 2  # forgets "ab" itself, which nobody needs any longer
    assert len(tracker) == 3
    tracker.turn(chain("mn"))
    assert tracker.turn(chain("abcd")) == 3
    tracker.clear()
    assert tracker.turn(chain("abcd")) == 1
