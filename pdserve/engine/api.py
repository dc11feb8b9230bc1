"""The engine port: the one interface through which a worker drives any engine.

The worker's node process holds an `Engine`; computing happens elsewhere (a child process, another
program, another machine). So nothing here blocks: `submit` and `abort` only post, results come back
as calls on the event loop's thread.

Engines that bring their own scheduler implement `Engine` directly. Engines driven by pdserve's
scheduler implement `pdserve.engine.executor.Executor` and get this port from `CoreClient`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineCapabilities, EngineStats, Progress
    from pdserve.messages.kv import KvEvent
    from pdserve.messages.request import GenerateRequest, TokenDelta

Handle = int
"""One submission at one engine; never reused during the engine object's life."""


class EngineState(enum.Enum):
    """Life of an engine as its owner sees it, for `/health` and metrics."""

    NEW = "new"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    """It died and comes back: `submit` raises `NotReady`."""
    FAILED = "failed"
    """It never became ready, or died too often: final, `submit` raises `EngineDied`."""
    STOPPED = "stopped"


class TokenSink(Protocol):
    """Receives what one submission produces, on the event loop's thread, in order.

    Each choice ends with a delta that carries `finish`; or the whole submission ends with one
    `on_error`. After an `abort` nothing is called any more.
    """

    def on_delta(self, delta: TokenDelta) -> None:
        """Tokens of one choice. Must not block and must not raise."""
        ...

    def on_error(self, error: PdserveError) -> None:
        """The submission failed; no call follows."""
        ...


class Engine(Protocol):
    """One engine as the node sees it."""

    @property
    def capabilities(self) -> EngineCapabilities | None:
        """None until the engine is ready, and again while it restarts."""
        ...

    async def start(self, on_progress: Callable[[Progress], None] | None = None) -> None:
        """Load; returns when ready.

        Errors: `ConfigError` and its kin if it can never work, `EngineDied` if it broke down.
        Cancellation: stops the half-started engine.
        """
        ...

    async def stop(self) -> None:
        """Abort everything, free everything; every sink gets its `on_error`. Idempotent."""
        ...

    async def drain(self, timeout: Seconds) -> bool:
        """Take nothing new, let what runs finish; False if `timeout` came first."""
        ...

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """Post a request.

        Errors: `NotReady`, `Draining`, `Overloaded` at once, `EngineDied` from an engine that was
        given up; everything later goes to the sink.
        """
        ...

    def abort(self, handle: Handle) -> None:
        """Drop a submission: its blocks are free within one step. Unknown handles are ignored."""
        ...

    def statistics(self) -> EngineStats:
        """The newest snapshot at hand; at most about a second old while the engine works."""
        ...

    def rekey(self, hash_secret: bytes) -> None:
        """Name blocks with this secret from now on, in every later life, too. What is cached under
        other names is forgotten, and reported as cleared."""
        ...

    def subscribe_kv(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        """Call `listener` with every later batch of KV events, in order."""
        ...
