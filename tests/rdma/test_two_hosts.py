"""Two machines, one process on each: control over TCP, bytes by RDMA.

The same file runs on both. The second machine's test asks, the first one's serves until it is told
to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.errors import LinkLost, TransferError
from pdserve.ids import NodeLife
from pdserve.messages.transfer import TransferControl, TransferTicket
from pdserve.testing.kv_oracle import layouts
from pdserve.testing.transfer_support import RecordingTransferSink, TransferNode, deliver, order
from pdserve.transfer.base import KvPart
from tests.rdma.conftest import DEVICES, sent, transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.transfer.base import Grant

HERE = os.environ.get("RDMA_VM_HOST", "")
PORT = 18_600
BLOCKS = 64
SOURCE: Any = NodeLife("p", 1)  # type: ignore[arg-type]
DESTINATION: Any = NodeLife("d", 2)  # type: ignore[arg-type]
PATIENCE = 60.0

pytestmark = pytest.mark.skipif(
    os.environ.get("RDMA_VM_HOSTS") != "2", reason="needs two virtual machines"
)


class Question(msgspec.Struct, frozen=True):
    """From one machine to the other."""

    kind: str
    control: TransferControl | None = None
    number: int = 0


class Answer(msgspec.Struct, frozen=True):
    """Back."""

    control: TransferControl | None = None
    ticket: TransferTicket | None = None
    good: bool = False
    error: str = ""


async def read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(len(data).to_bytes(4, "big") + data)


class Machine:
    """This one: its side of the transfer, and how it is asked."""

    def __init__(self) -> None:
        addresses = os.environ["RDMA_VM_ADDRESSES"].split()
        mine = int(HERE)
        self.address, self.other = addresses[mine], addresses[1 - mine]
        key, layout = (DESTINATION, layouts(4, 2)) if mine == 0 else (SOURCE, layouts(4, 4))
        self.peer = SOURCE if mine == 0 else DESTINATION
        self.side = TransferNode(key, layout, BLOCKS)
        self.side.allocate()
        self.side.transport = transport(key, self.side.regions, self.ask_control, devices=DEVICES)
        self.ended = asyncio.Event()
        self.grant: Grant | None = None
        self.sink = RecordingTransferSink()

    async def ask_control(
        self, peer: NodeLife, control: TransferControl, timeout: float
    ) -> TransferControl:
        answer = await self.ask(Question("control", control))
        if answer.control is None:
            raise TransferError(answer.error)
        return answer.control

    async def ask(self, question: Question) -> Answer:
        """A connection per question; the other machine may still be starting."""
        for _ in range(600):
            try:
                reader, writer = await asyncio.open_connection(self.other, PORT)
                break
            except OSError:
                await asyncio.sleep(0.1)
        else:
            raise LinkLost("the other machine does not answer")
        write(writer, msgspec.msgpack.encode(question))
        try:
            async with asyncio.timeout(PATIENCE):
                return msgspec.msgpack.decode(await read(reader), type=Answer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question = msgspec.msgpack.decode(await read(reader), type=Question)
        try:
            answer = await self.answer(question)
        except TransferError as error:
            answer = Answer(error=error.message)
        write(writer, msgspec.msgpack.encode(answer))
        await writer.drain()
        writer.close()

    async def answer(self, question: Question) -> Answer:
        match question.kind:
            case "control":
                assert question.control is not None
                return Answer(await self.side.transport.answer(self.peer, question.control))
            case "grant":
                path = self.side.transport.path(SOURCE)
                assert path is not None
                self.sink = RecordingTransferSink()
                self.side.poison(range(BLOCKS))
                self.grant = path.grant(order(range(BLOCKS), 4 * BLOCKS), self.sink)
                return Answer(ticket=self.grant.ticket)
            case "arrived":
                await self.sink.until(lambda sink: len(sink.parts) == question.number)
                assert self.grant is not None
                self.grant.finish()
                whole = {block: block for block in range(BLOCKS)}
                return Answer(good=self.side.holds(whole, range(3)))
            case "revoke":
                assert self.grant is not None
                await self.grant.revoke(timeout=PATIENCE)
                self.side.poison(range(BLOCKS))
                await asyncio.sleep(0.5)
                return Answer(good=self.side.holds({}, range(3)))
            case "failed":
                await self.sink.until(lambda sink: bool(sink.failed))
                return Answer(good=True, error=self.sink.failed[0].message)
            case _:
                self.ended.set()
                return Answer(good=True)


@contextlib.asynccontextmanager
async def machine() -> AsyncIterator[Machine]:
    this = Machine()
    server = await asyncio.start_server(this.serve, this.address, PORT)
    try:
        yield this
    finally:
        await this.side.transport.close()
        server.close()
        await server.wait_closed()
        this.side.free()


async def test_bytes_fences_and_ends_between_two_machines() -> None:
    before = sent(DEVICES[0])
    async with machine() as this:
        if HERE == "0":
            async with asyncio.timeout(4 * PATIENCE):
                await this.ended.wait()
        else:
            await ask_for_everything(this)
    assert sent(DEVICES[0]) - before >= 32, "the bytes went another way"


async def ask_for_everything(this: Machine) -> None:
    """The source's side."""
    this.side.fill({block: block for block in range(BLOCKS)})
    path = await this.side.transport.connect(DESTINATION, timeout=PATIENCE)
    parts = [KvPart(n, 32 * n, range(8 * n, 8 * n + 8), (0, 3)) for n in range(8)]

    ticket = (await this.ask(Question("grant"))).ticket
    assert ticket is not None
    waiters = [deliver(path, ticket, part) for part in parts]
    assert [await waiter.wait() for waiter in waiters] == [None] * 8
    assert (await this.ask(Question("arrived", number=8))).good

    ticket = (await this.ask(Question("grant"))).ticket
    assert ticket is not None
    waiters = [deliver(path, ticket, part) for part in parts]
    assert (await this.ask(Question("revoke"))).good, "written to after the fence"
    for waiter in waiters:
        await waiter.wait()

    ticket = (await this.ask(Question("grant"))).ticket
    assert ticket is not None
    await path.close("the test")
    answer = await this.ask(Question("failed"))
    assert "the test" in answer.error
    assert "r-1/0" in answer.error
    await this.ask(Question("end"))
