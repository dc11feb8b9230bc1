"""What the comparison of `predict` with `rule` calls noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bench.disagg_grid.cells import Scale
from bench.disagg_predict import Cell, Pair, cells, compare, page, row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.disagg_grid.runner import Job


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
        "| h100-8b | 25 GB/s | 0.3 | 2:6 | 2 | 60.0% | 50.0% | +10.0 | 20.0 | +0.0 to +20.0 | "
        "within noise |"
    )


class Known:
    """A runner whose results are known: what `predict` gains in a cell, by its number of seeds."""

    def __init__(self, gains: dict[tuple[float, int, float], list[float]]) -> None:
        self.gains = gains
        self.asked: dict[tuple[float, int, float], int] = {}

    def run(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        found = []
        for world, arm, seed, _ in jobs:
            key = world.load, arm.prefill, world.bandwidth
            self.asked[key] = max(self.asked.get(key, 0), seed)
            gains = self.gains.get(key, [0.0])
            gain = gains[min(seed, len(gains)) - 1] if arm.disagg == "predict" else 0.0
            found.append({"good": 0.5 + gain})
        return found


def of(preset: str) -> list[Cell]:
    return [cell for cell in cells(Scale()) if cell.world.kind.preset == preset]


def test_a_cell_gets_as_many_seeds_as_its_verdict_needs() -> None:
    more, fewer, chance = (0.3, 2, 25e9), (0.6, 4, 25e9), (1.0, 6, 1.25e9)
    worse_by_chance = [-0.05] * 8 + [0.05] * 8
    runner: Any = Known({more: [0.2], fewer: [-0.2], chance: worse_by_chance})
    found = compare(runner, of("h100-8b"), 8)
    assert {key: runner.asked[key] for key in (more, fewer, chance)} == {
        more: 3,
        fewer: 16,
        chance: 16,
    }
    assert set(runner.asked.values()) == {3, 8, 16}
    verdicts = [pair.verdict for pair in found.values()]
    assert (verdicts.count("more"), verdicts.count("fewer")) == (1, 1)


def test_the_page_names_the_cells_that_lose() -> None:
    chosen = of("h100-8b")[:3]
    pairs = [Pair([gain] * 8, [0.0] * 8) for gain in (0.2, -0.3, 0.0)]
    text = page(dict(zip(chosen, pairs, strict=True)), 48, ["a fact"])
    assert "- 3 of 48 cells ran." in text
    assert "more requests well than `rule` in 1 of them, fewer in 1, and as many" in text
    assert "gains +20.0 points at most and -30.0 at least, -3.3 on average" in text
    assert "- Fewer: h100-8b, 25 GB/s, load 0.3, 4:4: -30.0 points, with noise of 1.0" in text
    assert "- a fact" in text
    assert text.count("| within noise |") == 1
