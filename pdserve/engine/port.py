"""Defines the engine port: the one interface through which a worker drives any engine.

The worker's node process holds one `Engine` for its whole life, and its parts call it directly: a
method is declared here and in each engine, nowhere else. The model runs elsewhere (a child process,
another program, another machine). So nothing here blocks: `submit` and `abort` only post a command,
and results come back as calls on the event loop's thread.

Engines that bring their own scheduler implement `Engine` directly. Engines driven by pdserve's
scheduler implement `pdserve.engine_core.executor.Executor` and get this port from `CoreClient`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine.kv_pulls import KvPullController
    from pdserve.errors import PdserveError
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.engine import EngineCapabilities, EngineStats, LoadProgress, PathState
    from pdserve.messages.handoff import Handoff, TransportCall, TransportReply
    from pdserve.messages.kv_events import KvEvent, Tier
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.transfer import TransferTicket

    Answered = Callable[[TransportReply | PdserveError], None]
    """Takes the reply to a `TransportCall`, or the error; called once at most."""
    AskPeer = Callable[[NodeId, Epoch, TransportCall, Seconds, Answered], None]
    """Sends a `TransportCall` to the transports of (node, epoch); the float is the timeout in
    seconds. It must not raise."""
    Dropped = Callable[[dict[Tier, int] | PdserveError], None]
    """Takes the blocks that are gone by tier, or the reason why there are none; called once."""

Handle = int
"""Number of one submission at one engine; the engine object never reuses it."""


class EngineState(enum.Enum):
    """State of an engine as its owner sees it, for `/health` and metrics."""

    NEW = "new"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    """The core died and is being started again: `submit` raises `NotReady`."""
    FAILED = "failed"
    """The core never became ready, or died too often. Final: `submit` raises `EngineDied`."""
    STOPPED = "stopped"

    @property
    def phrase(self) -> str:
        """The state as the first half of a sentence, for example "the engine is ready"."""
        verb = "has" if self is EngineState.FAILED else "is"
        return f"the engine {verb} {self.value}"


class TokenSink(Protocol):
    """Receives the output of one submission, in order, on the event loop's thread.

    Each choice ends with a delta that carries `finish`; or the whole submission ends with one
    `on_error`. No call follows an `abort`.
    """

    def on_delta(self, delta: TokenDelta) -> None:
        """Takes new tokens of one choice. Must not block and must not raise."""
        ...

    def on_error(self, error: PdserveError) -> None:
        """The submission failed; no call follows."""
        ...


class RemotePrefillSink(TokenSink, Protocol):
    """Receives the events of one submission whose prompt another worker prefills. First come the
    events below; after `activate` or `prefill_here`, those of every `TokenSink`."""

    def on_admitted(self, cached_tokens: int) -> None:
        """KV blocks are reserved; the first `cached_tokens` tokens are cached here. Called once."""
        ...

    def on_opened(self, attempt: int, ticket: TransferTicket) -> None:
        """The attempt has its blocks; the holder of `ticket` may write to them."""
        ...

    def on_attempt_lost(self, attempt: int, error: PdserveError) -> None:
        """The attempt has failed; the caller may open the next one."""
        ...


class PrefillSink(Protocol):
    """Receives the events of one prompt that this engine prefills for a peer. The last call is
    `on_sent` or `on_error`; no call follows an `abort`."""

    def on_prefilled(self, handoff: Handoff) -> None:
        """The prompt is computed; all parts of its KV are sent or being sent. Called once."""
        ...

    def on_sent(self) -> None:
        """Every part has arrived at the peer; the engine has freed the prompt's blocks."""
        ...

    def on_error(self, error: PdserveError) -> None:
        """The prompt could not be computed, or its KV could not be sent."""
        ...


class RequestEngine(Protocol):
    """Runs requests: an `Engine`, or what decides before it where a prompt is computed."""

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """Post a request.

        Errors: raises `NotReady`, `Draining`, `Overloaded`, or `EngineDied` if the engine will not
        be restarted; every later error goes to the sink.
        """
        ...

    def abort(self, handle: Handle) -> None:
        """Abort a submission: its blocks are free within one step. Ignores unknown handles."""
        ...


class Engine(RequestEngine, Protocol):
    """One engine as the worker's node process sees it."""

    @property
    def capabilities(self) -> EngineCapabilities | None:
        """None until the engine is ready, and again while it restarts."""
        ...

    async def start(self, on_progress: Callable[[LoadProgress], None] | None = None) -> None:
        """Load the engine; returns when it is ready.

        Errors: `ConfigError` or a subclass if this configuration can never work, `EngineDied` if
        the engine died while it loaded. Cancellation: stops the half-started engine.
        """
        ...

    async def stop(self) -> None:
        """Abort all submissions and free all memory; every sink gets `on_error`. Idempotent."""
        ...

    async def drain(self, timeout: Seconds) -> bool:
        """Refuse new submissions and wait for those in flight; False if `timeout` came first."""
        ...

    def stats(self) -> EngineStats:
        """The newest snapshot of the engine's stats; about a second old at most under load."""
        ...

    def rekey(self, hash_secret: bytes) -> None:
        """Hash blocks with this secret from now on, also after a restart. Cached blocks with other
        hashes are dropped, and reported as cleared."""
        ...

    def subscribe_kv(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        """Call `listener` with every later batch of KV cache events, in order."""
        ...

    # ------------------------------------------------------------------ disaggregated prefill
    #
    # An engine without `capabilities.transfers` raises `TransferRefused` from `submit_remote` and
    # `prefill`, and ignores the rest. Handles that have ended are ignored.

    def submit_remote(self, request: GenerateRequest, sink: RemotePrefillSink) -> Handle:
        """Post a request whose prompt another worker prefills: the engine reserves KV blocks, then
        calls `on_admitted`. Errors: those of `submit`, and `TransferRefused`."""
        ...

    def open_attempt(self, handle: Handle, attempt: int, node: NodeId, epoch: Epoch) -> None:
        """Let (node, epoch) fill the request's blocks; `on_opened` or `on_attempt_lost` follows.
        An attempt that is still open is aborted first."""
        ...

    def activate(self, handle: Handle, attempt: int, handoff: Handoff) -> None:
        """Start to decode with the attempt's KV as soon as all of it has arrived; deltas follow, or
        `on_attempt_lost`."""
        ...

    def give_up(self, handle: Handle, attempt: int) -> None:
        """Abort an attempt. Its blocks are free once no peer can write to them any more."""
        ...

    def prefill_here(self, handle: Handle) -> None:
        """Stop waiting for another worker and compute the prompt in this engine."""
        ...

    def prefill(
        self,
        request: GenerateRequest,
        ticket: TransferTicket,
        node: NodeId,
        epoch: Epoch,
        sink: PrefillSink,
    ) -> Handle:
        """Compute a prompt and send its KV to the ticket's blocks at (node, epoch). `abort` ends
        it. Errors: those of `submit`, and `TransferRefused`."""
        ...

    def attach(self, node: NodeId, epoch: Epoch) -> None:
        """Exchange KV as this (node, epoch) from now on, also after a restart of the engine.
        Transfers that began under an earlier epoch end."""
        ...

    def peer_gone(self, node: NodeId, epoch: Epoch, *, returns: bool = False) -> None:
        """Gossip says that (node, epoch) is dead: end its transfers and fence its writes.
        `returns`: only its engine is lost, and the same life may be asked again later."""
        ...

    def make_path(self, node: NodeId, epoch: Epoch) -> None:
        """Make the KV path to (node, epoch) before a transfer needs it, so that `paths` says its
        rate. Ignored without an engine that has transports of its own."""
        ...

    def transfer_call(
        self, node: NodeId, epoch: Epoch, ask: TransportCall, reply: Answered
    ) -> None:
        """Pass a control call of (node, epoch) to this engine's transports. `reply` is called once,
        possibly before this returns; with `EngineDied` if the engine dies first."""
        ...

    def on_transfer(self, ask: AskPeer) -> None:
        """Set the function by which this engine's transports call their peers; before `start`."""
        ...

    def paths(self) -> Sequence[PathState]:
        """State of every KV path to a peer, as of the engine's last report."""
        ...

    def drop_kv(self, owners: tuple[str, ...] | None, older: Seconds, done: Dropped) -> None:
        """Forget reusable blocks on every tier: those of prompts whose cache salts
        have one of these owners, or all;
        with `older`, on lower tiers only, and only what nothing has used for so long. `done` is
        called once: with the blocks that are gone by tier, or with an error.

        Errors: `NotReady`, `EngineDied`, `Overloaded`.
        """
        ...

    # ------------------------------------------------------------------ KV fetches

    @property
    def kv_pulls(self) -> KvPullController:
        """Fetches of blocks from other workers' pools, and of other workers from this one's."""
        ...
