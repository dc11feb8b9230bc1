"""Provides the event loop of a replay: virtual time and a fixed order of callbacks.

`tests.worlds.loop` shuffles callbacks to find order dependence; a replay wants the same order each
time and little work per callback. Nothing in a replay does real I/O or uses a thread, so the
selector is never polled.
"""

from __future__ import annotations

import selectors
from typing import TYPE_CHECKING, Any, Final

from pdserve.testing.virtual_time import Deadlock, VirtualTimeLoop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pdserve.ids import Seconds

__all__ = ["ReplayLoop"]

_RESOLUTION: Final[Seconds] = 1e-9
"""Far above the rounding of a clock's readings: who waits for a moment must not wake before it."""


class ReplayLoop(VirtualTimeLoop):
    """The event loop of a replay."""

    def __init__(self) -> None:
        super().__init__()
        self._clock_resolution = _RESOLUTION
        self._selector: selectors.BaseSelector = _Never(self, self._selector)
        self.problems: list[str] = []
        """Exceptions of callbacks."""
        self.on_problem: Callable[[], object] = lambda: None
        """Called for each of them: what the callback left undone may be waited for without end."""
        self.set_exception_handler(self._note_problem)

    def jump(self, seconds: Seconds) -> None:
        """Advance the clock by at least this many seconds."""
        if seconds > 0:
            self._advance(seconds + 2 * _RESOLUTION)

    def _note_problem(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")
        self.on_problem()


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
