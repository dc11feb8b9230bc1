"""Provides an event loop with a virtual clock: waiting takes no time, and runs are deterministic.

When nothing is ready, the clock jumps to the next timer. When there is no timer either, nothing
could ever happen again, and the loop raises instead of hanging. Only for code that does no real I/O
and uses no threads, such as nodes on a `MemoryWorld`.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from pdserve.ids import Seconds

__all__ = ["Deadlock", "VirtualTimeLoop", "run"]

T = TypeVar("T")

_RESOLUTION: Seconds = 1e-6


class Deadlock(RuntimeError):
    """Tasks wait, and nothing is left that could wake them."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock; `time()` starts at 0."""

    def __init__(self) -> None:
        self._now: Seconds = 0.0
        super().__init__(_JumpingSelector(self._advance))
        # Timers that are at most this far ahead are due together.
        self._clock_resolution = _RESOLUTION

    def time(self) -> Seconds:
        return self._now

    def _advance(self, seconds: Seconds) -> None:
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Passes the time that the loop would have slept to `advance`."""

    def __init__(self, advance: Callable[[Seconds], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # The loop's own wake-up pipe may be ready.
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock("no timer is set and nothing is ready")
        self._advance(max(0.0, timeout))
        return ready


def run(main: Coroutine[object, object, T]) -> T:
    """Like `asyncio.run`, in virtual time. Unhandled errors in callbacks are raised at the end."""
    loop = VirtualTimeLoop()
    problems: list[Mapping[str, object]] = []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    try:
        result = loop.run_until_complete(main)
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    if problems:
        raise RuntimeError(f"errors in callbacks: {problems}")
    return result
