"""Defines the ports that the decode and prefill handlers need, so that tests can replace them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.engine.port import Engine
    from pdserve.ids import Epoch, NodeId
    from pdserve.messages.card import ModelCard
    from pdserve.messages.handoff import ClaimOutcome, PrefillItem, QueueState

__all__ = [
    "ClaimSource",
    "DisaggWorker",
    "PrefillClaim",
    "PrefillQueuePort",
    "QueueListener",
]


class DisaggWorker(Protocol):
    """The part of the worker that both handlers use; `worker.service.WorkerService` implements
    it."""

    @property
    def engine(self) -> Engine: ...

    @property
    def names_id(self) -> bytes: ...

    def cards(self) -> Mapping[str, ModelCard]: ...

    def unready_reason(self) -> str | None: ...


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
