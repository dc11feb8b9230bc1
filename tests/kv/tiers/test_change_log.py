"""Changes of a tier become few events, in order."""

from __future__ import annotations

from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.change_log import ChangeLog
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared

A, B, C, D = (TierBlock(bytes([i]), bytes([i - 1])) for i in range(1, 5))
"""A chain: each continues the one before it."""


def test_a_chain_is_one_event_in_whatever_order_its_blocks_come() -> None:
    log = ChangeLog("host")
    for block in (B, C, A, D):
        log.stored(block)
    assert log.drain() == [
        BlockStored(hashes=[A.hash, B.hash, C.hash, D.hash], parent=A.parent, tier="host")
    ]
    assert log.drain() == []


def test_a_gap_begins_another_event() -> None:
    log = ChangeLog("disk")
    log.stored(A)
    log.stored(C)
    assert log.drain() == [
        BlockStored(hashes=[A.hash], parent=A.parent, tier="disk"),
        BlockStored(hashes=[C.hash], parent=C.parent, tier="disk"),
    ]


def test_the_order_of_stores_and_removals_is_kept() -> None:
    log = ChangeLog("host")
    log.stored(A)
    log.removed(A.hash)
    log.removed(B.hash)
    log.stored(A)
    assert log.drain() == [
        BlockStored(hashes=[A.hash], parent=A.parent, tier="host"),
        BlockRemoved(hashes=[A.hash, B.hash], tier="host"),
        BlockStored(hashes=[A.hash], parent=A.parent, tier="host"),
    ]


def test_what_was_before_a_clear_is_not_told() -> None:
    log = ChangeLog("host")
    log.stored(A)
    log.cleared()
    log.stored(B)
    assert log.drain() == [
        PoolCleared(tier="host"),
        BlockStored(hashes=[B.hash], parent=A.hash, tier="host"),
    ]
