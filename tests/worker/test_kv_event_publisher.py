"""A pool's mirror, and the log that it publishes, against a plain model: sets by tier."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.blocks.hashing import short_hashes
from pdserve.kv.block_pool import BlockPool
from pdserve.messages.kv_events import (
    TIERS,
    BlockRemoved,
    BlockStored,
    HashesChange,
    HashesRemoved,
    HashesStored,
    PoolCleared,
    PoolDigest,
    xor_hashes,
)
from pdserve.runtime.topics.messages import CHUNK_BYTES
from pdserve.wire.codec import decoder
from pdserve.worker.kv_event_publisher import KvEventPublisher

if TYPE_CHECKING:
    from pdserve.messages.kv_events import KvEvent, Tier

decode = decoder(list[HashesChange])
ROOT = b"R" * 16


def block(number: int) -> bytes:
    """A hash of 16 bytes; no two numbers share a short name."""
    return number.to_bytes(8, "little") + bytes(8)


def blocks(*numbers: int) -> list[bytes]:
    return [block(number) for number in numbers]


def split(names: bytes) -> list[int]:
    return [int.from_bytes(names[i : i + 8], "little") for i in range(0, len(names), 8)]


class Copy:
    """A reader that trusts the log's promise that only real changes are told."""

    def __init__(self) -> None:
        self.tiers: list[dict[int, int]] = [{} for _ in TIERS]
        self.check = PoolDigest()
        self.events = 0

    def apply(self, event: bytes) -> None:
        self.events += 1
        for change in decode(event):
            held = self.tiers[change.tier]
            if isinstance(change, HashesStored):
                self.check.change(change.tier, change.names)
                parent = int.from_bytes(change.parent, "little")
                for name in split(change.names):
                    assert name not in held, "stored twice"
                    held[name] = parent
                    parent = name
            elif isinstance(change, HashesRemoved):
                self.check.change(change.tier, change.names)
                for name in split(change.names):
                    del held[name]
            else:
                assert held, "cleared while empty"
                self.check.clear(change.tier)
                held.clear()

    @property
    def names(self) -> list[set[int]]:
        return [set(held) for held in self.tiers]


def followed(log: KvEventPublisher) -> Copy:
    copy = Copy()
    log.connect(copy.apply)
    return copy


def late(log: KvEventPublisher) -> Copy:
    """What a reader has after a snapshot."""
    copy = Copy()
    for piece in log.snapshot():
        assert len(piece) <= CHUNK_BYTES
        copy.apply(piece)
    return copy


tiers = st.sampled_from(TIERS)
some = st.lists(st.integers(0, 30).map(block), min_size=1, max_size=8)
events = st.one_of(
    st.builds(BlockStored, some, st.integers(0, 30).map(block), tiers),
    st.builds(BlockRemoved, some, tiers),
    st.builds(PoolCleared, tiers),
)


def truth(history: list[KvEvent]) -> list[set[int]]:
    """The plain model."""
    held: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
    for event in history:
        if isinstance(event, PoolCleared):
            held[event.tier].clear()
        elif isinstance(event, BlockStored):
            held[event.tier] |= {*split(short_hashes(b"".join(event.hashes)))}
        else:
            held[event.tier] -= {*split(short_hashes(b"".join(event.hashes)))}
    return [held[tier] for tier in TIERS]


@given(st.lists(st.lists(events, max_size=5), max_size=12))
def test_whatever_an_engine_says_readers_have_its_content(batches: list[list[KvEvent]]) -> None:
    log = KvEventPublisher()
    copy = followed(log)
    for number, batch in enumerate(batches, 1):
        log.apply(batch)
        wanted = truth([event for past in batches[:number] for event in past])
        assert copy.names == wanted == late(log).names
        assert [log.names(tier) for tier in range(len(TIERS))] == wanted
        assert log.digest() == copy.check.value() == late(log).check.value()
        assert len(log) == sum(map(len, wanted))


@given(st.lists(st.lists(events, max_size=3), max_size=8))
def test_a_snapshot_names_parents_first(batches: list[list[KvEvent]]) -> None:
    log = KvEventPublisher()
    for batch in batches:
        log.apply(batch)
    for held in late(log).tiers:
        order = list(held)
        for name, parent in held.items():
            if parent in held and not _loops(held, name):
                assert order.index(parent) < order.index(name)


def _loops(held: dict[int, int], name: int) -> bool:
    """Invented events may make a block its own ancestor; hashes cannot."""
    seen: set[int] = set()
    while name in held and name not in seen:
        seen.add(name)
        name = held[name]
    return name in held


def test_a_real_pool_is_mirrored() -> None:
    pool, log = BlockPool(4, 16), KvEventPublisher()
    copy = followed(log)

    def prompt(*numbers: int) -> list[int]:
        fresh = pool.reserve(len(numbers))
        assert fresh is not None
        parent = ROOT
        for place, number in zip(fresh, numbers, strict=True):
            pool.commit(place, block(number), parent)
            parent = block(number)
        log.apply(pool.drain_events())
        return fresh

    pool.release(prompt(1, 2, 3))
    held = prompt(7, 8)  # evicts 3, then 2 is next
    assert copy.names[0] == {1, 2, 7, 8}
    pool.release(held)
    pool.clear()
    log.apply(pool.drain_events())
    assert copy.names[0] == set()
    assert log.digest() == 0


def test_one_batch_is_one_event() -> None:
    log = KvEventPublisher()
    copy = followed(log)
    log.apply([BlockStored(blocks(1, 2), ROOT), BlockStored(blocks(3), block(2), "host")])
    log.apply([BlockRemoved(blocks(2))])
    assert copy.events == 2


def test_what_changes_nothing_is_not_told() -> None:
    log = KvEventPublisher()
    log.apply([BlockStored(blocks(1), ROOT)])
    copy = followed(log)
    log.apply([BlockStored(blocks(1), ROOT), BlockRemoved(blocks(5)), PoolCleared("host")])
    assert copy.events == 0


def test_a_run_with_known_blocks_keeps_its_parents() -> None:
    log = KvEventPublisher()
    log.apply([BlockStored(blocks(2), block(1))])
    copy = followed(log)
    log.apply([BlockStored(blocks(1, 2, 3), ROOT)])
    assert copy.tiers[0] == {1: int.from_bytes(ROOT[:8], "little"), 3: 2}


def test_long_batches_go_out_in_pieces() -> None:
    log = KvEventPublisher()
    copy = followed(log)
    many = blocks(*range(1, 20_001))
    log.apply([BlockStored(many, ROOT)])
    assert copy.events == 5
    assert copy.tiers[0][20_000] == 19_999, "pieces continue each other"
    assert len(late(log).names[0]) == 20_000
    log.apply([BlockRemoved(many)])
    assert copy.names[0] == set()
    assert copy.events == 10


def test_state_and_events_agree_at_each_event() -> None:
    """Who asks for a snapshot between two pieces of a batch gets what was told until then."""
    log = KvEventPublisher()
    copy = Copy()

    def append(event: bytes) -> None:
        copy.apply(event)
        assert log.digest() == copy.check.value()
        assert [log.names(tier) for tier in range(len(TIERS))] == copy.names

    log.connect(append)
    log.apply([BlockStored(blocks(*range(1, 9_000)), ROOT), BlockRemoved(blocks(*range(5_000)))])
    assert copy.events > 2


def test_a_snapshot_is_as_of_its_call() -> None:
    log = KvEventPublisher()
    log.apply([BlockStored(blocks(1, 2), ROOT)])
    pieces = log.snapshot()
    log.apply([PoolCleared(), BlockStored(blocks(3), ROOT)])
    copy = Copy()
    for piece in pieces:
        copy.apply(piece)
    assert copy.names[0] == {1, 2}


def test_there_is_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    log = KvEventPublisher(most=3)
    copy = followed(log)
    with caplog.at_level(logging.ERROR):
        log.apply([BlockStored(blocks(1, 2), ROOT), BlockStored(blocks(3, 4), ROOT)])
    assert log.refused == 2
    assert "more KV blocks than the limit" in caplog.text
    log.apply([BlockRemoved(blocks(1)), BlockStored(blocks(5, 6), ROOT)])
    assert copy.names[0] == {2, 5, 6}


def test_what_is_no_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="no hashes"):
        KvEventPublisher().apply([BlockStored([b"short"], ROOT)])


# ---------------------------------------------------------------------- the wire form


def test_the_plain_package_reads_it() -> None:
    sent: list[bytes] = []
    log = KvEventPublisher()
    log.connect(sent.append)
    log.apply([BlockStored(blocks(1, 2), block(9)), BlockRemoved(blocks(2)), PoolCleared()])
    packed = [block(n)[:8] for n in (1, 2, 9)]
    assert msgpack.unpackb(sent[0]) == [
        [1, 0, packed[2], packed[0] + packed[1]],
        [2, 0, packed[1]],
        [3, 0],
    ]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_names_are_xored(names: list[int]) -> None:
    wanted = 0
    for name in names:
        wanted ^= name
    assert xor_hashes(b"".join(name.to_bytes(8, "little") for name in names)) == wanted


def test_tiers_do_not_cancel_out() -> None:
    digest = PoolDigest()
    digest.change(0, block(5)[:8])
    once = digest.value()
    digest.change(1, block(5)[:8])
    assert digest.value() not in (0, once)
    digest.clear(1)
    assert digest.value() == once


def test_leading_blocks_of_a_prompt():
    log = KvEventPublisher()
    log.apply([BlockStored(blocks(1, 2, 4), ROOT)])
    assert log.leading(b"".join(blocks(1, 2, 3, 4))) == 2
    assert log.leading(b"".join(blocks(1, 2))) == 2
    assert log.leading(b"".join(blocks(3, 1))) == 0
    assert log.leading(b"") == 0
    log.apply([BlockStored(blocks(3), block(2), "host"), BlockStored(blocks(5), block(4), "disk")])
    assert log.leading(b"".join(blocks(1, 2, 3, 4, 5, 6))) == 5
    log.apply([BlockRemoved(blocks(3), "host")])
    assert log.leading(b"".join(blocks(1, 2, 3, 4, 5, 6))) == 2
    log.apply([BlockRemoved(blocks(1))])
    assert log.leading(b"".join(blocks(1, 2))) == 0
