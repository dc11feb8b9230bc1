"""How long a test waits for real threads, processes and sockets.

A wait ends as soon as what it waits for is there, so its bound costs nothing where the machine is
quick. It only says when a test gives up, which must not be before the slowest machine is done.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds

__all__ = ["PATIENCE", "eventually"]

PATIENCE: Final[Seconds] = 120.0
_LOOKS: Final[Seconds] = 0.01


async def eventually(met: Callable[[], object], what: str, within: Seconds = PATIENCE) -> None:
    """Wait until `met` is true. Errors: `AssertionError` that names what did not come."""
    loop = asyncio.get_running_loop()
    until = loop.time() + within
    while not met():
        assert loop.time() < until, f"not within {within:g} s: {what}"
        await asyncio.sleep(_LOOKS)
