"""The host index: single rules by example, all of them together against a naive model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.eviction import EvictionOrder
from pdserve.kv.tiers.host_index import FrameCounts, HostIndex
from pdserve.messages.kv_events import BlockRemoved, BlockStored, KvEvent, PoolCleared
from tests.support.seeds import is_long

ORDER = EvictionOrder(turn_bonus=60.0, turn_cap=4)


def block(number: int, turns: int = 1, pin_until: float = 0.0) -> TierBlock:
    """Blocks of one chain, numbered from its root."""
    return TierBlock(bytes([number]), bytes([number - 1]), turns, pin_until=pin_until)


def index_of(frames: int, pin_max_share: float = 0.3) -> HostIndex:
    return HostIndex(frames, order=ORDER, pin_max_share=pin_max_share)


def store(index: HostIndex, one: TierBlock, now: float) -> int:
    frame = index.reserve()
    assert frame is not None
    assert index.commit(frame, one, now)
    return frame


def test_a_frame_is_filled_then_found() -> None:
    index = index_of(2)
    frame = index.reserve()
    assert frame == 0
    assert index.frame(b"\1") is None
    assert index.counts() == FrameCounts(free=1, filling=1, valid=0, claimed=0)
    assert index.commit(frame, block(1), 5.0)
    assert index.frame(b"\1") == 0
    assert index.block(b"\1") == block(1)
    assert index.age(b"\1", 7.0) == 2.0
    assert index.names() == {b"\1": b"\0"}
    assert b"\1" in index
    assert len(index) == 1


def test_reserving_never_evicts() -> None:
    index = index_of(1)
    store(index, block(1), 0.0)
    assert index.reserve() is None
    assert b"\1" in index


def test_an_abandoned_frame_is_free_again_and_nothing_is_told() -> None:
    index = index_of(1)
    frame = index.reserve()
    assert frame is not None
    index.abandon(frame)
    assert index.free == 1
    assert index.drain_events() == []
    with pytest.raises(ValueError, match="not being filled"):
        index.commit(frame, block(1), 0.0)
    with pytest.raises(ValueError, match="not being filled"):
        index.abandon(frame)


def test_a_block_is_not_stored_twice() -> None:
    index = index_of(2)
    store(index, block(1), 0.0)
    index.drain_events()
    frame = index.reserve()
    assert frame is not None
    assert not index.commit(frame, block(1), 1.0)
    assert index.free == 1
    assert index.drain_events() == []


def test_the_least_recently_used_goes_first_and_a_leaf_before_its_parent() -> None:
    index = index_of(4)
    store(index, block(9), 0.0)
    for number in (3, 2, 1):  # as a device evicts: the leaf first
        store(index, block(number), 1.0)
    assert index.victims(4, 1.0) == [b"\x09", b"\3", b"\2", b"\1"]
    index.touch(b"\x09", 2.0)
    assert index.victims(2, 2.0) == [b"\3", b"\2"]


def test_turns_delay_eviction_and_only_grow() -> None:
    index = index_of(3)
    store(index, block(1, turns=2), 0.0)
    store(index, block(2), 59.0)
    store(index, block(3), 61.0)
    assert index.victims(3, 61.0) == [b"\2", b"\1", b"\3"]
    index.touch(b"\2", 62.0, turns=3)
    index.touch(b"\2", 62.0, turns=1)
    assert index.victims(3, 62.0) == [b"\1", b"\3", b"\2"]
    found = index.block(b"\2")
    assert found is not None
    assert found.turns == 3


def test_what_the_device_has_too_goes_first() -> None:
    index = index_of(3)
    for number in (1, 2, 3):
        store(index, block(number), float(number))
    index.shadow(b"\3", on=True)
    index.shadow(b"\2", on=True)
    assert index.victims(3, 3.0) == [b"\2", b"\3", b"\1"]
    index.shadow(b"\3", on=False)
    assert index.victims(3, 3.0) == [b"\2", b"\1", b"\3"]


def test_a_claimed_block_is_no_victim_until_the_last_release() -> None:
    index = index_of(2)
    frame = store(index, block(1), 0.0)
    store(index, block(2), 1.0)
    index.claim(frame)
    index.claim(frame)
    assert index.victims(2, 1.0) == [b"\2"]
    with pytest.raises(ValueError, match="claimed"):
        index.evict(b"\1")
    index.release(frame)
    assert index.counts().claimed == 1
    index.release(frame)
    assert index.victims(2, 1.0) == [b"\1", b"\2"]
    with pytest.raises(ValueError, match="not claimed"):
        index.release(frame)


def test_a_pin_holds_until_its_time_and_pins_are_bounded() -> None:
    index = index_of(10)
    for number in range(1, 6):
        store(index, block(number), 0.0)
    assert [index.pin(bytes([number]), 10.0) for number in range(1, 6)] == [True] * 3 + [False] * 2
    assert index.pin(b"\1", 20.0), "a pinned block may be pinned for longer"
    assert index.pin(b"\1", 5.0)
    assert not index.pin(b"\x77", 10.0)
    assert index.victims(9, 9.0) == [b"\4", b"\5"]
    assert index.pinned == 3
    assert index.victims(9, 10.0) == [b"\2", b"\3", b"\4", b"\5"]
    assert index.victims(9, 20.0) == [b"\1", b"\2", b"\3", b"\4", b"\5"]


def test_a_use_leaves_a_pinned_block_where_it_is() -> None:
    index = index_of(10)
    frame = store(index, block(1), 0.0)
    assert index.pin(b"\1", 10.0)
    index.touch(b"\1", 1.0)
    index.shadow(b"\1", on=True)
    index.claim(frame)
    index.release(frame)
    assert index.victims(1, 1.0) == []


def test_a_block_may_come_pinned() -> None:
    index = index_of(4)
    store(index, block(1, pin_until=9.0), 0.0)
    store(index, block(2, pin_until=9.0), 0.0)  # one more than may be
    assert index.victims(2, 0.0) == [b"\2"]
    store(index, block(3, pin_until=9.0), 9.0)  # its time is over
    assert index.victims(3, 9.0) == [b"\1", b"\2", b"\3"]


def test_a_dropped_block_is_not_found_but_its_readers_keep_the_frame() -> None:
    index = index_of(2)
    frame = store(index, block(1), 0.0)
    index.claim(frame)
    index.drop(b"\1")
    assert index.frame(b"\1") is None
    assert index.counts() == FrameCounts(free=1, filling=0, valid=0, claimed=0, leaving=1)
    with pytest.raises(ValueError, match="claimed"):
        index.claim(frame)
    other = store(index, block(1), 1.0)
    assert other != frame
    assert index.reserve() is None
    index.release(frame)
    assert index.reserve() == frame
    assert index.frame(b"\1") == other


def test_clearing_frees_all_but_what_is_read_or_filled() -> None:
    index = index_of(3)
    read = store(index, block(1), 0.0)
    store(index, block(2), 0.0)
    index.claim(read)
    filling = index.reserve()
    assert filling is not None
    index.clear()
    assert index.drain_events() == [PoolCleared(tier="host")]
    assert index.counts() == FrameCounts(free=1, filling=1, valid=0, claimed=0, leaving=1)
    assert index.commit(filling, block(3), 1.0)
    index.release(read)
    assert index.free == 2


def test_events_name_parents_and_only_real_changes() -> None:
    index = index_of(3)
    for number in (3, 2):
        store(index, block(number), 0.0)
    assert index.drain_events() == [
        BlockStored(hashes=[b"\2", b"\3"], parent=b"\1", tier="host"),
    ]
    index.touch(b"\2", 1.0)
    index.shadow(b"\2", on=True)
    assert index.evict(b"\3") == 0
    index.drop(b"\3")
    assert index.drain_events() == [BlockRemoved(hashes=[b"\3"], tier="host")]


def test_an_arena_needs_a_frame() -> None:
    with pytest.raises(ValueError, match="at least one frame"):
        index_of(0)


# ---------------------------------------------------------------- against a model


@dataclass
class Place:
    """What the model knows of a frame."""

    block: TierBlock | None = None
    last_use: float = 0.0
    number: int = 0
    claims: int = 0
    shadow: bool = False
    found: bool = True


names = st.integers(1, 12)


class HostIndexMachine(RuleBasedStateMachine):
    """Random work on a small arena. The model searches all frames for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.index = index_of(7, pin_max_share=0.5)
        self.places: dict[int, Place] = {}
        self.pins: dict[int, float] = {}
        self.now = 0.0
        self.number = 0
        self.told: set[bytes] = set()

    def resident(self, name: int) -> tuple[int, Place] | None:
        for frame, place in self.places.items():
            if place.block and place.found and place.block.hash == bytes([name]):
                return frame, place
        return None

    def expire(self) -> None:
        self.pins = {name: until for name, until in self.pins.items() if until > self.now}

    def evictable(self) -> list[bytes]:
        self.expire()
        keys = {}
        for place in self.places.values():
            one = place.block
            if one and place.found and not place.claims and one.hash[0] not in self.pins:
                score = place.last_use + 60.0 * min(one.turns - 1, 4)
                keys[one.hash] = (not place.shadow, score, place.number)
        return sorted(keys, key=lambda name: keys[name])

    def remove(self, frame: int, place: Place) -> None:
        assert place.block
        self.pins.pop(place.block.hash[0], None)
        place.found = False
        if not place.claims:
            del self.places[frame]

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reserve(self) -> None:
        frame = self.index.reserve()
        assert (frame is None) == (len(self.places) == 7)
        if frame is not None:
            assert frame not in self.places
            self.places[frame] = Place()

    @precondition(lambda self: any(p.block is None for p in self.places.values()))
    @rule(name=names, turns=st.integers(1, 7), pinned=st.sampled_from([0.0, 0.0, 20.0]))
    def commit(self, name: int, turns: int, pinned: float) -> None:
        frame = next(f for f, p in self.places.items() if p.block is None)
        one = block(name, turns, self.now + pinned if pinned else 0.0)
        self.expire()
        fresh = self.resident(name) is None
        assert self.index.commit(frame, one, self.now) == fresh
        if not fresh:
            del self.places[frame]
            return
        self.number += 1
        self.places[frame] = Place(one, self.now, self.number)
        if pinned and len(self.pins) < 3:
            self.pins[name] = one.pin_until

    @precondition(lambda self: any(p.block is None for p in self.places.values()))
    @rule()
    def abandon(self) -> None:
        frame = next(f for f, p in self.places.items() if p.block is None)
        self.index.abandon(frame)
        del self.places[frame]

    @rule(name=names)
    def claim(self, name: int) -> None:
        found = self.resident(name)
        assert self.index.frame(bytes([name])) == (found[0] if found else None)
        if found:
            self.index.claim(found[0])
            found[1].claims += 1

    @precondition(lambda self: any(p.claims for p in self.places.values()))
    @rule()
    def release(self) -> None:
        frame, place = next((f, p) for f, p in self.places.items() if p.claims)
        self.index.release(frame)
        place.claims -= 1
        if not place.claims and not place.found:
            del self.places[frame]

    @rule(
        name=names,
        turns=st.sampled_from([None, 1, 3, 9]),
        shadow=st.sampled_from([None, False, True]),
    )
    def touch(self, name: int, turns: int | None, shadow: bool | None) -> None:
        self.index.touch(bytes([name]), self.now, turns, shadow=shadow)
        self.expire()
        if found := self.resident(name):
            self.number += 1
            one = found[1].block
            assert one
            found[1].last_use, found[1].number = self.now, self.number
            found[1].block = block(name, max(one.turns, turns or 1), one.pin_until)
            if shadow is not None:
                found[1].shadow = shadow

    @rule(name=names, on=st.booleans())
    def shadow(self, name: int, on: bool) -> None:
        self.index.shadow(bytes([name]), on)
        if found := self.resident(name):
            found[1].shadow = on

    @rule(name=names, seconds=st.sampled_from([5.0, 50.0]))
    def pin(self, name: int, seconds: float) -> None:
        self.expire()
        self.index.victims(0, self.now)
        until = self.now + seconds
        allowed = self.resident(name) is not None and (name in self.pins or len(self.pins) < 3)
        assert self.index.pin(bytes([name]), until) == allowed
        if allowed:
            self.pins[name] = max(until, self.pins.get(name, 0.0))

    @rule(count=st.integers(0, 8))
    def victims(self, count: int) -> None:
        assert self.index.victims(count, self.now) == self.evictable()[:count]

    @rule()
    def evict(self) -> None:
        if victims := self.index.victims(1, self.now):
            found = self.resident(victims[0][0])
            assert found
            assert self.index.evict(victims[0]) == found[0]
            self.remove(*found)

    @rule(name=names)
    def drop(self, name: int) -> None:
        self.index.drop(bytes([name]))
        if found := self.resident(name):
            self.remove(*found)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        for frame, place in list(self.places.items()):
            if place.block and place.found:
                self.remove(frame, place)

    @rule()
    def drain(self) -> None:
        for event in self.index.drain_events():
            self.hear(event)
        blocks = [place.block for place in self.places.values() if place.found]
        assert self.told == {one.hash for one in blocks if one}

    def hear(self, event: KvEvent) -> None:
        assert event.tier == "host"
        if isinstance(event, PoolCleared):
            self.told.clear()
        elif isinstance(event, BlockRemoved):
            assert set(event.hashes) <= self.told
            self.told -= set(event.hashes)
        else:
            parent = event.parent
            for name in event.hashes:
                assert name not in self.told
                assert parent == bytes([name[0] - 1])
                self.told.add(name)
                parent = name

    @invariant()
    def sound(self) -> None:
        self.index.check()
        counts = self.index.counts()
        places = self.places.values()
        assert counts.free == 7 - len(self.places)
        assert counts.filling == sum(place.block is None for place in places)
        assert counts.leaving == sum(not place.found for place in places)
        assert counts.claimed == sum(place.claims > 0 and place.found for place in places)


TestHostIndexMachine = HostIndexMachine.TestCase
TestHostIndexMachine.settings = settings(
    max_examples=400 if is_long() else 30, stateful_step_count=60
)
