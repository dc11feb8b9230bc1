"""Every batch has a graph with room, and not much more room than it needs."""

from __future__ import annotations

import pytest

from pdserve_engines.torch.cuda.graphs.bucket_sizes import (
    MOST_ROWS,
    bucket_sizes,
    smallest_bucket,
)


def test_sizes_are_those_of_small_batches_first() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert bucket_sizes(70)[-3:] == (56, 64, 70)
    assert bucket_sizes(256)[-4:] == (160, 192, 224, 256)


@pytest.mark.parametrize("most", [1, 5, 64, 100, 256, MOST_ROWS, 5000])
def test_every_batch_up_to_the_most_takes_the_smallest_graph_with_room(most: int) -> None:
    sizes = bucket_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, min(most, MOST_ROWS) + 1):
        size = smallest_bucket(sizes, rows)
        assert size is not None
        assert rows <= size < rows + 32
        assert not [other for other in sizes if rows <= other < size]
    assert smallest_bucket(sizes, sizes[-1] + 1) is None
