"""Windows over samples, and what a histogram has grown by."""

from __future__ import annotations

import pytest

from pdserve.observe.recent import Recent, trimmed


def test_the_newest_sample_that_is_old_enough_is_taken() -> None:
    recent = Recent(0.0, 0)
    for second in range(1, 200):
        recent.note(float(second), second)
    assert recent.since(199.0, 10.0) == (10.0, 189)
    assert recent.since(199.5, 10.0) == (10.5, 189)
    assert recent.since(199.0, 60.0) == (60.0, 139)


def test_shortly_after_the_start_the_window_is_shorter() -> None:
    recent = Recent(5.0, 7)
    assert recent.since(5.0, 10.0) == (0.0, 7)
    assert recent.since(8.0, 60.0) == (3.0, 7)


def test_it_is_bounded_and_keeps_one_object_while_nothing_changes() -> None:
    recent: Recent[list[int]] = Recent(0.0, [1])
    for tick in range(10_000):
        recent.note(tick * 0.05, [1])
    assert len(recent) < 70
    ages = (recent.since(500.0, seconds).sample for seconds in (1.0, 10.0, 60.0))
    assert len({id(sample) for sample in ages}) == 1


def test_after_a_pause_the_last_sample_before_it_counts() -> None:
    """A stalled process notes nothing; what it then reports covers the pause."""
    recent = Recent(0.0, 0)
    recent.note(1.0, 1)
    recent.note(1000.0, 2)
    assert recent.since(1000.5, 10.0) == (999.5, 1)


def test_a_window_after_a_rest_begins_when_the_rest_ends_at_the_earliest() -> None:
    recent = Recent(0.0, 0)
    recent.note(100.0, 5)
    recent.note(160.0, 5)  # work begins
    recent.note(161.0, 7)
    assert recent.since(165.0, 10.0) == (10.0, 5)
    assert recent.since(165.0, 60.0) == (60.0, 5)


@pytest.mark.parametrize(
    ("now", "then", "grown"),
    [
        ([0, 0, 0, 0], [], ((), ())),
        ([5, 0, 2, 0], [5, 0, 2, 0], ((), ())),
        ([0, 0, 3, 0], [], ((2.0, 3.0), (0, 3))),
        ([4, 1, 0, 0], [1, 0, 0, 0], ((1.0, 2.0), (3, 1))),
        ([0, 0, 0, 9], [0, 0, 0, 2], ((3.0,), (0, 7))),
        ([1, 0, 0, 1], [], ((1.0, 2.0, 3.0), (1, 0, 0, 1))),
    ],
)
def test_empty_buckets_at_both_ends_are_left_out(
    now: list[int], then: list[int], grown: tuple[tuple[float, ...], tuple[int, ...]]
) -> None:
    assert trimmed((1.0, 2.0, 3.0), now, then) == grown
