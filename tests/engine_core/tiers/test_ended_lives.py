"""Lives of nodes that have ended."""

from __future__ import annotations

from pdserve.engine_core.tiers.ended_lives import MOST_NODES, EndedLives


def test_a_life_and_all_before_it_have_ended() -> None:
    ended = EndedLives()
    assert not ended.has("w", 0)
    ended.add("w", 3)
    ended.add("w", 2)
    assert [ended.has("w", epoch) for epoch in (2, 3, 4)] == [True, True, False]
    assert not ended.has("other", 3)


def test_the_oldest_end_is_forgotten() -> None:
    ended = EndedLives()
    for number in range(MOST_NODES):
        ended.add(f"w{number}", 1)
    ended.add("w0", 2)
    ended.add("new", 1)
    assert ended.has("w0", 2)
    assert not ended.has("w1", 1)
    assert ended.has("new", 1)
