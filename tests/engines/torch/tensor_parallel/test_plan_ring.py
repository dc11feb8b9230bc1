from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import EngineDied, EngineError
from pdserve_engines.torch.tensor_parallel.plan_ring import PlanReader, PlanRing, RingBroken

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOTS = 4


@pytest.fixture
def ring() -> Iterator[PlanRing]:
    ring = PlanRing(1000, readers=2)
    yield ring
    ring.close()


@pytest.fixture
def readers(ring: PlanRing) -> Iterator[list[PlanReader]]:
    readers = [PlanReader(ring.fd, os.dup(bell), n) for n, bell in enumerate(ring.bells)]
    yield readers
    for reader in readers:
        reader.close()


def write(ring: PlanRing, plan: bytes, patience: float = 0.0) -> None:
    ring.write(plan, patience, lambda: None)


def poke(ring: PlanRing, number: int, offset: int, data: bytes) -> None:
    """Overwrite bytes of a plan's slot."""
    with mmap.mmap(ring.fd, os.fstat(ring.fd).st_size) as memory:
        slot = (len(memory) - mmap.PAGESIZE) // SLOTS
        at = mmap.PAGESIZE + number % SLOTS * slot + offset
        memory[at : at + len(data)] = data


def test_every_reader_gets_every_plan_in_order(ring: PlanRing, readers: list[PlanReader]) -> None:
    plans = [bytes([n]) * (n * 37 % 1000) for n in range(50)]
    for plan in plans:
        write(ring, plan)
        assert [reader.read(0.0) for reader in readers] == [plan, plan]
    assert [reader.read(0.0) for reader in readers] == [None, None]
    assert ring.taken(0) == ring.taken(1) == 50


def test_a_reader_may_be_some_plans_behind(ring: PlanRing, readers: list[PlanReader]) -> None:
    for n in range(SLOTS):
        write(ring, bytes([n]))
        assert readers[0].read(0.0) == bytes([n])
    assert [readers[1].read(0.0) for _ in range(SLOTS)] == [bytes([n]) for n in range(SLOTS)]


def test_a_full_ring_waits_and_then_says_who_is_behind(
    ring: PlanRing, readers: list[PlanReader]
) -> None:
    for n in range(SLOTS):
        write(ring, bytes([n]))
        readers[0].read(0.0)
    with pytest.raises(EngineDied, match="has taken 0 of 4 plans"):
        write(ring, b"more", patience=0.02)
    assert readers[1].read(0.0) == bytes([0])
    write(ring, b"more")
    assert readers[0].read(0.0) == b"more"


def test_the_wait_for_a_slot_ends_with_a_rank(ring: PlanRing, readers: list[PlanReader]) -> None:
    def dead() -> None:
        raise EngineDied("rank 1 ended")

    for n in range(SLOTS):
        write(ring, bytes([n]))
    with pytest.raises(EngineDied, match="rank 1 ended"):
        ring.write(b"more", 60.0, dead)


def test_a_sleeping_reader_wakes_with_the_plan(ring: PlanRing, readers: list[PlanReader]) -> None:
    timer = threading.Timer(0.1, write, (ring, b"late"))
    begun = time.monotonic()
    timer.start()
    assert readers[0].read(30.0) == b"late"
    assert time.monotonic() - begun < 20
    timer.join()


def test_a_sleeping_reader_wakes_with_another_descriptor(
    ring: PlanRing, readers: list[PlanReader]
) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert readers[0].read(30.0, (reading,)) is None
    os.close(reading)


def test_rings_of_the_bell_for_plans_that_were_seen_before_are_harmless(
    ring: PlanRing, readers: list[PlanReader]
) -> None:
    """A reader that spins does not empty its bell."""
    write(ring, b"one")
    write(ring, b"two")
    assert [readers[0].read(0.0) for _ in range(3)] == [b"one", b"two", None]


def test_a_plan_that_is_too_large_is_refused_and_nothing_is_lost(
    ring: PlanRing, readers: list[PlanReader]
) -> None:
    with pytest.raises(EngineError, match="lower --max-batch-tokens"):
        write(ring, bytes(ring.capacity + 1))
    write(ring, bytes(ring.capacity))
    assert readers[0].read(0.0) == bytes(ring.capacity)


def test_a_damaged_plan_is_not_computed(ring: PlanRing, readers: list[PlanReader]) -> None:
    write(ring, b"a plan")
    poke(ring, 1, 16, b"A")
    with pytest.raises(RingBroken, match="plan 1 is damaged"):
        readers[0].read(0.0)


def test_bytes_that_come_after_their_number_are_waited_for(
    ring: PlanRing, readers: list[PlanReader]
) -> None:
    write(ring, b"a plan")
    poke(ring, 1, 16, b"A")
    timer = threading.Timer(0.01, poke, (ring, 1, 16, b"a"))
    timer.start()
    assert readers[0].read(0.0) == b"a plan"
    timer.join()


def test_a_lost_plan_is_noticed(ring: PlanRing, readers: list[PlanReader]) -> None:
    write(ring, b"one")
    poke(ring, 1, 0, struct.pack("<Q", 1 + SLOTS))
    with pytest.raises(RingBroken, match="plan 1 is lost, plan 5 is in its place"):
        readers[0].read(0.0)
