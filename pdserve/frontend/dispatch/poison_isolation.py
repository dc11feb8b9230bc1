"""Retries requests that may crash workers one at a time per worker.

Run together they would crash workers again, and the cause would stay unknown. Run apart, all but
the cause produce a token. Owned by the frontend's backend; workers keep the suspect requests of
different frontends apart.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import NodeId

__all__ = ["PoisonIsolation"]


class _Turns:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
        """Number of requests that are tried or wait."""


class PoisonIsolation:
    """The trials of one frontend."""

    def __init__(self) -> None:
        self._turns: dict[NodeId, _Turns] = {}

    async def begin(self, worker: NodeId) -> None:
        """Waits until no other request is tried at that worker, in order of calls; `end` must
        follow. Cancellation: nothing has begun."""
        turns = self._turns.setdefault(worker, _Turns())
        turns.users += 1
        try:
            await turns.lock.acquire()
        except BaseException:
            self._leave(worker, turns)
            raise

    def end(self, worker: NodeId) -> None:
        """Ends the trial, after a token, the request's end or its move."""
        turns = self._turns[worker]
        turns.lock.release()
        self._leave(worker, turns)

    def _leave(self, worker: NodeId, turns: _Turns) -> None:
        turns.users -= 1
        if not turns.users:
            del self._turns[worker]

    def __len__(self) -> int:
        """Number of workers with a trial."""
        return len(self._turns)
