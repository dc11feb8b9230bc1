"""Follows SGLang's KV events over its sockets, and asks for batches that were lost on the way.

SGLang publishes batches with running numbers and keeps the last ones for replay. The feed runs as
one coroutine and hands over batches in order. It knows neither blocks nor hashes.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from typing import TYPE_CHECKING, Any, Protocol

from pdserve_engines.sglang.events import END, BatchOrder, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds

__all__ = ["EventFeed", "EventSockets", "zmq_sockets"]

_log = logging.getLogger(__name__)

REPLAY_TIMEOUT: Seconds = 5.0
"""Seconds for one replay: SGLang answers between two of its own batches, within 0.1 s."""


class _Socket(Protocol):
    """What the feed uses of an asynchronous ZeroMQ socket."""

    async def recv_multipart(self) -> list[bytes]: ...
    async def send_multipart(self, frames: list[bytes]) -> object: ...


class EventSockets(Protocol):
    """The two sockets of a feed."""

    @property
    def live(self) -> _Socket:
        """Subscribed to everything: topic, number, payload."""

    @property
    def replay(self) -> _Socket:
        """To the replay's router: an empty frame comes first."""

    def close(self) -> None: ...


class EventFeed:
    """One subscription. `on_batch` gets the events of each batch, in order; `on_lost` is called
    before the first batch after a gap that could not be filled."""

    def __init__(
        self,
        sockets: EventSockets,
        on_batch: Callable[[list[dict[str, Any]]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._sockets = sockets
        self._on_batch = on_batch
        self._on_lost = on_lost
        self.order = BatchOrder()

    async def run(self) -> None:
        """Follow until cancelled. Begins with a replay: the first batches may have been published
        before the subscription had reached the publisher."""
        try:
            await self._replay()
            while True:
                _, number, payload = await self._sockets.live.recv_multipart()
                at = int.from_bytes(number, "big")
                if self.order.gap(at):
                    await self._replay()
                self._take(at, payload)
        finally:
            self._sockets.close()

    async def _replay(self) -> None:
        """Take what the publisher still has from the next number on."""
        start = self.order.next.to_bytes(8, "big")
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT):
                await self._sockets.replay.send_multipart([b"", start])
                while True:
                    _, _, number, payload = await self._sockets.replay.recv_multipart()
                    if number == END:
                        return
                    self._take(int.from_bytes(number, "big"), payload)
        except TimeoutError:
            _log.warning("SGLang has not replayed its KV events within %g s", REPLAY_TIMEOUT)

    def _take(self, number: int, payload: bytes) -> None:
        lost = self.order.gap(number)
        if not self.order.due(number):
            return
        try:
            events = decode(payload)
        except ValueError as error:
            _log.warning("SGLang: %s", error)
            lost, events = True, []
        if lost:
            _log.warning("KV events of SGLang were lost; routers forget this worker's blocks")
            self._on_lost()
        self._on_batch(events)


class _ZmqSockets:
    def __init__(self, live: Any, replay: Any) -> None:
        self.live = live
        self.replay = replay

    def close(self) -> None:
        self.live.close(linger=0)
        self.replay.close(linger=0)


def zmq_sockets(live: str, replay: str) -> EventSockets:
    """Connect to SGLang's endpoints; call it in the loop that uses the sockets. SGLang itself needs
    pyzmq, so it is there."""
    zmq: Any = importlib.import_module("zmq")
    context: Any = importlib.import_module("zmq.asyncio").Context.instance()
    subscriber = context.socket(zmq.SUB)
    # Unbounded: the feed is quick, and what is dropped here must be asked for again.
    subscriber.set_hwm(0)
    subscriber.subscribe(b"")
    subscriber.connect(live)
    router = context.socket(zmq.DEALER)
    router.connect(replay)
    return _ZmqSockets(subscriber, router)
