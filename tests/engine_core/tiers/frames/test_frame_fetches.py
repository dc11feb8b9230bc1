"""Two workers that exchange blocks by frames of their host tiers, in any order of events.

Every block's bytes are made of its hash. So whatever a tier says that it has can be checked, also
where a peer has written.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Literal

import pytest

from pdserve.clock import ManualClock
from pdserve.engine_core.staged_kv.pool import StagingPool
from pdserve.engine_core.tiers.core_tiers import DeviceTiers, TierStorage
from pdserve.engine_core.tiers.frames.frame_fetches import FrameFetches
from pdserve.ids import NodeId, NodeLife
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.job_runner import JobRunner, MemoryCopier
from pdserve.kv.tiers.virtual_io import VirtualTierIo
from pdserve.messages.engine import (
    AbsorbKv,
    KvAbsorbed,
    KvPullAnswer,
    KvPullEnded,
    KvPullOpened,
    KvPullServed,
    ListKvChains,
    PeerGone,
    ServeKvPull,
    StopKvPull,
    Submit,
)
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.tiers import KvSource, TierSpec
from pdserve.messages.transfer import RankKvLayout
from pdserve.testing.fake_mover import FakeMover, FakeNet
from pdserve.token_ids import token_ids
from pdserve.transfer.copy_plan import block_bytes
from tests.engine_core.kv_fetch.pair import question

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.messages.engine import Event
    from pdserve.messages.tiers import KvFetchMode

LAYOUT = RankKvLayout(content="x", layers=2, heads=1, tokens=4, dim=8, itemsize=2)
SIZE = block_bytes(LAYOUT)
FRAMES = 16
STAGING = 3
"""Blocks in front of the frames, which no fetch touches."""
ROOT = b"root" * 4


def chain(seed: object, count: int = 4) -> list[bytes]:
    return [Random(f"{seed} {place}").randbytes(16) for place in range(count)]


def request_of(scope: Literal["never", "shared"] = "shared") -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([1]),
        sampling=SamplingParams(max_tokens=1),
        cache_scope=scope,
    )


class End:
    """A worker without an engine: a device pool, a host tier, and the fetches."""

    def __init__(self, net: FakeNet, name: str, mode: KvFetchMode = "auto") -> None:
        self.name = name
        self.clock = ManualClock()
        self.pool = BlockPool(24, LAYOUT.tokens)
        shape = (LAYOUT.layers, 2, LAYOUT.heads, LAYOUT.tokens, LAYOUT.dim)
        self.device = BlockMemory(24, shape, LAYOUT.itemsize)
        self.staging = StagingPool(LAYOUT, STAGING, frames=FRAMES)
        frames = self.staging.frames()
        assert frames is not None
        self.arena, self.region = frames, frames.region
        assert self.region.view is not None
        frame_bytes = self.region.view[STAGING * SIZE :]
        self.copier = MemoryCopier(self.device.view(), frame_bytes, SIZE)
        io = VirtualTierIo(self.clock, SIZE, JobRunner(self.copier, self.arena, None))
        storage = TierStorage(FRAMES, SIZE, io)
        spec = TierSpec(host_bytes=FRAMES * SIZE, host_admission="all")
        self.tiers = DeviceTiers(spec, storage, self.pool, 0.0)
        self.mover = FakeMover(net)
        self.said: list[Event] = []
        self.mover.start(self.region, lambda: None)
        self.fetches = FrameFetches(
            self.tiers, self.mover, self.region, mode, self.said.append, STAGING
        )
        self.came: list[list[bytes]] = []
        """Blocks of each pull that has ended."""
        self.why: list[str] = []
        """Why no more have come."""

    @property
    def host(self):
        return self.tiers.lower.host

    def compute(self, hashes: Sequence[bytes], *, private: bool = False) -> None:
        """A request computes a chain and leaves it on the device."""
        blocks = self.pool.reserve(len(hashes))
        assert blocks is not None
        for block, name in zip(blocks, hashes, strict=True):
            self.device.view(block)[:] = name * (SIZE // 16)
        blocks = self.pool.commit_run(blocks, list(hashes), ROOT)
        use = self.tiers.use_of(request_of("never" if private else "shared"), b"")
        self.tiers.cleaner.left(hashes, use, self.clock.now())
        self.pool.release(blocks)

    def store(self) -> None:
        """Copy what the device has to the host, as while nothing is computed."""
        for _ in range(3):
            self.tiers.clean(0, self.clock.now(), busy=False)
            self.clock.advance(1.0)
            self.tiers.take(self.clock.now())

    def pull(
        self,
        hashes: Sequence[bytes],
        patience: float = 10.0,
        first: int = 0,
        local: Sequence[bytes] = (),
    ) -> int:
        assert self.fetches.pulls is not None
        self.fetches.take(StopKvPull(0), self.clock.now())
        source = KvSource("owner", 1, first + len(hashes))
        return self.fetches.pulls.begin(
            source,
            hashes,
            first,
            ROOT,
            b"",
            patience,
            local,
            self._pulled,
        )

    def _pulled(self, hashes: Sequence[bytes], why: str) -> None:
        self.came.append([*hashes])
        self.why.append(why)

    def step(self) -> list[Event]:
        now = self.clock.now()
        for event in self.mover.poll():
            assert self.fetches.moved(event, now)
        self.fetches.advance(now, busy=False)
        self.tiers.take(now)
        self.check()
        said, self.said[:] = [*self.said], []
        return said

    def check(self) -> None:
        self.tiers.lower.check()
        for name in self.host.names():
            frame = self.host.frame(name)
            assert frame is not None
            assert bytes(self.arena.view(frame)) == name * (SIZE // 16), "not this block's bytes"
        assert self.region.view is not None
        assert not any(self.region.view[: STAGING * SIZE]), "a staging block was written to"

    def close(self) -> None:
        self.mover.close()
        self.fetches.fenced(self.clock.now())
        counts = self.host.counts()
        filling = len(self.tiers.lower._storing.under_way)
        assert (counts.filling, counts.claimed, counts.leaving) == (filling, 0, 0)
        self.copier.close()
        self.device.close()
        self.staging.close()


class Two:
    """`asker` pulls from `owner`; the test plays their nodes."""

    def __init__(self, mode: KvFetchMode = "auto") -> None:
        self.net = FakeNet()
        self.asker, self.owner = End(self.net, "asker", mode), End(self.net, "owner")
        self.ended: list[KvPullEnded] = []
        self.refused: list[str] = []

    def turn(self, rng: Random | None = None) -> None:
        for event in self.asker.step():
            match event:
                case KvPullOpened():
                    asked = question(event.number, event, NodeLife(NodeId("asker"), 1))
                    self.net.under_way.append(partial(self._tell, self.owner, asked))
                case KvPullEnded():
                    self.ended.append(event)
                    stop = StopKvPull(event.number)
                    self.net.under_way.append(partial(self._tell, self.owner, stop))
        for event in self.owner.step():
            if isinstance(event, KvPullServed):
                self.refused += [event.grant.refused] if event.grant.refused else []
                answer = KvPullAnswer(event.number, event.grant)
                self.net.under_way.append(partial(self._tell, self.asker, answer))
        self.net.step(rng)

    @staticmethod
    def _tell(end: End, command: ServeKvPull | KvPullAnswer | StopKvPull) -> None:
        assert end.fetches.take(command, end.clock.now())

    def run(self) -> None:
        for _ in range(300):
            self.turn()
            for end in (self.asker, self.owner):
                end.clock.advance(0.001)

    def close(self) -> None:
        self.asker.close()
        self.owner.close()


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


def test_frames_of_the_host_are_served_and_filled(two: Two) -> None:
    names = chain(1)
    two.owner.compute(names)
    two.owner.store()
    two.asker.pull([*names, *chain(2)])
    assert two.asker.fetches.pulls is not None
    assert two.asker.fetches.pulls.coming(names[0])
    two.run()
    assert two.asker.came == [names]
    assert set(two.asker.host.names()) == set(names)
    assert [(each.blocks, each.error) for each in two.ended] == [(4, "")]
    assert not two.asker.fetches.pulls.coming(names[0])
    assert two.asker.host.counts().filling == two.owner.host.counts().claimed == 0


def test_what_is_on_the_device_is_copied_to_the_host_for_a_peer(two: Two) -> None:
    names = chain(1)
    two.owner.compute(names)
    two.asker.pull(names)
    two.run()
    assert two.asker.came == [names]
    assert set(two.owner.host.names()) == set(names)


def test_private_blocks_are_not_served(two: Two) -> None:
    two.owner.compute(chain(1), private=True)
    two.asker.pull(chain(1))
    two.run()
    assert (two.asker.came, two.refused) == ([[]], ["absent"])


def test_wrong_bytes_are_no_blocks(two: Two) -> None:
    two.owner.compute(chain(1))
    two.owner.store()
    two.net.faults.append("corrupt")
    two.asker.pull(chain(1))
    two.run()
    assert two.net.counts["corrupted"] == 1
    assert two.asker.came == [[]]
    assert len(two.asker.host) == 0


@pytest.mark.parametrize("how", ["late", "gone", "restarts", "cancelled", "dropped"])
def test_frames_wait_until_the_peer_cannot_write(two: Two, how: str) -> None:
    number = two.asker.pull(chain(1), patience=0.5)
    two.asker.step()
    two.net.run()
    now = two.asker.clock.now()
    assert two.asker.fetches.pulls is not None
    match how:
        case "late":
            assert two.asker.fetches.next_deadline() == now + 0.5
            two.asker.clock.advance(0.6)
        case "gone":
            two.asker.fetches.take(PeerGone("owner", 1), now)
            assert not two.asker.fetches.pulls.may_pull(KvSource("owner", 1, 4))
            assert two.asker.fetches.pulls.may_pull(KvSource("owner", 2, 4))
        case "restarts":
            two.asker.fetches.take(PeerGone("owner", 1, returns=True), now)
            assert two.asker.fetches.pulls.may_pull(KvSource("owner", 1, 4))
        case "cancelled":
            two.asker.fetches.pulls.cancel(number)
        case "dropped":
            two.asker.fetches.drop(now)
    two.asker.step()
    assert two.asker.came == ([] if how == "cancelled" else [[]])
    assert two.asker.host.counts().filling == 4
    two.run()
    assert two.asker.host.counts().filling == 0
    assert len(two.asker.fetches.pulls) == 0


def test_pulls_leave_frames_for_others(two: Two) -> None:
    """The first one may take half of the tier; another one only what makes a quarter together."""
    assert two.asker.pull(chain(1, 12))
    assert two.asker.host.counts().filling == FRAMES // 2
    assert two.asker.pull(chain(2, 1)) == 0
    two.run()
    two.owner.compute(chain(3, 12))
    two.asker.pull(chain(3, 12))
    two.run()
    assert two.asker.came[1]
    assert two.asker.why == ["absent", "room"]


def test_a_pull_evicts_other_blocks_than_those_before_it(two: Two) -> None:
    """Else what it brings could not be used, where they are the oldest."""
    names = chain(1, 8)
    two.owner.compute(names)
    for blocks in (names[:4], *(chain(seed) for seed in range(2, 5))):
        two.asker.compute(blocks)
        two.asker.store()
        two.asker.pool.clear()
        two.asker.tiers.follow(two.asker.pool.drain_events(), two.asker.clock.now())
    assert len(two.asker.host) == FRAMES
    two.asker.pull(names[4:], first=4, local=names[:4])
    two.run()
    assert two.asker.came == [names[4:]]
    assert two.asker.tiers.lower.run(names) == ["host"] * 8


def test_a_worker_that_fetches_nothing_serves_all_the_same() -> None:
    two = Two("never")
    assert two.asker.fetches.pulls is None
    two.close()


def test_other_commands_are_refused_or_left_to_the_core(two: Two) -> None:
    fetches = two.owner.fetches
    order = AbsorbKv(
        number=3, node="asker", epoch=1, first=0, parent=ROOT, hashes=chain(1)[0], timeout=1.0
    )
    assert fetches.take(order, 0.0)
    assert fetches.take(ListKvChains(4, 10), 0.0)
    absorbed, listed = two.owner.said
    assert isinstance(absorbed, KvAbsorbed)
    assert absorbed.error == "misfit"
    assert listed.listed.chains == ()  # type: ignore[union-attr]
    assert not fetches.take(Submit(handle=1, request=request_of()), 0.0)
    two.owner.said.clear()


def test_any_order_of_events_leaves_only_right_blocks(seed: int, long: bool) -> None:
    """Evictions, faults, cancellations and late answers included."""
    seen: Counter[str] = Counter()
    for number in range(40 if long else 6):
        rng, two = Random(f"{seed} {number}"), Two()
        _live(rng, two)
        seen.update(each.error for each in two.ended)
        two.close()
    assert seen[""]
    assert seen.keys() - {""}


def _live(rng: Random, two: Two) -> None:
    numbers: list[int] = []
    for _ in range(60):
        what = rng.random()
        names = chain(rng.randrange(6), rng.randint(1, 4))
        if what < 0.25:
            numbers.append(two.asker.pull(names, patience=rng.choice([0.05, 5.0])))
        elif what < 0.4:
            two.owner.compute(chain(rng.randrange(6)))
        elif what < 0.5:
            two.owner.store()
        elif what < 0.6 and numbers and two.asker.fetches.pulls is not None:
            two.asker.fetches.pulls.cancel(rng.choice(numbers))
        elif what < 0.65:
            two.net.faults.append(rng.choice(["lost", "late", "corrupt"]))
        elif what < 0.68:
            two.owner.tiers.clear()
        for _ in range(rng.randrange(12)):
            two.turn(rng)
        for end in (two.asker, two.owner):
            end.clock.advance(0.01)
    two.net.faults.clear()
    for end in (two.asker, two.owner):
        end.clock.advance(10.0)
    two.run()
    counts = two.asker.host.counts()
    assert (counts.filling, counts.claimed) == (0, 0)
