"""The smallest clusters are found with few replays, also where larger ones are worse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.sim.capacity.search import PlanCell, PlanSearch
from pdserve.sim.capacity.shapes import ClusterShape, aggregated
from pdserve.sim.capacity.trial import TrialResult

Truth = Callable[[ClusterShape, int], float]
"""The share of the trace that is replayed before the objective is missed; 1: it is kept."""


def result(share: float) -> TrialResult:
    return TrialResult(
        met=share >= 1,
        total=100,
        ended=int(100 * min(1.0, share)),
        missed={"ttft": 0},
        worst_share=0.0,
        ttft_p50=0.0,
        ttft_p99=0.0,
        itl_p99=0.0,
    )


def searched(truth: Truth, *, most: int = 64, floor: int = 1, modes=("aggregated",), width=2):
    search = PlanSearch(floor=floor, most=most, seeds=2, width=width, modes=modes)
    for cells in search.steps():
        assert cells
        assert not set(cells) & set(search.known), "no cell is replayed twice"
        assert all(cell.shape.size <= most for cell in cells)
        search.known.update({cell: result(truth(*cell)) for cell in cells})
    return search


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("floor", [1, 3, 40])
@pytest.mark.parametrize("least", [1, 2, 3, 7, 33, 64, 65])
def test_the_smallest_size_is_found(least: int, floor: int, width: int) -> None:
    search = searched(lambda shape, _: shape.size / least, floor=floor, width=width)
    assert search.aggregated == (aggregated(least) if least <= 64 else None)
    sizes = {cell.shape.size for cell in search.known}
    assert len(sizes) <= 17 + max(0, floor - least)


def test_the_answer_and_its_neighbours_are_replayed_with_every_seed() -> None:
    search = searched(lambda shape, _: shape.size / 5)
    assert len(search.of(aggregated(5))) == 2
    assert len(search.of(aggregated(6))) == 2
    assert [one.met for one in search.of(aggregated(4))] == [False]


def test_a_size_that_one_seed_refuses_is_no_answer() -> None:
    search = searched(lambda shape, seed: shape.size / (5 + 2 * seed))
    assert search.aggregated == aggregated(7)
    assert not search.kept(aggregated(6))


def test_a_smaller_size_that_also_works_is_found() -> None:
    """16 keeps the objective, 8 does not, and nor does 12; 14 and 15 do, and 13."""
    good = {13, 14, 15, 16}
    search = searched(lambda shape, _: float(shape.size in good), width=1)
    assert search.aggregated == aggregated(13)


def test_a_larger_cluster_that_is_worse_is_noticed() -> None:
    search = searched(lambda shape, _: 0.5 if shape.size == 6 else shape.size / 5)
    assert search.aggregated == aggregated(5)
    assert not search.kept(aggregated(6))


def needs(prefill: int, decode: int) -> Truth:
    """Enough prefill and enough decode workers; aggregated ones never do."""

    def truth(shape: ClusterShape, seed: int) -> float:
        if shape.workers:
            return 0.3
        return min(shape.prefill / prefill, shape.decode / decode)

    return truth


@pytest.mark.parametrize(
    ("prefill", "decode"), [(1, 1), (1, 2), (5, 1), (2, 9), (13, 4), (20, 21), (1, 30)]
)
def test_the_ratio_is_found(prefill: int, decode: int) -> None:
    search = searched(needs(prefill, decode), modes=("aggregated", "split"))
    assert search.aggregated is None
    assert search.split == ClusterShape(0, prefill, decode)
    assert search.answer == search.split
    assert len(search.known) < 60


def test_split_clusters_are_not_larger_than_the_aggregated_answer() -> None:
    search = searched(
        lambda shape, _: shape.size / 6 if shape.workers else shape.size / 9,
        modes=("aggregated", "split"),
    )
    assert (search.aggregated, search.split) == (aggregated(6), None)
    assert all(cell.shape.size <= 6 for cell in search.known if cell.shape.prefill)


def test_of_one_size_the_aggregated_cluster_is_chosen() -> None:
    search = searched(lambda shape, _: shape.size / 4, modes=("aggregated", "split"))
    assert search.split is not None
    assert search.split.size == 4
    assert search.answer == aggregated(4)


def test_a_split_cluster_must_hold_with_every_seed() -> None:
    def truth(shape: ClusterShape, seed: int) -> float:
        return min(shape.prefill / 2, shape.decode / (4 + seed))

    search = searched(truth, modes=("split",))
    assert search.split == ClusterShape(0, 2, 5)
    assert search.kept(ClusterShape(0, 2, 5))
    assert not search.kept(ClusterShape(0, 2, 4))
    assert PlanCell(ClusterShape(0, 2, 4), 1) in search.known
