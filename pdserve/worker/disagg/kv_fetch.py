"""Moves the KV of a running sequence: a request's new worker fetches it from its old one.

    new worker: `KvFetcher`     hand over ──▶     old worker: `KvFetchClaim`
                             taken ◀──         a claim, like the queue's: asks for an attempt
                             or refused, with the reason

To the handlers this looks like a prefill queue with one worker. Only claims of the named life of
that worker are valid. If it refuses, no other worker is asked, and nothing is asked twice.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import Draining, PdserveError
from pdserve.messages.handoff import KvFetch
from pdserve.runtime.rpc_methods import HAND_OVER

if TYPE_CHECKING:
    import asyncio

    from pdserve.ids import Epoch, NodeId, NodeLife, Seconds
    from pdserve.messages.handoff import ClaimOutcome, PrefillItem, QueueState
    from pdserve.runtime.node import Node
    from pdserve.worker.disagg.ports import QueueListener

__all__ = ["KvFetchClaim", "KvFetcher"]

_log = logging.getLogger(__name__)

_ANSWER: Final[Seconds] = 2.0
"""Seconds to wait for the old worker. One that takes longer is overloaded or gone, and computing
the KV is faster."""


class KvFetcher:
    """The new worker's side for one request; implements `ports.PrefillQueuePort`."""

    def __init__(self, node: Node, life: NodeLife) -> None:
        """`life`: the node life that has the KV."""
        self.life = life
        self._node = node
        self._task: asyncio.Task[None] | None = None

    def state(self, model: str) -> QueueState | None:
        """None: this queue has no state to report."""
        return None

    def enqueue(self, item: PrefillItem, listener: QueueListener) -> None:
        """Asks the old worker in the background; calls `on_queued`, or `on_refused` with the
        reason."""
        listener.on_owner(*self.life, item.round)
        words = KvFetch(item=replace(item, names=b"", names_id=b""), epoch=self.life.epoch)
        try:
            self._task = self._node.tasks.spawn(self._ask(words, listener), "ask for KV")
        except Draining:
            listener.on_refused("source_gone")

    async def _ask(self, words: KvFetch, listener: QueueListener) -> None:
        try:
            taken = await self._node.ref(*self.life).ask(HAND_OVER, words, timeout=_ANSWER)
        except PdserveError as error:
            _log.info("%s cannot be asked for KV: %s", self.life.node, error.message)
            refused = "source_gone"
        else:
            refused = taken.refused
        self._task = None
        if refused:
            listener.on_refused(refused)
        else:
            listener.on_queued(*self.life)

    def opened(self, request: int) -> None:
        """Stops waiting for the reply; the open attempt shows that the old worker accepted."""
        self._end()

    def cancel(self, request: int) -> None:
        """Stops waiting for the reply; the old worker learns it when it asks for an attempt."""
        self._end()

    def close(self) -> None:
        """Stops waiting for the reply."""
        self._end()

    def _end(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()


class KvFetchClaim:
    """The old worker's side of one fetch; implements `ports.PrefillClaim`."""

    def __init__(self, words: KvFetch, number: int, decode: NodeLife, ours: NodeLife) -> None:
        self.number = number
        self.item = words.item
        self.decode, self.decode_epoch = decode
        self._ours = ours

    def __repr__(self) -> str:
        return f"<sequence {self.item.request} of {self.decode}>"

    @property
    def owner(self) -> NodeId:
        """This worker: it plays the role of the queue's router."""
        return self._ours.node

    @property
    def owner_epoch(self) -> Epoch:
        return self._ours.epoch

    def opened(self) -> None:
        """Does nothing: there is no queue to tell."""

    def end(self, outcome: ClaimOutcome) -> None:
        """Does nothing: there is no queue to tell."""
