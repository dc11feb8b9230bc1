"""Drives one rail of a path: a queue pair, its send queue, and the descriptor that wakes a loop."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.transfer.rdma.send_queue import SendQueue
from pdserve.transfer.rdma.work_requests import WorkCompletion, new_table, poll_completions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.transfer.path_base import DeliveryKey
    from pdserve.transfer.rdma.adapter import PyverbsQueuePair
    from pdserve.transfer.rdma.send_queue import RailRegions
    from pdserve.transfer.rdma.verbs_path import WorkRequestChain

__all__ = ["WC_STATUS_TEXT", "Rail", "RailListener", "describe_failure"]

_FLUSHED: Final = 5
_NOTIFIED: Final = 129
WC_STATUS_TEXT: Final = {
    1: "local length error",
    2: "local queue pair error",
    4: "local protection error: a key or range of this node",
    _FLUSHED: "flushed, since the queue pair has failed",
    9: "the peer's queue pair allows no writes",
    10: "remote access error: a key or range of the peer",
    11: "the peer's adapter could not do it",
    12: "the peer does not acknowledge: retries exhausted",
    13: "the peer takes no notification: retries exhausted",
    21: "general error",
}
"""Texts of the values of `ibv_wc_status` that can occur."""


def describe_failure(completion: WorkCompletion, key: DeliveryKey | None) -> str:
    """Describe a failed work request: its status and the part it belonged to."""
    text = WC_STATUS_TEXT.get(completion.status, "unknown")
    whose = "" if key is None else f", slot {key.slot}, part {key.part}"
    vendor = f", vendor code {completion.vendor:#x}" if completion.vendor else ""
    return f"{text} (status {completion.status}{vendor}, work request {completion.id}{whose})"


class RailListener(Protocol):
    """What a rail calls on its path."""

    def completed(self, key: DeliveryKey, *, whole: bool = True) -> None: ...
    def notified(self, word: int) -> None: ...
    def fail(self, step: str, reason: str) -> None: ...


class Rail:
    """Drives one queue pair on the event loop; implements `rdma.verbs_path.QueuePair`."""

    def __init__(self, pair: PyverbsQueuePair, regions: RailRegions, path: RailListener) -> None:
        self.pair = pair
        self.queue = SendQueue(pair.depth, regions)
        self.path = path
        self.progress = 0
        """Grows with everything that completes."""
        self._table = new_table(pair.depth)
        self._taken = 0
        self._over = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pair.raw.events_fd, self._on_event)

    def post(self, chain: WorkRequestChain) -> None:
        """Queue a chain of work requests and post what fits."""
        self.queue.push(chain)
        self._pump()

    def give_up(self, key: DeliveryKey) -> bool:
        """Post no more of a chain. True: none of it was posted, and no completion follows."""
        gone = self.queue.give_up(key)
        self._pump()
        return gone

    def _pump(self) -> None:
        """Post what fits."""
        queue, raw = self.queue, self.pair.raw
        while not self._over:
            first = queue.posted + 1
            count = queue.fill(self._table)
            if not count:
                return
            error, posted = self._table.post(raw.post_send, raw.pair, count, first, queue.every)
            if error:
                self._fail(f"{os.strerror(error)}: {posted} of {count} work requests were taken")

    def _on_event(self) -> None:
        """The channel is readable: read the event and ask for the next one, then poll."""
        try:
            if not self._over and self.pair.rearm():
                self.poll()
        except OSError as error:
            self._fail(f"the completion channel has failed: {error}")

    def poll(self) -> None:
        """Read completions and report them to the path."""
        raw = self.pair.raw
        while not self._over:
            found = [WorkCompletion(*c) for c in poll_completions(raw.poll, raw.queue)]
            if not found:
                break
            failed = [c for c in found if c.status]
            for completion in found:
                if not completion.status:
                    self._on_success(completion)
            if failed:
                self._on_failure(failed)
        self._refill()
        self._pump()

    def _on_success(self, completion: WorkCompletion) -> None:
        self.progress += 1
        if completion.opcode == _NOTIFIED:
            self._taken += 1
            self.path.notified(completion.word)
            return
        for ended in self.queue.complete(completion.id):
            self.path.completed(ended.key, whole=ended.whole)

    def _on_failure(self, failed: Sequence[WorkCompletion]) -> None:
        """A work request has failed. The first one that was not merely flushed names the cause."""
        cause = next((c for c in failed if c.status != _FLUSHED), failed[0])
        key = self.queue.key_at(cause.id) if cause.id else None
        self._fail(describe_failure(cause, key))

    def _refill(self) -> None:
        """Post receives for the notifications that were read, a few at once."""
        if self._over or self._taken * 4 < self.pair.receives:
            return
        taken, self._taken = self._taken, 0
        try:
            self.pair.receive(taken)
        except OSError as error:
            self._fail(f"no more room for notifications: {error}")

    def _fail(self, reason: str) -> None:
        """Fail the path, which then destroys this rail."""
        self._over = True
        self.path.fail("write", reason)

    def destroy(self) -> None:
        """Destroy the queue pair: nothing arrives by it afterwards. Errors: `TransferError`; the
        peer may then still write through it."""
        self._over = True
        self._loop.remove_reader(self.pair.raw.events_fd)
        self.pair.destroy()
        self.queue.clear()
