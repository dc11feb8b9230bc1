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
    """The part of the worker that both handlers use; `worker.service.WorkerService` implements
    it."""

    @property
    def capabilities(self) -> EngineCapabilities | None: ...

    @property
    def names_id(self) -> bytes: ...

    def cards(self) -> Mapping[str, ModelCard]: ...

    def statistics(self) -> EngineStats: ...

    def unready_reason(self) -> str | None: ...

    def abort(self, handle: Handle) -> None: ...


class DecodeWorker(DisaggWorker, Protocol):
    """The part of the worker that the decode handler uses; the methods are those of
    `engine.port.Engine`."""

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle: ...

    def submit_remote(self, request: GenerateRequest, sink: RemotePrefillSink) -> Handle: ...

    def open_attempt(self, handle: Handle, attempt: int, node: NodeId, epoch: Epoch) -> None: ...

    def activate(self, handle: Handle, attempt: int, handoff: Handoff) -> None: ...

    def give_up(self, handle: Handle, attempt: int) -> None: ...

    def prefill_here(self, handle: Handle) -> None: ...

    def paths(self) -> Sequence[PathState]: ...


class PrefillWorker(DisaggWorker, Protocol):
    """The part of the worker that the prefill handler uses; the methods are those of
    `engine.port.Engine`."""

    def prefill(
        self,
        request: GenerateRequest,
        ticket: TransferTicket,
        node: NodeId,
        epoch: Epoch,
        sink: PrefillSink,
    ) -> Handle: ...


class QueueListener(Protocol):
    """Receives the events of one queued item until it is refused, cancelled or claimed. `enqueue`
    may call it before returning. Its methods may call `enqueue` and `cancel`."""

    def on_owner(self, owner: NodeId, epoch: Epoch, round: int) -> None:
        """Called before each sending. From now on only claims of this router life and round are
        valid."""
        ...

    def on_queued(self, owner: NodeId, epoch: Epoch) -> None:
        """The router has queued the item."""
        ...

    def on_refused(self, reason: str) -> None:
        """The item is in no queue and no prefill worker will take it; no call follows. `reason` is
        one word: `no_router`, `router_unreachable`, `congested`, `too_many`, `deadline`, or the
        router's reason (`router.prefill_queue.queue`)."""
        ...


class PrefillQueuePort(Protocol):
    """The decode worker's client of the prefill queues."""

    def state(self, model: str) -> QueueState | None:
        """The queue's state as its owner last reported it; None if there is no owner or no prefill
        worker."""
        ...

    def enqueue(self, item: PrefillItem, listener: QueueListener) -> None:
        """Queues the item; queues it again, each time in a later round, when the queue's owner
        changes."""
        ...

    def opened(self, request: int) -> None:
        """Records that an attempt is open; the queue need not keep the item any longer."""
        ...

    def cancel(self, request: int) -> None:
        """Takes the item out of the queue; unknown items are ignored."""
        ...

    def close(self) -> None:
        """Refuses all queued items."""
        ...


class PrefillClaim(Protocol):
    """A prefill worker's right to one item."""

    number: int
    item: PrefillItem
    decode: NodeId
    decode_epoch: Epoch

    @property
    def owner(self) -> NodeId:
        """The router that granted the claim."""
        ...

    @property
    def owner_epoch(self) -> Epoch: ...

    def opened(self) -> None:
        """Records that the decode worker has opened an attempt. From now on it, not the queue,
        reports when the work is no longer wanted."""
        ...

    def end(self, outcome: ClaimOutcome) -> None:
        """Reports the outcome to the queue. Idempotent."""
        ...


class ClaimSource(Protocol):
    """The prefill worker's client of the prefill queues."""

    def offer(self, model: str, compat_hash: str, credits: int, uncomputed_tokens: int) -> None:
        """Offers to take `credits` more items. Call it whenever the numbers change; only changes
        are sent."""
        ...

    def close(self) -> None:
        """Leaves every queue."""
        ...
