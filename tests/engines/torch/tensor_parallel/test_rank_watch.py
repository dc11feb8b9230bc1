from __future__ import annotations

import pytest

from pdserve_engines.torch.tensor_parallel.rank_watch import RankWatch, beat_interval, look_interval

PATIENCE = 8.0


def looks(watch: RankWatch, ticks: int, begin: float, seconds: float) -> float | None:
    """When the rank counts as standing still, if it keeps to `ticks`; None: not in this time."""
    steps = round(seconds / look_interval(PATIENCE))
    for step in range(1, steps + 1):
        now = begin + step * look_interval(PATIENCE)
        if watch.look(ticks, now):
            return now
    return None


def test_a_rank_without_a_beat_stands_still_after_the_patience() -> None:
    watch = RankWatch(PATIENCE)
    assert not watch.look(5, 100.0)
    assert looks(watch, 5, 100.0, 20.0) == 100.0 + PATIENCE


def test_each_beat_begins_the_time_anew() -> None:
    watch = RankWatch(PATIENCE)
    for beat in range(20):
        assert looks(watch, beat, 100.0 + 7.0 * beat, 7.0) is None


@pytest.mark.parametrize("patience", [0.1, 1.0, 8.0, 3600.0])
def test_several_beats_and_looks_fit_into_the_patience(patience: float) -> None:
    assert beat_interval(patience) + look_interval(patience) < patience / 2


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The whole engine was stopped, and the rank with it: it gets the time to beat again."""
    watch = RankWatch(PATIENCE)
    watch.look(5, 100.0)
    assert not watch.look(5, 500.0)
    assert looks(watch, 5, 500.0, PATIENCE - 3 * look_interval(PATIENCE)) is None
