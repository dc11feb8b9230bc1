"""The noise is Philox4x32-10, its published vectors included, and depends on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from pdserve_engines.torch.sampling.noise import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_published_vectors_come_out(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    columns = np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None]
    assert philox4x32(*columns)[:, 0].tolist() == expected


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = [(seed, seed % 3, seed % 5, seed % 7) for seed in range(40)]
    together = uniforms(*map(list, zip(*rows, strict=True)))
    alone = [float(uniforms([a], [b], [c], [d])[0]) for a, b, c, d in rows]
    assert together.tolist() == alone


def test_every_part_of_the_key_matters() -> None:
    rows = [
        (1, 0, 0, 0),
        (2, 0, 0, 0),
        (1 << 40, 0, 0, 0),
        (1, 1, 0, 0),
        (1, 0, 1, 0),
        (1, 0, 0, 1),
    ]
    found = uniforms(*map(list, zip(*rows, strict=True)))
    assert len(set(found.tolist())) == len(rows)


def test_seeds_outside_64_bits_wrap() -> None:
    found = uniforms([3, 3 + (1 << 64), -1, (1 << 64) - 1], [0] * 4, [0] * 4, [0] * 4)
    assert found[0] == found[1]
    assert found[2] == found[3]


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    count, bins = 20000, 20
    found = uniforms([7] * count, [0] * count, [0] * count, list(range(count)))
    assert found.min() >= 0
    assert found.max() < 1
    histogram = np.histogram(found, bins, (0.0, 1.0))[0]
    chi_square = ((histogram - count / bins) ** 2 / (count / bins)).sum()
    assert chi_square < 43.8  # 99.9th percentile at 19 degrees of freedom
    correlation = np.corrcoef(found[:-1], found[1:])[0, 1]
    assert abs(correlation) < 0.03
