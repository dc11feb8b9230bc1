"""Defines the ports that the decode and prefill handlers need, so that tests can replace them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.engine.port import Handle, PrefillSink, RemotePrefillSink, TokenSink
    from pdserve.ids import Epoch, NodeId
    from pdserve.messages.card import ModelCard
    from pdserve.messages.engine import EngineCapabilities, EngineStats, PathState
    from pdserve.messages.handoff import ClaimOutcome, Handoff, PrefillItem, QueueState
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.transfer import TransferTicket

__all__ = [
    "ClaimSource",
    "DecodeWorker",
    "DisaggWorker",
    "PrefillClaim",
    "PrefillQueuePort",
    "PrefillWorker",
    "QueueListener",
]


class DisaggWorker(Protocol):
    """What both drivers ask of the worker: see `worker.service.WorkerService`."""

    @property
    def capabilities(self) -> EngineCapabilities | None: ...

    @property
    def names_id(self) -> bytes: ...

    def cards(self) -> Mapping[str, ModelCard]: ...

    def statistics(self) -> EngineStats: ...

    def unready_reason(self) -> str | None: ...

    def abort(self, handle: Handle) -> None: ...


class DecodeWorker(DisaggWorker, Protocol):
    """See `engine.port.Engine`."""

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle: ...

    def submit_remote(self, request: GenerateRequest, sink: RemotePrefillSink) -> Handle: ...

    def open_attempt(self, handle: Handle, attempt: int, node: NodeId, epoch: Epoch) -> None: ...

    def activate(self, handle: Handle, attempt: int, handoff: Handoff) -> None: ...

    def give_up(self, handle: Handle, attempt: int) -> None: ...

    def prefill_here(self, handle: Handle) -> None: ...

    def paths(self) -> Sequence[PathState]: ...


class PrefillWorker(DisaggWorker, Protocol):
    """See `engine.port.Engine`."""

    def prefill(
        self,
        request: GenerateRequest,
        ticket: TransferTicket,
        node: NodeId,
        epoch: Epoch,
        sink: PrefillSink,
    ) -> Handle: ...


class QueueListener(Protocol):
    """Hears of one queued item, until it is refused, cancelled or taken. Called from within
    `enqueue` too; may call `enqueue` and `cancel`."""

    def on_owner(self, owner: NodeId, epoch: Epoch, round: int) -> None:
        """It is about to be sent to this life of a router, in this round: only claims of these are
        valid from now on. Called before each sending."""
        ...

    def on_queued(self, owner: NodeId, epoch: Epoch) -> None:
        """It has it."""
        ...

    def on_refused(self, reason: str) -> None:
        """It is in no queue, and nobody will take it; no call follows. One word: `no_router`,
        `router_unreachable`, `congested`, `too_many`, `deadline`, or what the router says
        (`router.prefill_queue.queue`)."""
        ...


class PrefillQueuePort(Protocol):
    """The decode worker's end of the prefill queues."""

    def state(self, model: str) -> QueueState | None:
        """As last reported by the queue's owner; None: there is none, or nobody to prefill."""
        ...

    def enqueue(self, item: PrefillItem, listener: QueueListener) -> None:
        """Queue it, and again when the queue gets another owner, each time in a later round."""
        ...

    def opened(self, request: int) -> None:
        """An attempt is open: the queue has no more to do with it."""
        ...

    def cancel(self, request: int) -> None:
        """Nobody need prefill it any more; unknown ones are ignored."""
        ...

    def close(self) -> None:
        """Refuse whatever is here."""
        ...


class PrefillClaim(Protocol):
    """A prefill worker's right to an item."""

    number: int
    item: PrefillItem
    decode: NodeId
    decode_epoch: Epoch

    @property
    def owner(self) -> NodeId:
        """The router whose claim it is."""
        ...

    @property
    def owner_epoch(self) -> Epoch: ...

    def opened(self) -> None:
        """The decode worker has opened an attempt: that it is not wanted comes from there."""
        ...

    def end(self, outcome: ClaimOutcome) -> None:
        """Tell the queue; nothing happens if it has ended."""
        ...


class ClaimSource(Protocol):
    """The prefill worker's end of the prefill queues."""

    def offer(self, model: str, compat_hash: str, credits: int, uncomputed_tokens: int) -> None:
        """So many more items would be taken; it is told when it has changed."""
        ...

    def close(self) -> None:
        """Leave every queue."""
        ...
