"""What a peer says is judged, not believed: whatever it is, a node refuses it and lives on."""

from __future__ import annotations

import array
import asyncio
import contextlib
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.errors import TransferError
from pdserve.messages.transfer import (
    BackendOffers,
    BackendProbe,
    ControlDone,
    PathGone,
    PathHello,
    PathReady,
    PathWelcome,
    RegionCard,
    StopTicket,
)
from pdserve.testing.fake_rdma import FakeFabric, FakeTransport
from pdserve.testing.kv_oracle import layouts
from pdserve.testing.transfer_support import RecordingTransferSink, order, transfer_pair
from pdserve.transfer.block_mapping import BlockMapping
from pdserve.transfer.same_host.pull_transport import PullPath, _Fetch
from pdserve.transfer.same_host.shm import ShmTransport
from pdserve.transfer.tcp.transport import TcpPath, TcpTransport, _Data, _encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import NodeLife
    from pdserve.messages.transfer import RankKvLayout, TransferControl
    from pdserve.testing.transfer_support import TransferPair
    from pdserve.transfer.base import CallPeer, KvTransport, Region


def world(backend: str) -> Any:
    fabric = FakeFabric(Random(1))

    def make(key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        if backend == "fake":
            return FakeTransport(key.node, key.epoch, regions, ask, fabric, key=key)
        if backend == "shm":
            return ShmTransport(key.node, key.epoch, regions, ask)
        return TcpTransport(key.node, key.epoch, regions, ask, host="127.0.0.1")

    return transfer_pair(make, layouts(2, 1), layouts(2, 1), blocks=8)


DETAILS = [
    b"",
    b"\xff\x00",
    msgspec.msgpack.encode("another version"),
    msgspec.msgpack.encode([1, 2, 3, 4, 5, 6]),
    msgspec.msgpack.encode(["h\0st", 1 << 40, [b"token"], "all"]),
    msgspec.msgpack.encode(["h" * 300, 1, [b"token"], "all"]),
    msgspec.msgpack.encode([[1, 2, 3, 4, 5]]),
]


def changing(two: TransferPair, record: str, details: bytes) -> None:
    """From now on PathHello, or PathWelcome, has these details on its way."""
    transport: Any = two.source.transport
    real = transport.ask

    async def ask(peer: NodeLife, control: TransferControl, timeout: float) -> TransferControl:
        if record == "Hello" and type(control).__name__ == "PathHello":
            control = msgspec.structs.replace(_hello(control), details=details)
        answer = await real(peer, control, timeout)
        if record == "Welcome" and type(answer).__name__ == "PathWelcome":
            answer = msgspec.structs.replace(_welcome(answer), details=details)
        return answer

    transport.ask = ask


def _hello(control: Any) -> PathHello:
    return control


def _welcome(control: Any) -> PathWelcome:
    return control


@pytest.mark.parametrize("details", DETAILS, ids=range(len(DETAILS)))
@pytest.mark.parametrize("record", ["Hello", "Welcome"])
@pytest.mark.parametrize("backend", ["fake", "shm", "tcp"])
async def test_details_that_nobody_understands_are_refused(
    backend: str, record: str, details: bytes
) -> None:
    async with world(backend) as two:
        changing(two, record, details)
        if (backend, record) == ("shm", "Welcome"):
            return  # its PathWelcome has none
        with pytest.raises(TransferError):
            await two.source.transport.connect(two.destination.key, timeout=2.0)
        assert two.source.transport.path(two.destination.key) is None


FOUR = array.array("I", [0, 1, 2, 3]).tobytes()
FETCHES: list[dict[str, Any]] = [
    {"blocks": FOUR[:-1]},
    {"blocks": FOUR[:-4] + b"\xff\xff\xff\xff"},
    {"names": b"123"},
    {"start": -4},
    {"start": 3},
    {"start": 1 << 62},
    {"layers": (-5, 1 << 40)},
    {"layers": (2, 1)},
    {"entry": -1},
    {"entry": 1 << 40},
    {"number": -1},
    {"part": -7},
    {"sums": ((-1, 1, 0),)},
    {"sums": ((0, 1 << 40, 0),)},
    {"sums": ((0, 1, -1),)},
]


@pytest.mark.parametrize("fields", FETCHES, ids=str)
async def test_announcements_that_make_no_sense_cost_their_attempt_only(
    fields: dict[str, Any],
) -> None:
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    async with world("shm") as two:
        ours, theirs = await two.connect()
        assert isinstance(ours, PullPath)
        sink, other = RecordingTransferSink(), RecordingTransferSink()
        grant = theirs.grant(order(range(4), 16), sink)
        beside = theirs.grant(order(range(4, 8), 16), other)
        ticket = grant.ticket
        fetch = _Fetch(
            slot=ticket.slot,
            generation=ticket.generation,
            attempt=ticket.attempt,
            part=0,
            entry=0,
            number=1,
            start=0,
            layers=(0, 3),
            blocks=FOUR,
        )
        ours._send(msgspec.structs.replace(fetch, **fields))
        await sink.until(lambda s: bool(s.failed))
        assert not sink.parts
        assert not problems
        assert theirs.down is None, "the path goes on"
        assert not other.failed
        await grant.revoke(timeout=5)
        await beside.revoke(timeout=5)


async def test_a_part_in_endless_pieces_ends_the_path() -> None:
    async with world("shm") as two:
        ours, theirs = await two.connect()
        assert isinstance(ours, PullPath)
        sink = RecordingTransferSink()
        ticket = theirs.grant(order(range(4), 16), sink).ticket
        for _ in range(2000):
            ours._send(
                _Fetch(
                    slot=ticket.slot,
                    generation=ticket.generation,
                    attempt=ticket.attempt,
                    part=0,
                    entry=0,
                    number=1,
                    start=0,
                    layers=(0, 3),
                    blocks=FOUR,
                    more=True,
                )
            )
            await asyncio.sleep(0)
        await sink.until(lambda s: bool(s.failed))
        assert theirs.down is not None


SIZES = [0, 1, 2, 3, 7, 8, 16, 1 << 12, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1]


def a_layout(rng: Random) -> RankKvLayout:
    """What the checks of a record let through, however mad."""
    honest = layouts(2, 1)[0]
    wild = {
        "layers": rng.choice([1, 3, 1 << 14]),
        "first_layer": rng.choice([0, 1, 1 << 14]),
        "heads": rng.choice([1, 2, 3, 1 << 14]),
        "tp": rng.choice([1, 2, 3, 1 << 10]),
        "rank": rng.choice([0, 1, 1 << 10]),
        "tokens": rng.choice([1, 4, 1 << 16]),
        "dim": rng.choice([1, 8, 1 << 16]),
        "itemsize": rng.choice([1, 2, 16]),
    }
    names = rng.sample(sorted(wild), rng.randint(0, 3))
    return msgspec.structs.replace(honest, **{name: wild[name] for name in names})


def a_control(rng: Random, backend: str) -> TransferControl:
    def size() -> int:
        return rng.choice(SIZES)

    regions = tuple(
        RegionCard(
            layout=a_layout(rng),
            blocks=rng.choice([1, 8, 1 << 20]),
            address=size(),
            keys=tuple(rng.randrange(1 << 32) for _ in range(rng.randint(0, 2))),
        )
        for _ in range(rng.choice([0, 1, 1, 1, 2, 64]))
    )
    good = msgspec.msgpack.encode([[1, 2]] if backend == "fake" else ["all", False])
    wild = rng.choice([*DETAILS, rng.randbytes(rng.randint(0, 40))])
    details = rng.choice([good, wild])
    slot, generation = rng.randrange(1 << 12), rng.randrange(1 << 32)
    controls: list[TransferControl] = [
        PathHello(backend=backend, epoch=1, path=size(), regions=regions, details=details),
        PathHello(backend="other", epoch=size(), path=size(), regions=regions, details=details),
        PathWelcome(epoch=size(), path=size(), regions=regions, details=details),
        PathReady(size()),
        StopTicket(size(), slot, generation),
        ControlDone(),
        PathGone(size(), "x" * 500),
        BackendProbe(size()),
        BackendOffers({"tcp": ("",)}, {}),
    ]
    return rng.choice(controls)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("backend", ["fake", "shm", "tcp"])
async def test_no_control_brings_a_transport_down(backend: str, seed: int) -> None:
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    rng = Random(f"{backend} {seed}")
    async with world(backend) as two:
        _, theirs = await two.connect()
        peer = two.source.key
        for _ in range(40):
            control = a_control(rng, backend)
            if isinstance(control, PathGone):
                control = PathGone(99, control.reason)  # else it does what it says
            with contextlib.suppress(TransferError):
                await two.destination.transport.answer(peer, control)
        assert theirs.down is None
        await asyncio.sleep(0)
        assert not problems


FRAMES: list[dict[str, Any]] = [
    {"slot": -1},
    {"slot": 1 << 62},
    {"generation": -1},
    {"attempt": -9},
    {"epoch": 1 << 62},
    {"part": -1},
    {"part": 1 << 62},
    {"place": -1},
    {"place": 1 << 62},
    {"count": -1},
    {"count": 1 << 62},
    {"layers": (-9, 1)},
    {"layers": (3, 0)},
    {"checked": (-5, 1 << 62)},
]


@pytest.mark.parametrize("fields", FRAMES, ids=str)
async def test_frames_that_make_no_sense_write_nothing(fields: dict[str, Any]) -> None:
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    async with world("tcp") as two:
        ours, theirs = await two.connect()
        assert isinstance(ours, TcpPath)
        sink = RecordingTransferSink()
        grant = theirs.grant(order(range(4), 16), sink)
        ticket = grant.ticket
        size = ours.out.size(BlockMapping(0, (0, 1, 2, 3), b"", (0, 3)))
        frame = _Data(
            slot=ticket.slot,
            generation=ticket.generation,
            attempt=ticket.attempt,
            epoch=ticket.epoch,
            part=0,
            place=0,
            count=4,
            layers=(0, 3),
            last=True,
            checked=(0, size),
        )
        record = _encode(msgspec.structs.replace(frame, **fields))
        bulk = ours._out
        assert bulk is not None
        ours._queue.put(lambda: bulk.send(record, [memoryview(bytes(size))], (0, size)))
        if not fields.keys() & {"slot", "generation", "part"}:
            await sink.until(lambda s: bool(s.failed))
        await asyncio.sleep(0.05)
        assert not problems
        assert fields.keys() == {"part"} or two.destination.holds({}, ())
        await theirs.close("the end")
