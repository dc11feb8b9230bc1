"""Discards the output of a request that only fills a worker's KV cache."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.errors import DeadlineExceeded, PdserveError

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.messages.request import TokenDelta

__all__ = ["PrewarmSink"]


class PrewarmSink:
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
