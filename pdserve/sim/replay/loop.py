"""The event loop of a replay: virtual time, one order, nothing to wait for.

`sim.loop` shuffles what is due, to find what rests on an order by chance; a replay wants the same
order each time and as little work per callback as possible. Nothing in it does real I/O or uses a
thread, so the selector is never asked.
"""

from __future__ import annotations

import selectors
from typing import TYPE_CHECKING, Any, Final

from pdserve.testing.virtual_time import Deadlock, VirtualTimeLoop

if TYPE_CHECKING:
    import asyncio

    from pdserve.ids import Seconds

__all__ = ["ReplayLoop"]

_RESOLUTION: Final[Seconds] = 1e-9
"""Far above the rounding of a clock's readings: who waits for a moment must not wake before it."""


class ReplayLoop(VirtualTimeLoop):
    """See above."""

    def __init__(self) -> None:
        super().__init__()
        self._clock_resolution = _RESOLUTION
        self._selector: selectors.BaseSelector = _Never(self, self._selector)
        self.problems: list[str] = []
        """What nobody caught."""
        self.set_exception_handler(self._note_problem)

    def jump(self, seconds: Seconds) -> None:
        """Time goes on by this, and a little more."""
        if seconds > 0:
            self._advance(seconds + 2 * _RESOLUTION)

    def _note_problem(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")


class _Never(selectors.BaseSelector):
    """Has nothing ready, and lets time pass instead of waiting."""

    def __init__(self, loop: ReplayLoop, real: selectors.BaseSelector) -> None:
        self._jump = loop.jump
        self._real = real

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("no timer is set and nothing is ready")
        self._jump(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.get_key(fileobj)

    def get_map(self) -> Any:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()
