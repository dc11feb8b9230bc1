"""Tracks which addresses are being dialled, and the back-off after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.backoff import backoff_delay
from pdserve.gossip.events import Dial

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.gossip.context import GossipContext
    from pdserve.ids import Seconds

__all__ = ["Dialer"]


class Dialer:
    """One dial per address at a time; delays double and are jittered, so that nodes that lost the
    same peer do not redial in step.
    """

    def __init__(self, context: GossipContext, own: str) -> None:
        self._context = context
        self._own = own
        self._pending: set[str] = set()
        self._failures: dict[str, int] = {}

    def dial(self, address: str) -> None:
        """Starts a dial, unless one is under way or the address is empty or this node's own."""
        if address and address != self._own and address not in self._pending:
            self._pending.add(address)
            self._context.emit(Dial(address))

    def up(self, address: str) -> bool:
        """Notes a link to that address; returns whether this node dialled it."""
        self._failures.pop(address, None)
        ours = address in self._pending
        self._pending.discard(address)
        return ours

    def failed(self, address: str, refused: bool) -> Seconds:
        """Notes a failed dial; returns the delay before the next."""
        config = self._context.config
        self._pending.discard(address)
        failures = self._failures.get(address, 0)
        self._failures[address] = failures + 1
        longest = backoff_delay(config.redial_first, config.redial_most, failures)
        delay = longest * self._context.random.uniform(0.5, 1.0)
        return max(delay, config.redial_refused) if refused else delay

    def keep(self, addresses: Iterable[str]) -> None:
        """Forgets the failures of all other addresses."""
        kept = set(addresses)
        for address in [address for address in self._failures if address not in kept]:
            del self._failures[address]
