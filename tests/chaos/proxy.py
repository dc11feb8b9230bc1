"""A TCP proxy with faults: what lies between two roles, and gets slow, stalls or breaks.

It runs on a thread with a loop of its own; a test turns its knobs from outside. Delays come from a
seed, so that a run can be repeated as far as real time allows.
"""

from __future__ import annotations

import asyncio
import random
import threading
from typing import TYPE_CHECKING, Any

from tests.chaos.cluster import free_port
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Coroutine

_CHUNK = 4096
_HEARD = 64 * 1024
"""Bytes remembered of what the first dialler said."""
_BREATH = 0.001
"""Seconds between pieces of a piece, so that they travel alone."""


class Proxy:
    """Use with `with`; hands on to `target` what comes to `address`."""

    def __init__(self, seed: int = 0, host: str = "127.0.0.1", *, delay: float = 0.0) -> None:
        """`delay`: seconds, on the average, that each piece is held; see `target`."""
        self.address = f"{host}:{free_port(host)}"
        self.target = f"127.0.0.1:{free_port()}"
        """Where somebody is to listen, if nobody says otherwise."""
        self.delay = delay
        self.piece = _CHUNK
        """Bytes that are handed on at a time, each for itself."""
        self.heard = bytearray()
        """What the first dialler said."""
        self.carried = 0
        """Bytes, both ways."""
        self.cuts = 0
        """Connections that were broken on purpose."""
        self._random = random.Random(seed)
        self._pairs: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *exception: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    # ------------------------------------------------------------------ knobs

    def stall(self) -> None:
        """Hand on nothing, in either direction, until `resume`; connections stay open."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def resume(self) -> None:
        """See `stall`."""
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Break every connection in the middle of the next piece that it carries."""

        def cut() -> None:
            for task in self._pairs:
                self._doomed.add(task)

        self._loop.call_soon_threadsafe(cut)

    # ------------------------------------------------------------------ inside

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    async def _start(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._doomed: set[asyncio.Task[None]] = set()
        host, _, port = self.address.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port), limit=_CHUNK)

    async def _stop(self) -> None:
        self._server.close()
        for task in tuple(self._pairs):
            task.cancel()
        if self._pairs:
            await asyncio.wait(tuple(self._pairs))
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pairs.add(task)
        first = not self.heard
        host, _, port = self.target.rpartition(":")
        there: asyncio.StreamWriter | None = None
        try:
            back, there = await asyncio.open_connection(host, int(port), limit=_CHUNK)
            pumps = (
                asyncio.ensure_future(self._pump(task, reader, there, remember=first)),
                asyncio.ensure_future(self._pump(task, back, writer, remember=False)),
            )
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the target is not there, or the test is over: the dialler sees its end
        finally:
            self._pairs.discard(task)
            self._doomed.discard(task)
            for one in (writer, there):
                if one is not None:
                    one.transport.abort()

    async def _pump(
        self,
        pair: asyncio.Task[None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        remember: bool,
    ) -> None:
        while data := await reader.read(_CHUNK):
            await self._open.wait()
            if self.delay:
                await asyncio.sleep(self._random.uniform(0, 2 * self.delay))
            if remember and len(self.heard) < _HEARD:
                self.heard += data
            if pair in self._doomed:
                self.cuts += 1
                writer.write(data[: len(data) // 2])
                await writer.drain()
                return
            size = self.piece  # once: it may change meanwhile
            for at in range(0, len(data), size):
                writer.write(data[at : at + size])
                await writer.drain()
                if size < len(data):
                    await asyncio.sleep(_BREATH)
            self.carried += len(data)
