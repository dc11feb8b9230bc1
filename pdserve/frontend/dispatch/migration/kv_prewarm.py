"""Sends a request that only fills a worker's KV cache; its output is discarded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.errors import DeadlineExceeded, LinkLost, PdserveError
from pdserve.frontend.dispatch.worker_stream import ACCEPT_TIMEOUT

if TYPE_CHECKING:
    from pdserve.frontend.dispatch.worker_streams import WorkerStreams
    from pdserve.ids import NodeLife, Seconds
    from pdserve.messages.request import GenerateRequest, TokenDelta

__all__ = ["prewarm"]


async def prewarm(
    workers: WorkerStreams, life: NodeLife, request: GenerateRequest, timeout: Seconds
) -> None:
    """Runs a prewarm request at the worker until it ends. Errors: those of the worker,
    `DeadlineExceeded`. Cancellation: the request is cancelled."""
    stream = await workers.stream(life)
    if stream is None:
        raise LinkLost(f"worker {life.node} has restarted", sent=False)
    sink = _PrewarmSink(asyncio.get_running_loop())
    sequence = await stream.open(
        request, 0, sink, lambda outcome: None, timeout=min(timeout, ACCEPT_TIMEOUT)
    )
    try:
        await sink.wait(timeout)
    finally:
        sequence.cancel()


class _PrewarmSink:
    """The sink of a prewarm request; drops all output."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._done: asyncio.Future[PdserveError | None] = loop.create_future()

    def on_delta(self, delta: TokenDelta) -> None:
        if delta.finish is not None:
            self._set(None)

    def on_error(self, error: PdserveError) -> None:
        self._set(error)

    def _set(self, error: PdserveError | None) -> None:
        if not self._done.done():
            self._done.set_result(error)

    async def wait(self, timeout: Seconds) -> None:
        """Waits until the request has ended. Errors: the one it ended with, `DeadlineExceeded`
        after `timeout` seconds."""
        await asyncio.wait({self._done}, timeout=timeout)
        if not self._done.done():
            raise DeadlineExceeded(f"the prewarm request took longer than {timeout:.1f} s")
        error = self._done.result()
        if error is not None:
            raise error
