"""What a peer says is judged, not believed: whatever it is, a node refuses it and lives on."""

from __future__ import annotations

import array
import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.errors import TransferError
from pdserve.testing.kv_oracle import layouts
from pdserve.testing.transfer_support import RecordingSink, ends, order
from pdserve.transfer.fake import FakeFabric, FakeTransport
from pdserve.transfer.pull import PullPath, _Fetch
from pdserve.transfer.shm import ShmTransport
from pdserve.transfer.tcp import TcpTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.transfer import Control, Hello, Welcome
    from pdserve.testing.transfer_support import Ends
    from pdserve.transfer.base import Ask, PeerKey, Region, Transport


def world(backend: str) -> Any:
    fabric = FakeFabric(Random(1))

    def make(key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
        if backend == "fake":
            return FakeTransport(key.node, key.epoch, regions, ask, fabric, key=key)
        if backend == "shm":
            return ShmTransport(key.node, key.epoch, regions, ask)
        return TcpTransport(key.node, key.epoch, regions, ask, host="127.0.0.1")

    return ends(make, layouts(2, 1), layouts(2, 1), blocks=8)


DETAILS = [
    b"",
    b"\xff\x00",
    msgspec.msgpack.encode("another version"),
    msgspec.msgpack.encode([1, 2, 3, 4, 5, 6]),
    msgspec.msgpack.encode(["h\0st", 1 << 40, [b"token"], "all"]),
    msgspec.msgpack.encode(["h" * 300, 1, [b"token"], "all"]),
    msgspec.msgpack.encode([[1, 2, 3, 4, 5]]),
]


def changing(two: Ends, record: str, details: bytes) -> None:
    """From now on Hello, or Welcome, has these details on its way."""
    transport: Any = two.source.transport
    real = transport.ask

    async def ask(peer: PeerKey, control: Control, timeout: float) -> Control:
        if record == "Hello" and type(control).__name__ == "Hello":
            control = msgspec.structs.replace(_hello(control), details=details)
        answer = await real(peer, control, timeout)
        if record == "Welcome" and type(answer).__name__ == "Welcome":
            answer = msgspec.structs.replace(_welcome(answer), details=details)
        return answer

    transport.ask = ask


def _hello(control: Any) -> Hello:
    return control


def _welcome(control: Any) -> Welcome:
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
            return  # its Welcome has none
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
        sink, other = RecordingSink(), RecordingSink()
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
        sink = RecordingSink()
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
