"""An engine that says how long its prompts took, so that routers learn what a prompt costs.

In virtual time a step is computed at one moment: the core measures nothing. Here a prompt's work is
said to be its part of a step, more for a longer one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tests.worlds.faulty_engine import FaultyEngine

if TYPE_CHECKING:
    from pdserve.engine.port import Handle, RemotePrefillSink, TokenSink
    from pdserve.ids import Seconds
    from pdserve.messages.request import FirstTokenStats, GenerateRequest, TokenDelta

__all__ = ["PacedEngine"]


class PacedEngine(FaultyEngine):
    """See above."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self._lengths: dict[Handle, int] = {}
        """Tokens of the prompts that are computed."""

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """See `VirtualTimeEngine`."""
        handle = super().submit(request, sink)
        self._lengths[handle] = len(request.prompt)
        return handle

    def submit_remote(self, request: GenerateRequest, sink: RemotePrefillSink) -> Handle:
        """See `VirtualTimeEngine`."""
        handle = super().submit_remote(request, sink)
        self._lengths[handle] = len(request.prompt)
        return handle

    def _forget(self, handle: Handle) -> TokenSink | None:
        self._lengths.pop(handle, None)
        return super()._forget(handle)

    def _deliver(self, delta: TokenDelta) -> None:
        if delta.started is not None:
            delta = replace(delta, started=self._timed(delta.started, delta.handle))
        super()._deliver(delta)

    def _timed(self, started: FirstTokenStats, handle: int) -> FirstTokenStats:
        length = self._lengths.get(handle, 0) - started.cached_tokens - started.received_tokens
        work = self._work(max(1, length))
        return replace(started, work_seconds=work)

    def _work(self, tokens: int) -> Seconds:
        return self._pace * (0.5 + 0.5 * tokens / self._spec.max_batch_tokens)
