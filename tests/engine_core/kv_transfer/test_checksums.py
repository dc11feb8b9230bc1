from __future__ import annotations

import zlib
from random import Random

import pytest
from msgspec.structs import replace

from pdserve.engine_core.kv_transfer.checksums import checksum_of
from pdserve.messages.transfer import RankKvLayout
from pdserve.transfer.base import Region
from pdserve.transfer.copy_plan import block_bytes, heads_of

HEADS = 6
LAYOUT = RankKvLayout(content="m", layers=2, heads=HEADS, tokens=4, dim=3, itemsize=2)
HEAD = LAYOUT.tokens * LAYOUT.dim * LAYOUT.itemsize
BLOCKS = 3


def whole(layout: RankKvLayout) -> Region:
    memory = bytearray(Random(0).randbytes(BLOCKS * block_bytes(layout)))
    return Region(layout, BLOCKS, memoryview(memory))


def divided(region: Region, ranks: int) -> Region:
    """The same blocks on several ranks."""
    assert region.view is not None
    layouts = [replace(region.layout, tp=ranks, rank=rank) for rank in range(ranks)]
    rows = [
        region.view[at : at + region.layout.heads * HEAD]
        for at in range(0, region.size, region.layout.heads * HEAD)
    ]
    pools = []
    for layout in layouts:
        held = heads_of(layout)
        memory = b"".join(bytes(row[held.start * HEAD : held.stop * HEAD]) for row in rows)
        pools.append(Region(layout, BLOCKS, memoryview(bytearray(memory))))
    return Region(region.layout, BLOCKS, pools[0].view, ranks=tuple(pools))


@pytest.mark.parametrize("tokens", [1, 3, 4])
@pytest.mark.parametrize(("heads", "ranks"), [(6, 2), (6, 3), (6, 6), (2, 4), (1, 3)])
def test_a_checksum_does_not_depend_on_the_number_of_ranks(
    heads: int, ranks: int, tokens: int
) -> None:
    alone = whole(replace(LAYOUT, heads=heads))
    several = divided(alone, ranks)
    for block in range(BLOCKS):
        assert checksum_of(several, block, tokens) == checksum_of(alone, block, tokens)


def test_a_whole_block_has_the_crc_of_its_bytes() -> None:
    region = whole(LAYOUT)
    assert region.view is not None
    size = region.block_bytes
    assert checksum_of(region, 1, LAYOUT.tokens) == zlib.crc32(region.view[size : 2 * size])


@pytest.mark.parametrize("rank", range(4))
def test_a_byte_that_differs_on_any_rank_is_noticed(rank: int) -> None:
    """Also on a rank that holds a head which another one has, too."""
    alone = whole(replace(LAYOUT, heads=2))
    several = divided(alone, 4)
    view = several.ranks[rank].view
    assert view is not None
    view[several.ranks[rank].block_bytes + 5] ^= 1
    assert checksum_of(several, 1, LAYOUT.tokens) == -1
    assert checksum_of(several, 0, LAYOUT.tokens) == checksum_of(alone, 0, LAYOUT.tokens)


def test_tokens_that_are_not_valid_do_not_count() -> None:
    alone = whole(LAYOUT)
    several = divided(alone, 3)
    view = several.ranks[1].view
    assert view is not None
    view[HEAD - 1] ^= 1
    assert checksum_of(several, 0, 3) == checksum_of(alone, 0, 3)
    assert checksum_of(several, 0, 4) != checksum_of(alone, 0, 4)


def test_bytes_of_a_block_count_every_copy_of_a_head() -> None:
    alone = whole(replace(LAYOUT, heads=2))
    assert divided(alone, 2).block_bytes == alone.block_bytes
    assert divided(alone, 4).block_bytes == 2 * alone.block_bytes
