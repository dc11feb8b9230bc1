"""A source in a process of its own, for tests that kill it: `python -m … shm|tcp|cuda_ipc`.

It takes what its transport is asked from stdin and answers on stdout, as frames of a length and
msgpack: a control record, or a ticket, whose blocks it then delivers, one part each, over and over.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from random import Random
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import LinkLost, PdserveError
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.transfer import TransferControl, TransferTicket
from pdserve.testing.device_memory import DeviceMemory
from pdserve.testing.kv_oracle import layouts
from pdserve.testing.transfer_support import TransferNode, Waiter, host_memory
from pdserve.transfer.base import KvPart
from pdserve.transfer.cuda.nvidia import NvidiaDriver, unavailable_reason
from pdserve.transfer.same_host.cuda_ipc import CudaIpcTransport
from pdserve.transfer.same_host.shm import ShmTransport
from pdserve.transfer.tcp.transport import TcpTransport
from tests.support.fake_cuda import FakeCuda

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.transfer import RankKvLayout
    from pdserve.transfer.base import CallPeer, KvPath, KvTransport, Region
    from pdserve.transfer.cuda.driver import CudaDriver

SOURCE = NodeLife(NodeId("p"), 1)
DESTINATION = NodeLife(NodeId("d"), 2)
BLOCKS = 64
DRIVER: CudaDriver = NvidiaDriver() if unavailable_reason() is None else FakeCuda(Random(1))
"""The GPU, or what plays one."""


def big() -> Sequence[RankKvLayout]:
    """Blocks large enough for a kill to find one half done."""
    return layouts(4, 2, layers=4, tokens=16, dim=64)


def side_of(kind: str, key: NodeLife) -> TransferNode:
    """One end, with its pools."""
    if kind != "cuda_ipc":
        side = TransferNode(key, big(), BLOCKS, host_memory)
    else:
        side = TransferNode(
            key, big(), BLOCKS, lambda _, blocks, size: DeviceMemory(DRIVER, blocks, size)
        )
    side.allocate()
    return side


def make(kind: str, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
    if kind == "shm":
        return ShmTransport(key.node, key.epoch, regions, ask)
    if kind == "cuda_ipc":
        return CudaIpcTransport(key.node, key.epoch, regions, ask, driver=DRIVER)
    return TcpTransport(key.node, key.epoch, regions, ask, host="127.0.0.1")


async def read(stream: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack("<I", await stream.readexactly(4))
    return await stream.readexactly(size)


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


async def main(kind: str) -> None:
    async def nobody(peer: NodeLife, control: TransferControl, timeout: float) -> TransferControl:
        raise LinkLost("this process asks nothing")

    side = side_of(kind, SOURCE)
    side.fill({block: block for block in range(BLOCKS)})
    side.transport = make(kind, SOURCE, side.regions, nobody)
    stdin = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    tasks = set()
    while True:
        body = await read(stdin)
        if body[:1] == b"T":
            path = side.transport.path(DESTINATION)
            assert path is not None
            ticket = msgspec.msgpack.decode(body[1:], type=TransferTicket)
            tasks.add(asyncio.create_task(flood(path, ticket)))
            continue
        control = msgspec.msgpack.decode(body[1:], type=TransferControl)
        answer = await side.transport.answer(DESTINATION, control)
        sys.stdout.buffer.write(framed(msgspec.msgpack.encode(answer)))
        sys.stdout.buffer.flush()


async def flood(path: KvPath, ticket: TransferTicket) -> None:
    """Every block of the ticket, again and again, under new numbers."""
    with contextlib.suppress(PdserveError):
        for number in range(4000):
            waiter = Waiter()
            block = number % len(ticket.blocks)
            path.deliver(ticket, KvPart(number, 16 * block, [block], (0, 4)), waiter)
            if number % 16 == 15:
                await waiter.wait()


if __name__ == "__main__":
    with contextlib.suppress(asyncio.IncompleteReadError):
        asyncio.run(main(sys.argv[1]))
