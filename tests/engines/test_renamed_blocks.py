"""Blocks that an engine names by itself, under pdserve's names. The adapters' own tests read events
of each engine against a model of its pool."""

from __future__ import annotations

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared
from pdserve_engines.renamed_blocks import RenamedBlocks, root_of

SECRET, TOKENS = b"s" * 32, list(range(12))


def made() -> tuple[RenamedBlocks, bytes]:
    names = RenamedBlocks(SECRET, 4, "model")
    root = root_of(names.salt("tenant", ""))
    assert root == prompt_root(SECRET, "model", "tenant")
    return names, root


def stored(names: RenamedBlocks, keys: list[str], root: bytes) -> list[object]:
    return list(names.store(keys, names.hashes(TOKENS, root), root, "device"))


def test_only_salts_of_pdserve_carry_a_root() -> None:
    assert [root_of(salt) for salt in (None, "", "tenant", 3)] == [None] * 4


def test_a_chain_gets_the_hashes_of_its_tokens() -> None:
    names, root = made()
    expected = block_hashes(TOKENS, 4, parent=root, secret=SECRET)
    assert stored(names, ["a", "b", "c"], root) == [BlockStored(hashes=[*expected], parent=root)]
    assert names.name_of("b") == expected[1]
    assert names.name_of("d") is None


def test_copies_are_told_once() -> None:
    names, root = made()
    first, second, third = block_hashes(TOKENS, 4, parent=root, secret=SECRET)
    stored(names, ["a", "b", "c"], root)
    assert list(names.remove(["b"], "device")) == [BlockRemoved(hashes=[second])]
    # What is new begins behind the block before it; the copies beside it are not told.
    assert stored(names, ["a", "b", "c"], root) == [BlockStored(hashes=[second], parent=first)]
    assert list(names.remove(["a", "c", "unknown"], "device")) == []
    gone = list(names.remove(["a", "b", "c"], "device"))
    assert gone == [BlockRemoved(hashes=[first, second, third])]
    assert len(names) == 0


def test_tiers_are_counted_apart_and_cleared_by_name() -> None:
    names, root = made()
    stored(names, ["a"], root)
    assert list(names.remove(["a"], "host")) == []
    list(names.store(["a"], names.hashes(TOKENS[:4], root), root, "host"))
    assert names.clear() == [PoolCleared(tier="device"), PoolCleared(tier="host")]
    assert names.clear() == [PoolCleared(tier="device")]


def test_another_secret_forgets_everything() -> None:
    names, root = made()
    stored(names, ["a"], root)
    assert names.rekey(b"t" * 32) == [PoolCleared(tier="device")]
    assert (len(names), root_of(names.salt("tenant", "")) == root) == (0, False)
