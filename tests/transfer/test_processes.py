"""The source is a process that is killed, or stopped and woken again: this node's fences hold."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.errors import PathLost
from pdserve.messages.transfer import TransferControl
from pdserve.testing.transfer_support import RecordingTransferSink, order
from tests.transfer import peer_process as peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.ids import NodeLife
    from pdserve.testing.transfer_support import TransferNode
    from pdserve.transfer.base import Grant

WHOLE = range(4)


class Killable:
    """The source's process, and this process's end of a path to it."""

    def __init__(self, process: asyncio.subprocess.Process, side: TransferNode) -> None:
        self.process = process
        self.side = side

    async def ask(self, to: NodeLife, control: TransferControl, timeout: float) -> TransferControl:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(peer.framed(b"C" + msgspec.msgpack.encode(control)))
        async with asyncio.timeout(timeout):
            return msgspec.msgpack.decode(await peer.read(stdout), type=TransferControl)

    async def grant(self) -> tuple[Grant, RecordingTransferSink]:
        """The other process floods it; something of it has arrived."""
        path = await self.side.transport.connect(peer.SOURCE, timeout=30)
        sink = RecordingTransferSink()
        grant = path.grant(order(range(peer.BLOCKS), 16 * peer.BLOCKS), sink)
        assert self.process.stdin is not None
        self.process.stdin.write(peer.framed(b"T" + msgspec.msgpack.encode(grant.ticket)))
        await sink.until(lambda s: len(s.parts) > 3)
        return grant, sink

    async def stays_poisoned(self) -> None:
        self.side.poison(range(peer.BLOCKS))
        await asyncio.sleep(0.1)
        assert self.side.holds({}, WHOLE), "written to after the fence"


@contextlib.asynccontextmanager
async def killable(kind: str) -> AsyncIterator[Killable]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.transfer.peer_process",
        kind,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    side = peer.side_of(kind, peer.DESTINATION)
    two = Killable(process, side)
    side.transport = peer.make(kind, side.key, side.regions, two.ask)
    try:
        yield two
    finally:
        await side.transport.close()
        side.free()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["shm", "tcp", "cuda_ipc"])
async def test_a_source_that_is_killed_fails_and_is_fenced(kind: str) -> None:
    async with killable(kind) as two:
        grant, sink = await two.grant()
        two.process.kill()
        await sink.until(lambda s: bool(s.failed))
        assert isinstance(sink.failed[0], PathLost)
        assert f"transfer r-1/0 with p/1 over {kind}" in sink.failed[0].message
        await grant.revoke(timeout=10)
        await two.stays_poisoned()
        assert two.side.transport.path(peer.SOURCE) is None


@pytest.mark.parametrize("kind", ["shm", "tcp", "cuda_ipc"])
async def test_a_source_that_sleeps_and_wakes_writes_nothing_that_was_fenced(kind: str) -> None:
    async with killable(kind) as two:
        grant, sink = await two.grant()
        two.process.send_signal(signal.SIGSTOP)
        await grant.revoke(timeout=10)  # without its help
        heard = len(sink.parts)
        two.side.poison(range(peer.BLOCKS))
        two.process.send_signal(signal.SIGCONT)
        await two.stays_poisoned()
        assert len(sink.parts) == heard
        assert not sink.failed
        again, other = await two.grant()  # the path is as good as before
        await again.revoke(timeout=10)
        assert other.parts
