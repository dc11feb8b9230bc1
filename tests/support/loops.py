"""The event loop of async tests: uvloop, as in production, where it is installed."""

from __future__ import annotations

import asyncio
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

unclosed: list[str] = []
"""Transports and servers that a closed loop still had; the leak fixture empties it."""

try:
    import uvloop
except ImportError:  # a platform without it; the server falls back in the same way
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:

    class _Loop(uvloop.Loop):
        """Collects its complaints about unclosed handles instead of raising them.

        With warnings turned into errors, uvloop's warning escapes from the middle of its clean-up,
        which then never ends, in C, where no timeout can interrupt it.
        """

        def close(self) -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ResourceWarning)
                super().close()
            unclosed.extend(str(warning.message).partition(";")[0] for warning in caught)

    new_event_loop = _Loop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A factory and not a policy: policies are deprecated from Python 3.14 on."""
    return {"loop": new_event_loop}
