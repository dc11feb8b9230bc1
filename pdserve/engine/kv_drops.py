"""Passes an operator's orders to forget KV to the core, on the node's side.

Orders and answers are matched by numbers, which hold for one run of the core. It posts commands and
takes events. `CoreClient` owns one and says when a run of the core ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import Overloaded
from pdserve.messages.engine import DropKv, KvDropped
from pdserve.messages.engine_errors import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.port import Dropped
    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds
    from pdserve.messages.engine import Command

__all__ = ["KvDrops"]

MOST_ORDERS: Final = 64
"""Orders that the core has not answered; one more is refused as `Overloaded`."""


class KvDrops:
    """The orders of one core that are not answered yet."""

    def __init__(self) -> None:
        self._waiting: dict[int, Dropped] = {}
        self._numbers = 0

    def order(
        self,
        post: Callable[[Command], None],
        owners: tuple[str, ...] | None,
        older: Seconds,
        done: Dropped,
    ) -> None:
        """Posts an order. `done` is called once. Errors: `Overloaded`."""
        if len(self._waiting) >= MOST_ORDERS:
            raise Overloaded(f"{MOST_ORDERS} orders to drop KV wait", retry_after=1.0)
        self._numbers += 1
        self._waiting[self._numbers] = done
        post(DropKv(self._numbers, owners, older))

    def take(self, event: KvDropped) -> None:
        """Handles the core's answer."""
        done = self._waiting.pop(event.number, None)
        if done is not None:
            done(error_of(event) if event.kind else event.blocks)

    def end(self, error: PdserveError) -> None:
        """The core answers no more: every order gets `error`."""
        waiting, self._waiting = self._waiting, {}
        for done in waiting.values():
            done(error)
