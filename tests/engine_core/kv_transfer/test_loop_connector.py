"""A mover on a loop: every attempt that is opened is answered, every one revoked fenced, soon."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

import pytest

from pdserve.engine_core.kv_transfer.connector import (
    AttemptBroken,
    AttemptFenced,
    AttemptGranted,
    AttemptKey,
    PartArrived,
)
from pdserve.engine_core.kv_transfer.loop_connector import LoopKvConnector
from pdserve.errors import (
    ConfigError,
    EngineDied,
    EngineError,
    LinkLost,
    NotReady,
    PathLost,
    TransferRefused,
)
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import InboundControl, MakePath, PeerGone, SetNodeLife
from pdserve.messages.transfer import BackendProbe, PathHello, PathReady
from pdserve.testing.fake_rdma import FakeFabric, FakeFaults, FakePath
from pdserve.testing.virtual_time import run
from pdserve.transfer.backends import TransferBackend
from pdserve.transfer.path_base import PathBase
from tests.engine_core.kv_transfer.world import (
    End,
    World,
    delivered,
    fake,
    filled,
    granted,
    lost,
    part,
    revoked,
)

SOON = 15.0
"""Virtual seconds: the peer's word, or else the path's end."""


class Two(World):
    """A decode and a prefill worker over one fabric."""

    def __init__(self, seed: int, faults: FakeFaults | None = None) -> None:
        super().__init__()
        self.fabric = FakeFabric(Random(seed), faults)
        self.d, self.p = self.add("d", 1), self.add("p", 2)

    def add(self, name: str, epoch: int, *backends: TransferBackend) -> End:
        end = self.end(name, epoch)
        mover = end.mover = LoopKvConnector(
            backends or [fake(self.fabric)], say=end.say, nudge=end.nudge
        )
        assert mover.start(end.region, lambda: None) == tuple(b.name for b in mover._backends)
        mover.attach(end.key)
        return end

    async def __aenter__(self) -> Two:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for end in self.ends.values():
            mover = loop_mover(end)
            await mover.closed()
            assert not len(mover._tasks)
            end.free()
        assert self.fabric.pairs == {}


def loop_mover(end: End) -> LoopKvConnector:
    assert isinstance(end.mover, LoopKvConnector)
    return end.mover


KEY = AttemptKey(1, 1)


def test_blocks_travel_and_are_counted(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:
            two.p.fill({1: 11, 2: 12})
            sent = await filled(two, two.d, two.p, KEY, [1, 2], [5, 6])
            assert two.d.holds({5: 11, 6: 12})
            assert sent.size == 2 * two.d.memory.block_bytes
            await asyncio.sleep(2.0)
            (ours,), (theirs,) = two.d.paths, two.p.paths
            assert ours.received_bytes == theirs.sent_bytes == sent.size
            assert (ours.node, ours.backend, ours.down) == ("p", "fake", "")
            assert ours.why == "asked for by name"
            assert theirs.why == "the peer chose it"
            assert ours.expected == 1e9

    run(main())


def test_attempts_to_one_peer_share_a_path(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:
            keys = [AttemptKey(handle, 1) for handle in range(8)]
            for key in keys:
                two.d.mover.open(key, two.p.key, two.d.order(key, [key.handle]))
            await two.until(lambda: all(two.d.of(AttemptGranted, key) for key in keys))
            assert two.d.asked == 3  # a probe, PathHello, PathReady
            for key in keys:
                two.d.mover.finish(key)

    run(main())


def _paced(seconds: float, size_rate: float):
    return lambda size: seconds + size / size_rate


def test_a_path_made_in_advance_is_measured(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:
            two.fabric.pace = _paced(1e-4, 5e9)
            two.d.tell(MakePath(node="p", epoch=2))
            await two.until(lambda: bool(two.d.paths and two.p.paths))
            (ours,), (theirs,) = two.d.paths, two.p.paths
            assert ours.measured == pytest.approx(5e9, rel=0.05)
            assert (ours.unmeasured, theirs.measured) == ("", 0.0)
            assert two.d.holds({})
            two.d.tell(MakePath(node="p", epoch=2))  # it is there
            two.d.tell(MakePath(node="nobody", epoch=2))
            await asyncio.sleep(1.0)
            assert len(two.d.paths) == 1

    run(main())


def test_a_transfer_does_not_wait_for_a_measurement(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:
            two.fabric.pace = _paced(0.004, 1e12)
            two.d.tell(MakePath(node="p", epoch=2))
            await asyncio.sleep(0.001)
            began = two.loop.time()
            await granted(two, two.d, two.p, KEY, [1])
            assert two.loop.time() - began < 0.006  # the probe under way, and no other
            await two.until(lambda: bool(two.d.paths))
            assert two.d.paths[0].unmeasured == "a transfer was waiting for the path"
            two.d.mover.finish(KEY)

    run(main())


def test_a_path_too_slow_for_probes_is_made_all_the_same(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:
            two.fabric.pace = _paced(1.0, 1e9)
            two.d.tell(MakePath(node="p", epoch=2))
            await two.until(lambda: bool(two.d.paths))
            (ours,) = two.d.paths
            assert (ours.measured, ours.down) == (0.0, "")
            assert ours.unmeasured == "no probe came within 50 ms"

    run(main())


def test_a_back_end_without_probes_says_so(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(FakePath, "probe", PathBase.probe)
        async with Two(seed) as two:
            two.d.tell(MakePath(node="p", epoch=2))
            await two.until(lambda: bool(two.d.paths))
            assert "fake has no probes" in two.d.paths[0].unmeasured

    run(main())


def test_a_revoked_attempt_is_closed_in_every_state(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:
            await revoked(two, two.d, AttemptKey(9, 9), SOON)  # never opened
            opening = AttemptKey(2, 1)
            two.d.mover.open(opening, two.p.key, two.d.order(opening, [0]))
            await revoked(two, two.d, opening, SOON)
            assert two.d.of((AttemptGranted, AttemptBroken), opening) == []
            await granted(two, two.d, two.p, KEY, [1])
            await revoked(two, two.d, KEY, SOON)
            again = AttemptKey(1, 2)
            await granted(two, two.d, two.p, again, [1])  # its blocks are free again
            await revoked(two, two.d, again, SOON)
            await revoked(two, two.d, again, SOON)

    run(main())


def test_a_silent_peer_costs_the_path_and_not_the_fence(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:
            ticket = (await granted(two, two.d, two.p, KEY, [1])).ticket
            other = AttemptKey(2, 1)
            await granted(two, two.d, two.p, other, [2])
            two.silent.add(two.p.key)
            await revoked(two, two.d, KEY, SOON)
            await two.until(
                lambda: bool(two.d.of(AttemptBroken, other))
            )  # it went by the same path
            await revoked(two, two.d, other, SOON)
            two.p.fill({1: 1})
            two.p.mover.deliver(1, two.d.key, ticket, part(0, [1]))
            await two.until(lambda: bool(two.p.deliveries(1)))
            assert two.p.deliveries(1)[0].error is not None
            assert two.d.holds({})
            two.silent.clear()
            two.p.fill({1: 7})
            await filled(two, two.d, two.p, AttemptKey(3, 1), [1], [3])  # a new path
            assert two.d.holds({3: 7})

    run(main())


def test_nobody_there_loses_the_attempt_and_not_the_back_end(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:

            def nobody(question):  # it answers the probe and is gone then
                hello = isinstance(question.control, PathHello) and two.d.asked > 6
                return LinkLost("nobody is there") if hello else None

            two.cut.add(two.p.key)
            two.refuse = nobody
            for number in range(1, 11):
                if number == 6:
                    two.cut.clear()
                key = AttemptKey(1, number)
                await lost(two, two.d, two.p, key, [1])
                await revoked(two, two.d, key, SOON)
            two.refuse = lambda question: None
            await granted(two, two.d, two.p, AttemptKey(1, 11), [1])
            peer_paths = loop_mover(two.d)._peer_paths
            assert peer_paths is not None
            assert not peer_paths._choices._records
            two.d.mover.finish(AttemptKey(1, 11))

    run(main())


def test_a_peer_that_is_gone_takes_its_paths_with_it(seed: int) -> None:
    async def main() -> None:
        async with Two(seed, FakeFaults(delay=(0.1, 0.2))) as two:
            opened = await granted(two, two.d, two.p, KEY, [1, 2, 3])
            two.p.mover.deliver(1, two.d.key, opened.ticket, part(0, [1, 2, 3]))
            opening = AttemptKey(2, 1)
            two.silent.add(two.p.key)
            two.d.mover.open(opening, two.p.key, two.d.order(opening, [4]))
            two.d.tell(PeerGone(node="p", epoch=2))
            await two.until(lambda: bool(two.d.of(AttemptBroken, KEY)), SOON)
            (lost,) = two.d.of(AttemptBroken, KEY)
            assert isinstance(lost.error, PathLost)
            await revoked(two, two.d, KEY, SOON)
            await asyncio.sleep(5.0)
            assert two.d.of(PartArrived, KEY) == []
            assert two.d.paths == []
            await revoked(two, two.d, opening, SOON)

    run(main())


def test_another_life_of_ours_ends_what_was_begun(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:
            ticket = (await granted(two, two.d, two.p, KEY, [1])).ticket
            del two.ends[two.d.key]
            two.d.key = NodeLife(two.d.key.node, 7)
            two.ends[two.d.key] = two.d
            two.d.mover.attach(two.d.key)
            await two.until(lambda: bool(two.d.of(AttemptBroken, KEY)), SOON)
            await revoked(two, two.d, KEY, SOON)
            two.p.mover.deliver(1, NodeLife(two.d.key.node, 1), ticket, part(0, [1]))
            await two.until(lambda: bool(two.p.deliveries(1)), SOON)
            assert two.p.deliveries(1)[0].error is not None
            two.p.fill({1: 5})
            await filled(two, two.d, two.p, AttemptKey(2, 1), [1], [1])
            assert two.d.holds({1: 5})

    run(main())


def test_a_ticket_ends_with_the_engine_that_gave_it(seed: int) -> None:
    """Both engines of the same life of a node begin with slot 0: only their own number differs."""

    async def main() -> None:
        async with Two(seed) as two:
            old = (await granted(two, two.d, two.p, KEY, [1])).ticket
            await loop_mover(two.d).closed()
            again = two.add("d", 1)
            assert again.key == two.d.key
            two.d.free()
            two.d = again
            key = AttemptKey(2, 1)
            new = (await granted(two, two.d, two.p, key, [1])).ticket
            assert (old.slot, old.generation, old.epoch) == (new.slot, new.generation, new.epoch)
            two.p.fill({1: 1, 2: 2})
            two.p.mover.deliver(1, two.d.key, old, part(0, [1]))
            await two.until(lambda: bool(two.p.deliveries(1)))
            (refused,) = two.p.deliveries(1)
            assert isinstance(refused.error, PathLost)
            assert two.d.of(PartArrived, key) == []
            two.p.mover.deliver(2, two.d.key, new, part(0, [2]))
            await two.until(lambda: bool(two.d.of(PartArrived, key)))
            two.d.mover.finish(key)
            assert two.d.holds({1: 2})

    run(main())


@pytest.mark.parametrize("epoch", [2, 5])
def test_a_ticket_ends_with_the_engine_or_the_life_that_was_to_fill_it(
    seed: int, epoch: int
) -> None:
    """The path that the ticket names has ended, and the first path of what came after it must not
    write to blocks that are somebody else's by then."""

    async def main() -> None:
        async with Two(seed) as two:
            old = (await granted(two, two.d, two.p, KEY, [1])).ticket
            if epoch == two.p.key.epoch:
                await loop_mover(two.p).closed()
                two.p.free()
                two.p = two.add("p", epoch)
            else:
                del two.ends[two.p.key]
                two.p.key = NodeLife(two.p.key.node, epoch)
                two.ends[two.p.key] = two.p
                two.p.tell(SetNodeLife(*two.p.key))
            two.d.tell(PeerGone(node="p", epoch=2, returns=True))
            await two.until(lambda: bool(two.d.of(AttemptBroken, KEY)), SOON)
            await revoked(two, two.d, KEY, SOON)
            key = AttemptKey(2, 1)
            new = (await granted(two, two.d, two.p, key, [2])).ticket
            two.p.fill({1: 1, 2: 2})
            two.p.mover.deliver(1, two.d.key, old, part(0, [1]))
            await two.until(lambda: bool(two.p.deliveries(1)))
            (refused,) = two.p.deliveries(1)
            assert isinstance(refused.error, PathLost)
            two.p.mover.deliver(2, two.d.key, new, part(0, [2]))
            await two.until(lambda: bool(two.d.of(PartArrived, key)), SOON)
            two.d.mover.finish(key)
            assert two.d.holds({2: 2})

    run(main())


def test_parts_come_by_the_path_of_their_ticket(seed: int) -> None:
    """Both ends connect at once, and there are two paths; a fence stops one of them."""

    async def main() -> None:
        async with Two(seed) as two:
            two.d.fill({1: 11})
            two.p.fill({2: 12})
            ends = ((two.d, two.p, 1, 5), (two.p, two.d, 2, 6))
            for end, peer, _, to in ends:
                end.mover.open(KEY, peer.key, end.order(KEY, [to]))
            await two.until(lambda: all(end.of(AttemptGranted, KEY) for end, *_ in ends))
            assert len(two.fabric.pairs) == 2 * 2 * 2, "two paths of two rails, and both their ends"
            for end, peer, from_, _ in ends:
                (ours,) = peer.of(AttemptGranted, KEY)
                end.mover.deliver(1, peer.key, ours.ticket, part(0, [from_]))
            await two.until(lambda: all(end.of(PartArrived, KEY) for end, *_ in ends), SOON)
            for end, *_ in ends:
                end.mover.finish(KEY)
            assert two.d.holds({1: 11, 5: 12})
            assert two.p.holds({2: 12, 6: 11})

    run(main())


def test_a_ticket_ends_with_its_path(seed: int) -> None:
    """Its blocks are somebody else's by then: a later path must not write to them."""

    async def main() -> None:
        async with Two(seed) as two:
            old = (await granted(two, two.d, two.p, KEY, [1])).ticket
            paths = loop_mover(two.d)._peer_paths
            assert paths is not None
            await paths._close_paths(two.p.key, "the test wants it")
            await revoked(two, two.d, KEY, SOON)
            key = AttemptKey(2, 1)
            new = (await granted(two, two.d, two.p, key, [2])).ticket
            two.p.fill({3: 13})
            two.p.mover.deliver(1, two.d.key, old, part(0, [3]))
            await delivered(two, two.p, 1)
            (refused,) = two.p.deliveries(1)
            assert isinstance(refused.error, PathLost)
            two.p.mover.deliver(2, two.d.key, new, part(0, [3]))
            await two.until(lambda: bool(two.d.of(PartArrived, key)), SOON)
            two.d.mover.finish(key)
            assert two.d.holds({2: 13})

    run(main())


def slow_to_open(fabric: FakeFabric, opened: asyncio.Event) -> TransferBackend:
    """One that takes its time before its first path, as if it registered a pool."""
    plain = fake(fabric)

    def make(key, regions, ask):
        transport = plain.make(key, regions, ask)
        vars(transport)["open"] = opened.wait
        return transport

    return TransferBackend(name="fake", make=make)


def test_transports_that_are_not_ready_are_held_against_nobody(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:
            opened = asyncio.Event()

            async def lost_at(key: AttemptKey) -> None:
                await two.until(lambda: bool(late.of(AttemptBroken, key)))

            late = two.add("e", 3, slow_to_open(two.fabric, opened))
            for number in range(1, 6):
                key = AttemptKey(1, number)
                late.mover.open(key, two.p.key, late.order(key, [1]))
                await lost_at(key)
                (lost,) = late.of(AttemptBroken, key)
                assert isinstance(lost.error, NotReady)
                await revoked(two, late, key, SOON)
            await asyncio.sleep(2.0)
            assert late.paths == [], "no path is given up for it"
            opened.set()
            key = AttemptKey(1, 6)
            await granted(two, late, two.p, key, [1])
            late.mover.finish(key)

    run(main())


def test_what_a_back_end_made_ready_ends_with_the_mover(seed: int) -> None:
    async def main() -> None:
        closed: list[str] = []
        fabric = FakeFabric(Random(seed))
        async with Two(seed) as two:
            plain = fake(fabric)
            back_end = TransferBackend(
                name="fake", make=plain.make, close=lambda: closed.append("fake")
            )
            end = two.add("e", 3, back_end)
            end.mover.attach(NodeLife(NodeId("e"), 4))  # another life: what it shares stays
            await asyncio.sleep(1.0)
            assert closed == []
            await loop_mover(end).closed()
            assert closed == ["fake"]

    run(main())


def test_a_task_that_never_ends_keeps_the_pool_and_the_back_ends(seed: int) -> None:
    """It may still read or write the pool, so the end is an error."""

    async def main() -> None:
        closed: list[str] = []
        released = asyncio.Event()

        async def stay() -> None:
            while not released.is_set():
                with suppress(asyncio.CancelledError):
                    await released.wait()

        async with Two(seed) as two:
            make = fake(FakeFabric(Random(seed))).make
            back_end = TransferBackend(name="e", make=make, close=lambda: closed.append("e"))
            lone = LoopKvConnector([back_end], say=lambda event: None)
            lone.start(two.d.region, lambda: None)
            stays = lone._tasks.spawn(stay(), "a copy")
            await asyncio.sleep(0)
            for _ in range(2):
                with pytest.raises(EngineError, match="have not ended: a copy"):
                    await lone.closed()
            assert lone._pool is not None
            assert closed == []
            released.set()
            await stays

    run(main())


def test_what_cannot_be_is_said_by_name(seed: int) -> None:
    async def main() -> None:
        never = TransferBackend(
            name="never", make=fake(FakeFabric(Random(0))).make, lacking=lambda r: "no"
        )
        async with Two(seed) as two:
            lone = LoopKvConnector([never], say=lambda event: None)
            with pytest.raises(ConfigError, match="never: no"):
                lone.start(two.d.region, lambda: None)
            await lone.closed()
            other = two.add("e", 3, fake(FakeFabric(Random(0)), "other"))
            other.mover.open(KEY, two.p.key, other.order(KEY, [1]))
            await two.until(lambda: bool(other.of(AttemptBroken, KEY)))
            (lost,) = other.of(AttemptBroken, KEY)
            assert isinstance(lost.error, TransferRefused)
            assert "other: not offered (there)" in lost.error.message
            await asyncio.sleep(0.1)
            (state,) = other.paths
            assert (state.node, state.backend) == ("p", "none")
            assert "other: not offered (there)" in state.down
            assert state.degraded == state.down
            await asyncio.sleep(60.0)
            (state,) = other.paths
            assert state.down == "", "it is worth another trial"
            assert state.degraded
            other.tell(PeerGone(node="p", epoch=2))
            await asyncio.sleep(1.0)
            assert other.paths == []

    run(main())


def test_a_peer_that_refuses_all_there_is_has_no_way_until_it_takes_one(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:
            two.refuse = lambda question: (
                TransferRefused("no TLS here") if isinstance(question.control, PathHello) else None
            )
            for number in (1, 2, 3):
                assert two.d.paths == []
                key = AttemptKey(1, number)
                await lost(two, two.d, two.p, key, [1])
                await revoked(two, two.d, key, SOON)
                await asyncio.sleep(0.1)
            (state,) = two.d.paths
            assert state.backend == "none"
            assert "no TLS here" in state.down
            two.refuse = lambda question: None
            await granted(two, two.d, two.p, AttemptKey(1, 4), [1])
            await asyncio.sleep(0.1)
            assert [state.backend for state in two.d.paths] == ["fake"]
            two.d.mover.finish(AttemptKey(1, 4))

    run(main())


def test_three_failures_make_the_next_back_end_be_taken_and_the_better_tried_again(
    seed: int,
) -> None:
    async def main() -> None:
        two = World()
        fabric = FakeFabric(Random(seed))
        ends = []
        for name, epoch in (("d", 1), ("p", 2)):
            end = two.end(name, epoch)
            end.mover = LoopKvConnector(
                [fake(fabric, "good"), fake(fabric, "plain")], say=end.say, nudge=end.nudge
            )
            end.mover.start(end.region, lambda: None)
            end.mover.attach(end.key)
            ends.append(end)
        d, p = ends

        def refuse(question):
            bad = question.backend == "good" and isinstance(question.control, PathHello | PathReady)
            return TransferRefused("no adapter left") if bad else None

        two.refuse = refuse
        for number in (1, 2, 3):
            key = AttemptKey(1, number)
            await lost(two, d, p, key, [1])
            await revoked(two, d, key, SOON)
        assert (await granted(two, d, p, AttemptKey(1, 4), [1])).ticket.backend == "plain"
        await asyncio.sleep(0.1)
        (state,) = d.paths
        assert state.backend == "plain"
        assert "good failed 3 times in a row, lastly" in state.degraded
        two.refuse = lambda question: None
        await asyncio.sleep(60.0)
        assert (await granted(two, d, p, AttemptKey(2, 1), [2])).ticket.backend == "good"
        await asyncio.sleep(0.1)
        assert [state.degraded for state in d.paths if state.backend == "good"] == [""]
        for end in ends:
            await loop_mover(end).closed()
            end.free()

    run(main())


def test_a_mistake_in_here_is_not_survived(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Two(seed) as two:

            async def mistake() -> None:
                raise ZeroDivisionError

            monkeypatch.setattr(two.d, "pump", lambda: None)
            _ = loop_mover(two.d)._tasks.spawn(mistake(), "a mistake")
            await asyncio.sleep(0.1)
            with pytest.raises(EngineDied, match="ZeroDivisionError"):
                two.d.mover.poll()

    run(main())


@pytest.mark.parametrize("round", range(6))
def test_faults_leave_nothing_unanswered_and_nothing_behind(seed: int, round: int) -> None:
    """Lost and late packets, silence, deaths, withdrawals, in an order drawn by the seed: every
    attempt is granted or lost and, revoked, closed; a block that is free again stays as it is."""

    async def main() -> None:
        random = Random(f"{seed} {round}")
        faults = FakeFaults(delay=(0.0, 0.05), lost=0.02, late=0.02, give_up=0.5, late_by=(0, 3))
        async with Two(seed, faults) as two:
            two.p.fill({block: block for block in range(32)})
            open_: dict[AttemptKey, list[int]] = {}
            free = list(range(32))
            for number in range(40):
                key = AttemptKey(number, 1)
                blocks = [free.pop() for _ in range(min(len(free), random.randint(1, 4)))]
                if not blocks:
                    break
                two.d.mover.open(key, two.p.key, two.d.order(key, blocks))
                open_[key] = blocks
                await asyncio.sleep(random.random() * 0.2)
                for found in two.d.of(AttemptGranted, key):
                    two.p.mover.deliver(number, two.d.key, found.ticket, part(0, blocks))
                if random.random() < 0.1:
                    two.p.mover.withdraw(number, two.d.key, two.d.moved[-1].ticket) if isinstance(
                        two.d.moved[-1], AttemptGranted
                    ) else None
                if random.random() < 0.1:
                    two.d.tell(PeerGone(node="p", epoch=2))
                if random.random() < 0.1:
                    two.silent ^= {two.p.key}
                await asyncio.sleep(random.random() * 0.3)
                for key in [key for key in open_ if random.random() < 0.5]:
                    blocks = open_.pop(key)
                    if two.d.of(PartArrived, key) and random.random() < 0.5:
                        two.d.mover.finish(key)
                    else:
                        await revoked(two, two.d, key, SOON)
                        answered = two.d.of((AttemptGranted, AttemptBroken), key)
                        assert len([m for m in answered if isinstance(m, AttemptGranted)]) <= 1
                    two.d.poison(blocks)
                    free += blocks
            for key, blocks in open_.items():
                await revoked(two, two.d, key, SOON)
                two.d.poison(blocks)
            await asyncio.sleep(10.0)
            assert two.d.holds({}), "something was written after its fence"
            assert len(two.d.of(AttemptFenced, KEY)) <= 1

    run(main())


def test_an_epoch_that_has_passed_does_not_come_back(seed: int) -> None:
    """The core and its transports are told of a life by two sockets, so in any order."""

    async def main() -> None:
        async with Two(seed) as two:
            mover = loop_mover(two.d)
            mover.take(SetNodeLife(node="d", epoch=3))
            present = mover._peer_paths
            assert present is not None
            for late in (1, 3):
                mover.attach(NodeLife(NodeId("d"), late))
            assert mover._peer_paths is present
            assert present.key == NodeLife(NodeId("d"), 3)

    run(main())


def test_what_is_for_the_node_alone_does_not_wake_the_core(seed: int) -> None:
    async def main() -> None:
        async with Two(seed) as two:
            woken: list[object] = []
            mover = loop_mover(two.d)
            mover._wake = mover._nudge = lambda: woken.append(None)
            two.d.tell(
                InboundControl(number=1, node="p", epoch=2, backend="", control=BackendProbe(5))
            )
            two._asking[1] = (two.p, 1)
            await two.until(lambda: 1 not in two._asking)
            assert not woken
            assert mover.poll() == []

    run(main())
