"""Frames of the host tier that are held for a prompt which a peer computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.engine_core.tiers.frames.frame_holds import SHARE, FrameHolds
from pdserve.engine_core.tiers.onboarder import FetchPlan
from pdserve.kv.tiers.block import TierBlock
from pdserve.messages.tiers import CachedSource
from pdserve.testing.fake_mover import FakeNet
from tests.engine_core.tiers.frames.test_frame_fetches import (
    FRAMES,
    LAYOUT,
    STAGING,
    End,
    chain,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.tiers import KvSource, SourceName

TOKENS = LAYOUT.tokens


class Planner:
    """Fetches up to a number of blocks."""

    def __init__(self) -> None:
        self.most = 100
        self.asked: list[list[SourceName]] = []

    def choose(
        self,
        device: int,
        local: Sequence[SourceName],
        peers: Sequence[KvSource],
        blocks: int,
        wait: Seconds,
        *,
        early: bool = False,
    ) -> FetchPlan | None:
        self.asked.append([*local])
        return FetchPlan(min(self.most, len(local))) if self.most else None


class Holds:
    """The frames of one core."""

    def __init__(self, end: End) -> None:
        self.end, self.planner = end, Planner()
        self.holds = FrameHolds(end.tiers.lower, lambda: self.planner, TOKENS, STAGING)

    def store(self, names: Sequence[bytes]) -> None:
        self.end.compute(names)
        self.end.store()

    def counts(self) -> tuple[int, int]:
        counts = self.end.host.counts()
        return counts.valid, counts.claimed


@pytest.fixture
def core() -> Iterator[Holds]:
    end = End(FakeNet(), "d")
    yield Holds(end)
    end.tiers.lower.check()
    end.close()


def test_what_the_host_has_behind_the_device_is_held(core: Holds) -> None:
    names = chain("held")
    core.store(names[:3])
    held = core.holds.hold(names, 1, frozenset())
    frames = [core.end.host.frame(name) for name in names[1:3]]
    assert [block - STAGING for block in held.blocks] == frames
    assert held.sources == (CachedSource("host", 2 * TOKENS),)
    assert (core.holds.held, core.counts()) == (2, (3, 2))
    core.holds.release(held.blocks)
    assert (core.holds.held, core.counts()) == (0, (3, 0))


def test_nothing_behind_a_gap_is_held(core: Holds) -> None:
    names = chain("gap")
    core.store(names)
    core.end.host.drop(names[1])
    held = core.holds.hold(names, 0, frozenset())
    assert len(held.blocks) == 1
    assert core.holds.hold(names, 1, frozenset()).blocks == ()
    core.holds.release(held.blocks)


def test_held_frames_are_not_evicted(core: Holds) -> None:
    names = chain("stays", 2)
    core.store(names)
    held = core.holds.hold(names, 0, frozenset())
    for number in range(3 * FRAMES // 4):
        core.store(chain(number))
    assert all(name in core.end.host for name in names)
    core.end.check()
    core.holds.release(held.blocks)


def test_half_of_the_tier_is_held_at_most(core: Holds) -> None:
    one, two = chain("one", 6), chain("two", 6)
    core.store(one)
    core.store(two)
    most = int(SHARE * FRAMES)
    first = core.holds.hold(one, 0, frozenset())
    second = core.holds.hold(two, 0, frozenset())
    assert len(first.blocks) + len(second.blocks) == most == core.holds.held
    assert core.holds.hold(one, 0, frozenset()).blocks == ()
    for held in (first, second):
        core.holds.release(held.blocks)


def test_hits_are_counted_by_tier_when_they_were_loaded(core: Holds) -> None:
    core.holds.loaded((CachedSource("host", 2 * TOKENS), CachedSource("disk", TOKENS)))
    host = core.end.tiers.stats(0.0)[0]
    assert host.hit_tokens == 2 * TOKENS
    assert core.end.tiers.lower._tiers.disk_counts.hit_blocks == 1


class Disk:
    """Stands for the disk of `LowerTiers`: which blocks are there, and what is read."""

    def __init__(self, core: Holds, names: Sequence[bytes], monkeypatch: pytest.MonkeyPatch):
        self.names, self.read, self.frames = set(names), list[bytes](), 100
        lower = core.end.tiers.lower
        monkeypatch.setattr(lower._tiers.__class__, "on_disk", lambda _, name: name in self.names)
        monkeypatch.setattr(lower.__class__, "lift", lambda _, name, now: self._lift(name))

    def _lift(self, name: bytes) -> bool:
        if len(self.read) == self.frames:
            return False
        self.read.append(name)
        return True


def test_what_the_disk_has_is_read_ahead(core: Holds, monkeypatch: pytest.MonkeyPatch) -> None:
    names = chain("disk", 5)
    core.store(names[:2])
    disk = Disk(core, names[2:4], monkeypatch)
    read = core.holds.bring(names, 1, 1.0)
    assert core.planner.asked == [["host", "disk", "disk"]]
    assert disk.read == names[2:4]
    assert read == {*names[2:4]}
    # One of them has come when the peer asks.
    block = TierBlock(names[2], names[1], tokens=TOKENS)
    frame = core.end.host.reserve()
    assert frame is not None
    core.end.arena.view(frame)[:] = names[2] * (len(core.end.arena.view(frame)) // 16)
    assert core.end.host.commit(frame, block, 1.0)
    held = core.holds.hold(names, 1, read)
    assert held.sources == (CachedSource("host", TOKENS), CachedSource("disk", TOKENS))
    core.holds.release(held.blocks)


@pytest.mark.parametrize(("most", "frames", "expected"), [(0, 100, 0), (1, 100, 1), (3, 2, 2)])
def test_only_as_much_is_read_as_is_planned_and_has_room(
    core: Holds, monkeypatch: pytest.MonkeyPatch, most: int, frames: int, expected: int
) -> None:
    names = chain("plan")
    disk = Disk(core, names, monkeypatch)
    core.planner.most, disk.frames = most, frames
    read = core.holds.bring(names, 0, 1.0)
    assert disk.read == names[:expected]
    assert read == {*names[:expected]}


def test_nothing_is_planned_without_blocks_on_disk(core: Holds) -> None:
    names = chain("host")
    core.store(names)
    assert core.holds.bring(names, 0, 1.0) == frozenset()
    assert core.planner.asked == []
