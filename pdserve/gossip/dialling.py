"""Which addresses are being dialled, and how long to wait after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.gossip.events import Dial

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.gossip.context import Context
    from pdserve.ids import Seconds

__all__ = ["Dialler"]


class Dialler:
    """One dial per address at a time; delays double and are spread, so that nodes that lost the
    same peer do not come back in step."""

    def __init__(self, context: Context, own: str) -> None:
        self._context = context
        self._own = own
        self._pending: set[str] = set()
        self._failures: dict[str, int] = {}

    def dial(self, address: str) -> None:
        """Unless it is under way, empty, or our own."""
        if address and address != self._own and address not in self._pending:
            self._pending.add(address)
            self._context.emit(Dial(address))

    def up(self, address: str) -> bool:
        """A link to that address; whether we dialled it."""
        self._failures.pop(address, None)
        ours = address in self._pending
        self._pending.discard(address)
        return ours

    def failed(self, address: str, refused: bool) -> Seconds:
        """How long to wait before the next one."""
        config = self._context.config
        self._pending.discard(address)
        failures = self._failures.get(address, 0)
        self._failures[address] = failures + 1
        longest = min(config.redial_most, config.redial_first * 2.0 ** min(failures, 16))
        delay = longest * self._context.random.uniform(0.5, 1.0)
        return max(delay, config.redial_refused) if refused else delay

    def keep(self, addresses: Iterable[str]) -> None:
        """Forget the failures of all others."""
        kept = set(addresses)
        for address in [address for address in self._failures if address not in kept]:
            del self._failures[address]
