"""What tokens write to blocks: read again as it was, from any division among ranks, or as nothing
that a token writes."""

from __future__ import annotations

import pytest

from pdserve.messages.transfer import RankKvLayout
from pdserve.transfer.copy_plan import PlanError
from pdserve_engines.sim.block_entries import HeadEntries, PlainEntries, head_part, make_entries
from pdserve_engines.sim.tokens import ENTRY_BYTES, entry_of
from tests.support.handoff_pair import kv_bytes

BLOCK = 4
DIVISIONS = [(6, 1), (6, 2), (6, 3), (4, 4), (1, 4), (1, 1), (0, 1)]
"""KV heads and ranks; 0: blocks have no heads."""


def layout(heads: int) -> RankKvLayout:
    return RankKvLayout(
        content="c", layers=1, heads=heads, tokens=BLOCK, dim=ENTRY_BYTES // 8, itemsize=4
    )


def entries(count: int) -> list[bytes]:
    found = [b""]
    for position in range(count):
        found.append(entry_of(7, position, found[-1]))
    return found[1:]


@pytest.mark.parametrize(("heads", "ranks"), DIVISIONS)
def test_entries_are_read_as_they_were_written(heads: int, ranks: int) -> None:
    held, wanted = make_entries(3, BLOCK, heads, ranks), entries(BLOCK)
    for slot, entry in enumerate(wanted):
        held.write(1, slot, entry)
    held.copy(1, 2)
    for block in (1, 2):
        assert [held.read(block, slot) for slot in range(BLOCK)] == wanted
        assert bytes(held.joined(block, 3)) == b"".join(wanted[:3])
    held.close()
    held.close()


@pytest.mark.parametrize(("heads", "ranks"), DIVISIONS[:-1])
def test_all_divisions_hold_the_same_bytes_of_each_head(heads: int, ranks: int) -> None:
    held, whole = HeadEntries(2, BLOCK, heads, ranks), HeadEntries(2, BLOCK, heads, 1)
    for slot, entry in enumerate(entries(BLOCK)):
        held.write(1, slot, entry)
        whole.write(1, slot, entry)
    ours, theirs = (kv_bytes(one.region(layout(heads)), [1], BLOCK) for one in (held, whole))
    assert (ours == theirs).all()
    one = entries(1)[0]
    assert [bytes(ours[0, :, head, 0].reshape(-1)) for head in range(heads)] == [
        head_part(one, head) for head in range(heads)
    ]
    held.close()
    whole.close()


@pytest.mark.parametrize(("heads", "ranks"), DIVISIONS[:-1])
def test_a_changed_byte_of_any_rank_is_noticed(heads: int, ranks: int) -> None:
    held, wanted = HeadEntries(1, BLOCK, heads, ranks), entries(BLOCK)
    for slot, entry in enumerate(wanted):
        held.write(0, slot, entry)
    for pool in held.region(layout(heads)).pools:
        assert pool.view is not None
        for at in range(len(pool.view)):
            pool.view[at] ^= 1
            assert held.joined(0, BLOCK) != b"".join(wanted)
            pool.view[at] ^= 1
    assert held.joined(0, BLOCK) == b"".join(wanted)
    held.close()


def test_swapped_heads_are_noticed() -> None:
    held, (entry,) = HeadEntries(1, BLOCK, 4, 2), entries(1)
    held.write(0, 0, entry)
    first, second = (pool.view for pool in held.region(layout(4)).pools)
    assert first is not None
    assert second is not None
    first[:], second[:] = bytes(second), bytes(first)
    assert held.read(0, 0) != entry
    held.close()


def test_blocks_without_heads_are_stored_as_in_release_0_2() -> None:
    """Workers of both releases exchange blocks."""
    held = make_entries(1, BLOCK, 0, 1)
    assert isinstance(held, PlainEntries)
    for slot, entry in enumerate(entries(BLOCK)):
        held.write(0, slot, entry)
    region = held.region(layout(1))
    assert region.view is not None
    assert bytes(region.view) == b"".join(entries(BLOCK))
    held.close()


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(PlanError, match="6 heads cannot be divided by 4 ranks"):
        make_entries(1, BLOCK, 6, 4)
