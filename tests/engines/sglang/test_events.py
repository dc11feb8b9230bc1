"""SGLang's KV events in pdserve's names."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.messages.kv_events import BlockRemoved, BlockStored, KvEvent, PoolCleared
from pdserve_engines.sglang.events import BatchOrder, NamedBlocks, decode
from tests.engines.sglang.fake_sglang import stored

SECRET = b"s" * 32
PAGE = 4
TOKENS = list(range(10, 22))


def named() -> NamedBlocks:
    return NamedBlocks(SECRET, PAGE, "model")


def ours(tokens: list[int], salt: str = "", lora: str = "") -> list[bytes]:
    root = prompt_root(SECRET, "model", salt, lora)
    return list(block_hashes(tokens, PAGE, parent=root, secret=SECRET))


def removed(*hashes: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


# ---------------------------------------------------------------- the wire


def test_events_are_tagged_maps():
    event = stored([1], None, TOKENS[:4], PAGE, "salt")
    payload = msgspec.msgpack.encode([1.5, [event, removed(1), CLEARED], 0])
    assert decode(payload) == [event, removed(1), CLEARED]


def test_events_of_older_releases_are_lists():
    events = [
        ["BlockStored", [1], None, TOKENS[:4], 4, None],
        ["BlockRemoved", [1]],
        ["AllBlocksCleared"],
    ]
    first, second, third = decode(msgspec.msgpack.encode([1.5, events]))
    assert (first["block_hashes"], first["token_ids"]) == ([1], TOKENS[:4])
    assert (second, third["type"]) == (
        {"type": "BlockRemoved", "block_hashes": [1]},
        CLEARED["type"],
    )


@given(st.binary(max_size=60))
def test_bytes_that_are_no_batch_are_refused(payload: bytes):
    """Any other error would end the engine."""
    with contextlib.suppress(ValueError):
        decode(payload)


@pytest.mark.parametrize("content", [[1.5], 7, [1.5, [{"block_hashes": []}]], [1.5, [["Other"]]]])
def test_other_content_is_refused(content: Any):
    with pytest.raises(ValueError, match="not a batch"):
        decode(msgspec.msgpack.encode(content))


@given(st.lists(st.integers(0, 20), max_size=60))
def test_each_number_is_taken_once_and_gaps_are_counted(numbers: list[int]):
    order, taken = BatchOrder(), list[int]()
    for number in numbers:
        assert order.gap(number) == (number > order.next)
        if order.due(number):
            taken.append(number)
    assert taken == sorted(set(taken))
    assert order.lost == (max(taken) + 1 - len(taken) if taken else 0)


# ---------------------------------------------------------------- names


def test_a_chain_gets_the_hashes_that_routers_compute():
    blocks = named()
    salt = blocks.salt("tenant", "law")
    names = ours(TOKENS, "tenant", "law")
    found = blocks.translate(
        [stored([1, 2], None, TOKENS[:8], PAGE, salt), stored([3], 2, TOKENS[8:], PAGE, salt)]
    )
    root = prompt_root(SECRET, "model", "tenant", "law")
    assert found == [
        BlockStored(hashes=names[:2], parent=root),
        BlockStored(hashes=names[2:], parent=names[1]),
    ]
    assert blocks.translate([removed(3, 2)]) == [BlockRemoved(hashes=[names[2], names[1]])]
    assert len(blocks) == 1


def test_partial_blocks_and_unknown_chains_are_not_named():
    blocks = named()
    salt = blocks.salt("", "")
    assert blocks.translate([stored([1], None, TOKENS[:3], 3, salt)]) == []
    assert blocks.translate([stored([2], 77, TOKENS[:4], PAGE, salt)]) == []
    assert blocks.translate([stored([3], None, TOKENS[:4], PAGE, "")]) == []
    assert blocks.translate([removed(1, 2, 3)]) == []
    assert len(blocks) == 0


def test_a_block_is_announced_once_in_each_tier():
    blocks = named()
    event = stored([1], None, TOKENS[:4], PAGE, blocks.salt("", ""))
    names = ours(TOKENS[:4])
    root = prompt_root(SECRET, "model", "")
    assert blocks.translate([event, event]) == [BlockStored(hashes=names, parent=root)]
    host = event | {"medium": "CPU_PINNED"}
    assert blocks.translate([host]) == [BlockStored(hashes=names, parent=root, tier="host")]
    assert blocks.translate([removed(1)]) == []
    assert blocks.translate([removed(1)]) == [BlockRemoved(hashes=names)]
    assert blocks.translate([removed(1)]) == []
    assert blocks.translate([removed(1, medium="CPU_PINNED")]) == [
        BlockRemoved(hashes=names, tier="host")
    ]
    assert len(blocks) == 0


def test_a_known_block_splits_a_run():
    blocks = named()
    salt = blocks.salt("", "")
    names = ours(TOKENS)
    blocks.translate([stored([1, 2], None, TOKENS[:8], PAGE, salt), removed(1)])
    found = blocks.translate([stored([1, 2, 3], None, TOKENS, PAGE, salt)])
    root = prompt_root(SECRET, "model", "")
    assert found == [
        BlockStored(hashes=names[:1], parent=root),
        BlockStored(hashes=names[2:], parent=names[1]),
    ]


def test_pairs_of_speculative_decoding_stand_for_their_first_tokens():
    blocks = named()
    pairs = list(itertools.pairwise(TOKENS[:5]))
    event = stored([1], None, TOKENS[:4], PAGE, blocks.salt("", "")) | {"token_ids": pairs}
    (found,) = blocks.translate([event])
    assert isinstance(found, BlockStored)
    assert found.hashes == ours(TOKENS[:4])


def test_clearing_and_another_secret_forget_all():
    blocks = named()
    blocks.translate(
        [stored([1], None, TOKENS[:4], PAGE, blocks.salt("", "")) | {"medium": "DISK"}]
    )
    assert blocks.translate([CLEARED]) == [PoolCleared(tier="device"), PoolCleared(tier="disk")]
    before = blocks.salt("", "")
    assert blocks.rekey(b"t" * 32) == [PoolCleared(tier="device")]
    assert blocks.salt("", "") != before


keys = st.integers(1, 6)
media = st.sampled_from(["GPU", "CPU_PINNED"])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), keys, media),
            st.tuples(st.just("remove"), keys, media),
            st.just(("clear", 0, "GPU")),
        ),
        max_size=40,
    )
)
def test_routers_see_only_real_changes(events: list[tuple[str, int, str]]):
    """No hash is stored twice in a tier, and none is removed that is not there. Block k is the
    chain's block k."""
    blocks = named()
    salt = blocks.salt("", "")
    held: set[tuple[str, bytes]] = set()
    for kind, key, medium in events:
        first = (key - 1) * PAGE
        tokens = list(range(first, first + PAGE))
        parent = None if key == 1 else key - 1
        event = {
            "store": stored([key], parent, tokens, PAGE, salt) | {"medium": medium},
            "remove": removed(key, medium=medium),
            "clear": CLEARED,
        }[kind]
        for change in blocks.translate([event]):
            _apply(held, change)


def _apply(held: set[tuple[str, bytes]], change: KvEvent) -> None:
    if isinstance(change, PoolCleared):
        held -= {pair for pair in held if pair[0] == change.tier}
        return
    for name in change.hashes:
        assert ((change.tier, name) in held) == isinstance(change, BlockRemoved)
        held ^= {(change.tier, name)}
