"""Caches the metrics page for a moment, so that scrapes without a key stay cheap.

Rendering takes a millisecond or more of the event loop, and a page of several processes a round of
requests. Owned by the frontend's service.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.observe.metrics import ScrapeHandler

__all__ = ["CachedPages"]

_FRESH: Final[Seconds] = 0.1
"""How long a page is reused. Ten pages a second are 2 % of the loop; scrapers come every few
seconds.
"""
_OTHER_FORMAT: Final = "application/openmetrics-text"


class CachedPages:
    """Renders at most one page at a time, and none while the last one is fresh."""

    def __init__(self, pages: ScrapeHandler, time: Callable[[], Seconds]) -> None:
        self._pages = pages
        self._time = time
        self._turn = asyncio.Lock()
        self._kept: dict[bool, tuple[Seconds, tuple[bytes, str]]] = {}

    async def page(self, accept: str = "") -> tuple[bytes, str]:
        """A page in the format that `accept` asks for, and its content type."""
        # Everything else in `accept` leads to the same page, so two pages are kept at most.
        other = _OTHER_FORMAT in accept
        async with self._turn:
            kept = self._kept.get(other)
            if kept is not None and self._time() - kept[0] < _FRESH:
                return kept[1]
            page = await self._pages.page(_OTHER_FORMAT if other else "")
            self._kept[other] = (self._time(), page)
            return page
