"""What the comparison of `predict` with `rule` calls noise."""

from __future__ import annotations

import pytest

from bench.disagg_grid.cells import Scale
from bench.disagg_predict import Pair, cells, row


def test_every_cell_of_the_grid_is_compared_once() -> None:
    words = [cell.words for cell in cells(Scale())]
    assert len(words) == len(set(words)) == 48
    assert "h100-8b, 1.25 GB/s, load 1.5, 6:2" in words


def test_jobs_of_both_choices_have_the_same_seeds() -> None:
    cell = next(cells(Scale()))
    predict, rule = (cell.jobs(one, 3) for one in ("predict", "rule"))
    assert [job[2] for job in predict] == [job[2] for job in rule] == [1, 2, 3]
    assert {job[1].disagg for job in predict} == {"predict"}


@pytest.mark.parametrize(
    ("predict", "rule", "verdict"),
    [
        ([1.0, 1.0, 1.0], [0.9, 0.9, 0.9], "more"),
        ([0.9, 0.9, 0.9], [1.0, 1.0, 1.0], "fewer"),
        ([0.995] * 3, [1.0] * 3, "within noise"),  # less than a point
        ([0.7, 1.0, 1.0], [1.0, 1.0, 1.0], "within noise"),  # one seed
        ([0.9], [1.0], "within noise"),  # says nothing
    ],
)
def test_what_is_noise(predict: list[float], rule: list[float], verdict: str) -> None:
    assert Pair(predict, rule).verdict == verdict


def test_a_row_has_the_figures() -> None:
    text = row(next(cells(Scale())), Pair([0.5, 0.7], [0.5, 0.5]))
    assert text == (
        "| h100-8b | 25 GB/s | 0.3 | 2:6 | 60.0% | 50.0% | +10.0 | 20.0 | +0.0 to +20.0 | "
        "within noise |"
    )
