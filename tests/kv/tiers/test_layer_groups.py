"""Into how many layer groups blocks are divided, and where each lies."""

from __future__ import annotations

import pytest

from pdserve.kv.tiers.layer_groups import LayerGroups, most_groups

MB = 1_000_000
KIB = 1 << 10


@pytest.mark.parametrize(
    ("size", "block_bytes", "layers", "groups"),
    [
        (9 * MB, 2048 * KIB, 32, 1),
        (10 * MB, 2048 * KIB, 32, 2),
        (19 * MB, 2048 * KIB, 32, 2),
        (20 * MB, 2048 * KIB, 32, 4),
        (900 * MB, 2048 * KIB, 32, 4),
        (900 * MB, 1024 * KIB, 32, 4),
        (900 * MB, 1023 * KIB, 32, 2),
        (900 * MB, 511 * KIB, 32, 1),
        (900 * MB, 2048 * KIB, 3, 2),
        (900 * MB, 2048 * KIB, 1, 1),
    ],
)
def test_groups_are_large_and_their_runs_long(
    size: int, block_bytes: int, layers: int, groups: int
) -> None:
    assert most_groups(size, block_bytes, layers) == groups


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 32])
@pytest.mark.parametrize("forced", [1, 2, 4])
def test_the_groups_cover_a_block_and_every_layer_once(layers: int, forced: int) -> None:
    rule = LayerGroups(layers, layers * 10, forced)
    groups = rule.count(1)
    assert groups == min(forced, layers)
    ends = [0]
    for group in range(groups):
        begin, end = rule.span(group, groups)
        assert begin == ends[-1] < end
        assert begin == rule.first_layer(group, groups) * 10
        ends.append(end)
    assert ends[-1] == layers * 10


def test_few_blocks_are_copied_whole() -> None:
    rule = LayerGroups(32, 2048 * KIB)
    assert [rule.count(blocks) for blocks in (1, 4, 5, 9, 10, 500)] == [1, 1, 2, 2, 4, 4]
