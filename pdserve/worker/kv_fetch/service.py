"""Carries KV fetches between workers, over authenticated node links: `KvFetchService`.

    the engine's pulls   PULL ─▶ the owner, only to the life that was meant, within the deadline
    peers' questions     ─▶ the engine; the answer goes back, and an asker that gives up stops it
    offers               see `push`

The answer is bounded by the pull's deadline at both ends. A pull that the engine ends, for whatever
reason, cancels its question, which stops the owner. What the blocks are and where they go is the
engines' business. Owned by the worker's agent; its tasks are the node's.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import (
    DeadlineExceeded,
    Draining,
    LinkError,
    NoMethod,
    Overloaded,
    PdserveError,
)
from pdserve.messages.kv_pull import KvPullGrant
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.rpc_methods import PULL_KV

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pdserve.engine.kv_pulls import KvPullController
    from pdserve.ids import NodeLife
    from pdserve.messages.engine import KvPullEnded
    from pdserve.messages.kv_pull import PullKv
    from pdserve.net.base import IncomingCall
    from pdserve.runtime.node import Node

__all__ = ["MAX_ASKED", "KvFetchNumbers", "KvFetchService"]

_log = logging.getLogger(__name__)

MAX_ASKED: Final = 16
"""Most questions to one peer at a time; one more ends as `busy`."""


@dataclass(slots=True)
class KvFetchNumbers:
    """Counts since the start of the worker."""

    asked: int = 0
    """Questions sent to owners."""
    served: int = 0
    """Questions of peers that were answered with blocks."""
    refused: Counter[str] = field(default_factory=Counter)
    """Questions of peers that were answered without any, by reason."""
    ended: Counter[str] = field(default_factory=Counter)
    """Pulls of this worker by reason; `ok`: with all blocks that the owner had."""
    blocks: int = 0
    """Blocks that pulls brought."""
    seconds: float = 0.0
    """Time of all pulls together."""
    pushed: int = 0
    """Blocks that heirs have pulled from here at a drain."""
    warmed: int = 0
    """Blocks pulled because another worker offered them, or to warm this one up."""


class KvFetchService:
    """KV fetches of one worker; implements `engine.kv_pulls.PullPeers`. Create it before the engine
    starts."""

    def __init__(self, node: Node, engine: KvPullController) -> None:
        self.numbers = KvFetchNumbers()
        self._node = node
        self._engine = engine
        self._asking: dict[Callable[[KvPullGrant], None], asyncio.Task[None]] = {}
        self._waiting: Counter[NodeLife] = Counter()
        """Questions under way to each peer."""
        engine.peers = self
        node.host(self)

    # ------------------------------------------------------------------ to owners

    def ask(self, message: PullKv, peer: NodeLife, answered: Callable[[KvPullGrant], None]) -> None:
        """Implements `PullPeers.ask`."""
        if self._waiting[peer] >= MAX_ASKED:
            answered(KvPullGrant(refused="busy"))
            return
        try:
            task = self._node.tasks.spawn(self._ask(message, peer, answered), f"pull from {peer}")
        except Draining:
            answered(KvPullGrant(refused="closed"))
            return
        self._waiting[peer] += 1
        self._asking[answered] = task
        task.add_done_callback(lambda _: self._asked(peer, answered))

    def _asked(self, peer: NodeLife, answered: Callable[[KvPullGrant], None]) -> None:
        self._asking.pop(answered, None)
        self._waiting[peer] -= 1
        if not self._waiting[peer]:
            del self._waiting[peer]

    async def _ask(
        self, message: PullKv, peer: NodeLife, answered: Callable[[KvPullGrant], None]
    ) -> None:
        """Performs one question. Cancellation: the answer is not wanted any more, and the owner
        learns it."""
        until = self._node.now() + message.timeout
        try:
            link = await self._node.link(peer.node, timeout=message.timeout)
            if link.peer.epoch != peer.epoch:
                answered(KvPullGrant(refused="epoch"))
                return
            left = max(0.001, until - self._node.now())
            self.numbers.asked += 1
            grant = await link.request(
                PULL_KV, msgspec.structs.replace(message, timeout=left), timeout=left
            )
        except PdserveError as error:
            _log.info("%s cannot be asked for KV: %s", peer, error.message)
            grant = KvPullGrant(refused=_reason(error))
        answered(grant)

    def forget(self, answered: Callable[[KvPullGrant], None]) -> None:
        """Implements `PullPeers.forget`."""
        task = self._asking.pop(answered, None)
        if task is not None:
            task.cancel()

    def ended(self, event: KvPullEnded) -> None:
        """Implements `PullPeers.ended`."""
        self.numbers.ended[event.error or "ok"] += 1
        self.numbers.blocks += event.blocks
        self.numbers.seconds += event.seconds

    # ------------------------------------------------------------------ from requesters

    @answers(PULL_KV)
    def _serve(self, message: PullKv, call: IncomingCall) -> KvPullGrant | None:
        """Pass a question to the engine. A draining worker answers, too: its blocks are wanted
        elsewhere."""
        if message.epoch != self._node.epoch:
            self.numbers.refused["epoch"] += 1
            return KvPullGrant(refused="epoch")

        def reply(grant: KvPullGrant) -> None:
            if grant.refused:
                self.numbers.refused[grant.refused] += 1
            else:
                self.numbers.served += 1
            call.reply(grant)

        call.on_cancel = self._engine.serve(call.life, message, reply)
        return None


def _reason(error: PdserveError) -> str:
    """Why an owner could not be asked, in one word."""
    match error:
        case DeadlineExceeded():
            return "deadline"
        case Overloaded():
            return "busy"
        case NoMethod():
            return "misfit"
        case LinkError():
            return "gone"
    return "unready"
