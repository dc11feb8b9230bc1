"""Requests that may be what workers died of are tried one at a time at each worker.

Together they would go on dying together, and nobody could tell which of them it is; apart, all but
one bring a token. Owned by the frontend's backend; workers see to it that those of several
frontends do not meet.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import NodeId

__all__ = ["Trials"]


class _Turns:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
        """The one that is tried, and those that wait."""


class Trials:
    """All of one frontend."""

    def __init__(self) -> None:
        self._turns: dict[NodeId, _Turns] = {}

    async def begin(self, worker: NodeId) -> None:
        """Wait until no other is tried at that worker, in the order of asking; `end` must follow.
        Cancellation: as if it had not been asked for."""
        turns = self._turns.setdefault(worker, _Turns())
        turns.users += 1
        try:
            await turns.lock.acquire()
        except BaseException:
            self._leave(worker, turns)
            raise

    def end(self, worker: NodeId) -> None:
        """It has brought a token, has ended, or has left."""
        turns = self._turns[worker]
        turns.lock.release()
        self._leave(worker, turns)

    def _leave(self, worker: NodeId, turns: _Turns) -> None:
        turns.users -= 1
        if not turns.users:
            del self._turns[worker]

    def __len__(self) -> int:
        """Workers at which one is tried."""
        return len(self._turns)
