"""Which blocks are a tenant's, told by marks and by chains."""

from __future__ import annotations

import random

from pdserve.engine_core.tiers.ownership import owned
from pdserve.kv.tiers.block import TierBlock

MARK = b"mark"


def chain(root: bytes, *names: bytes, mark: bytes = b"") -> list[TierBlock]:
    """A chain of blocks, of which each has the mark."""
    parents = [root, *names]
    return [TierBlock(name, parents[i], root=mark) for i, name in enumerate(names)]


def test_a_chain_with_a_known_root_is_owned_and_no_other() -> None:
    blocks = [*chain(b"r", b"a", b"b"), *chain(b"a", b"c"), *chain(b"s", b"x", b"y")]
    assert owned(blocks, {b"r"}) == {b"a", b"b", b"c"}
    assert owned(blocks, {b"q"}) == set()
    assert owned([], {b"r"}) == set()


def test_a_marked_block_tells_of_its_whole_chain() -> None:
    """Its parent may be on the device, where blocks have no marks, and its child may have lost
    it."""
    blocks = chain(b"r", b"a", b"b", b"c")
    blocks[1] = TierBlock(b"b", b"a", root=MARK)
    assert owned([*blocks, *chain(b"s", b"x")], {MARK}) == {b"a", b"b", b"c"}


def test_a_chain_without_its_beginning_is_told_by_its_marks_alone() -> None:
    marked, unmarked = chain(b"gone", b"b", mark=MARK), chain(b"lost", b"y")
    assert owned([*marked, *unmarked], {MARK, b"r"}) == {b"b"}


def test_a_block_on_two_tiers_counts_once_and_keeps_its_mark() -> None:
    blocks = [TierBlock(b"a", b"r", root=MARK), TierBlock(b"a", b"r"), TierBlock(b"b", b"a")]
    for order in (blocks, blocks[::-1]):
        assert owned(order, {MARK}) == {b"a", b"b"}


def test_random_forests_agree_with_a_walk_of_each_block(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        roots = [bytes([200 + i]) for i in range(4)]
        blocks: list[TierBlock] = []
        true_root: dict[bytes, bytes] = {}
        for i in range(60):
            name = i.to_bytes(2, "big")
            parent = rng.choice([*roots, *true_root])
            true_root[name] = true_root.get(parent, parent)
            blocks.append(TierBlock(name, parent))
        rng.shuffle(blocks)
        wanted = {name for name, root in true_root.items() if root == roots[0]}
        assert owned(blocks, {roots[0]}) == wanted


def test_a_long_chain_is_no_recursion() -> None:
    names = [i.to_bytes(4, "big") for i in range(50_000)]
    assert len(owned(reversed(chain(b"r", *names)), {b"r"})) == 50_000
