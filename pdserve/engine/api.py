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
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.engine import EngineCapabilities, EngineStats, PathState, Progress
    from pdserve.messages.handoff import Handoff, TransferAnswer, TransferAsk
    from pdserve.messages.kv import KvEvent
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.transfer import Ticket

    Answered = Callable[[TransferAnswer | PdserveError], None]
    """Takes the answer to a `TransferAsk`, or what went wrong; called once at most."""
    AskPeer = Callable[[NodeId, Epoch, TransferAsk, Seconds, Answered], None]
    """Asks the transports of that life of a node, within so many seconds. It must not raise."""

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


class RemoteSink(TokenSink, Protocol):
    """Hears of one submission whose prompt is prefilled elsewhere: first how that goes, then, from
    `activate` or `prefill_here` on, what every `TokenSink` hears."""

    def on_admitted(self, cached_tokens: int) -> None:
        """There is room; so many leading tokens are there already. Once."""
        ...

    def on_opened(self, attempt: int, ticket: Ticket) -> None:
        """The attempt's blocks may be filled by whoever has the ticket."""
        ...

    def on_attempt_lost(self, attempt: int, error: PdserveError) -> None:
        """Nothing came of the attempt; the next one may be opened."""
        ...


class PrefillSink(Protocol):
    """Hears of one prompt that is computed here for a peer. Ends by `on_sent` or `on_error`; after
    an `abort` nothing is called any more."""

    def on_prefilled(self, handoff: Handoff) -> None:
        """It has been computed; all its parts are sent or on their way. Once."""
        ...

    def on_sent(self) -> None:
        """Every part has arrived; nothing is held any more."""
        ...

    def on_error(self, error: PdserveError) -> None:
        """It could not be computed, or not be brought to the peer."""
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

    # ------------------------------------------------------------------ handing prompts over
    #
    # An engine without `capabilities.transfers` refuses `submit_remote` and `prefill` by
    # `TransferRefused`; the rest does nothing. Handles that have ended are ignored.

    def submit_remote(self, request: GenerateRequest, sink: RemoteSink) -> Handle:
        """Post a request whose prompt is prefilled elsewhere: room is set aside for it, and
        `on_admitted` follows. Errors: as `submit`, and `TransferRefused`."""
        ...

    def open_attempt(self, handle: Handle, attempt: int, node: NodeId, epoch: Epoch) -> None:
        """Let that life of a node fill its blocks: `on_opened` or `on_attempt_lost` follows. An
        attempt that is open is given up first."""
        ...

    def activate(self, handle: Handle, attempt: int, handoff: Handoff) -> None:
        """Go on with what the attempt has brought, once all of it is here: deltas follow, or
        `on_attempt_lost`."""
        ...

    def give_up(self, handle: Handle, attempt: int) -> None:
        """Want nothing more of an attempt. Its blocks come back when nothing can reach them."""
        ...

    def prefill_here(self, handle: Handle) -> None:
        """Compute the prompt here after all."""
        ...

    def prefill(
        self,
        request: GenerateRequest,
        ticket: Ticket,
        node: NodeId,
        epoch: Epoch,
        sink: PrefillSink,
    ) -> Handle:
        """Compute a prompt and bring its KV to the blocks of a ticket of that life of a node.
        `abort` withdraws it. Errors: as `submit`, and `TransferRefused`."""
        ...

    def attach(self, node: NodeId, epoch: Epoch) -> None:
        """Move KV in the name of this life of our node from now on; what was begun in an earlier
        one ends. It holds for every later life of the engine, too."""
        ...

    def peer_gone(self, node: NodeId, epoch: Epoch) -> None:
        """That life of a node is over: nothing it could write may be trusted to end by itself."""
        ...

    def transfer_call(self, node: NodeId, epoch: Epoch, ask: TransferAsk, reply: Answered) -> None:
        """That life of a node asks this engine's transports. `reply` is called once, maybe at
        once, and with `EngineDied` if the engine dies over it."""
        ...

    def on_transfer(self, ask: AskPeer) -> None:
        """How this engine's transports reach their counterparts; before `start`."""
        ...

    def paths(self) -> Sequence[PathState]:
        """All paths there are, as last told."""
        ...
