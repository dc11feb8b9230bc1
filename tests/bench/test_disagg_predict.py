"""What the comparison of `predict` with `rule` calls noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bench.disagg_grid.cells import Scale
from bench.disagg_predict import CHOICES, Cell, Pair, cells, compare, page, row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.disagg_grid.runner import Job


def test_every_cell_of_the_grid_is_compared_once() -> None:
    words = [cell.words for cell in cells(Scale())]
    assert len(words) == len(set(words)) == 48
    assert "h100-8b, 1.25 GB/s, load 1.5, 6:2" in words


def test_jobs_of_both_choices_have_the_same_requests() -> None:
    cell = next(cells(Scale()))
    predict, rule = (cell.job(one, 3) for one in CHOICES)
    assert (predict[1].disagg, rule[1].disagg) == ("predict", "rule")
    assert (predict[0], *predict[2:]) == (rule[0], *rule[2:]) == (cell.world, 3, 33.64)


@pytest.mark.parametrize(
    ("predict", "rule", "verdict"),
    [
        ([1.0, 1.0, 1.0], [0.9, 0.9, 0.9], "more"),
        ([0.9, 0.9, 0.9], [1.0, 1.0, 1.0], "fewer"),
        ([0.995] * 3, [1.0] * 3, "within noise"),  # less than a point
        ([0.7, 1.0, 1.0], [1.0, 1.0, 1.0], "within noise"),  # one seed
        ([0.9, 0.9], [1.0, 1.0], "?"),  # too few seeds
    ],
)
def test_what_is_noise(predict: list[float], rule: list[float], verdict: str) -> None:
    assert Pair(predict, rule).verdict == verdict


def test_a_row_has_the_figures() -> None:
    text = row(next(cells(Scale())), Pair([0.5, 0.7, 0.6], [0.5, 0.5, 0.5]))
    assert text == (
        "| h100-8b | 25 GB/s | 0.3 | 2:6 | 3 | 60.0% | 50.0% | +10.0 | 11.5 | +0.0 to +20.0 | "
        "within noise |"
    )


class Known:
    """A runner whose results are known: what `predict` gains in a cell, by its number of seeds."""

    def __init__(self, gains: dict[tuple[float, int, float], list[float]]) -> None:
        self.gains = gains
        self.asked: dict[tuple[float, int, float], int] = {}
        self.seconds = 0.0
        self.done: set[object] = set()

    def run(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        found = []
        for world, arm, seed, _ in jobs:
            key = world.load, arm.prefill, world.bandwidth
            self.asked[key] = max(self.asked.get(key, 0), seed)
            gains = self.gains.get(key, [0.0])
            gain = gains[min(seed, len(gains)) - 1] if arm.disagg == "predict" else 0.0
            found.append({"good": 0.5 + gain})
            self.seconds += 1.0
            self.done.add((key, arm.disagg, seed))
        return found

    def known(self, jobs: Sequence[Job]) -> list[dict[str, Any]] | None:
        keys = [((w.load, a.prefill, w.bandwidth), a.disagg, seed) for w, a, seed, _ in jobs]
        return self.run(jobs) if self.done.issuperset(keys) else None


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


def test_no_seed_begins_after_the_time() -> None:
    chosen = of("h100-8b")
    found = compare(Known({}), chosen, 8, seconds=90.0)  # type: ignore[arg-type]
    assert {len(pair.points) for pair in found.values()} == {2}
    assert "24 cells have fewer than 3 seeds yet" in page(found, 48, [])


def test_the_page_names_the_cells_that_lose() -> None:
    chosen = of("h100-8b")[:3]
    pairs = [Pair([gain] * 8, [0.0] * 8) for gain in (0.2, -0.3, 0.0)]
    text = page(dict(zip(chosen, pairs, strict=True)), 48, ["a fact"])
    assert "- 3 of 48 cells ran." in text
    assert "more requests well than `rule` in 1 of them, fewer in 1, and as many" in text
    assert "gains -30.0 to +20.0 points, -3.3 on average" in text
    assert "- Fewer: h100-8b, 25 GB/s, load 0.3, 4:4: -30.0 points, with noise of 1.0" in text
    assert "- So `rule` stays the default" in text
    assert "- a fact" in text
    assert text.count("| within noise |") == 1
