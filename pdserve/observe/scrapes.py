"""Answers scrapes: what a scraper asks for, the page in that form, and a cache of pages.

The cache keeps scrapes without a key cheap, whatever forms they ask for: rendering takes
milliseconds of the event loop, and a page of several processes a round of requests. Owned by the
frontend's service and the probes.
"""

from __future__ import annotations

import asyncio
import gzip
import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from pdserve.errors import InvalidRequest
from pdserve.observe.exposition import OPENMETRICS, content_type, render
from pdserve.observe.vllm_names import vllm_families

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.observe.exposition import ScrapedFamily

__all__ = [
    "METRIC_NAMES",
    "PLAIN",
    "CachedPages",
    "MetricNames",
    "ScrapeForm",
    "ScrapeHandler",
    "ScrapedPage",
    "page_of",
]

MetricNames = Literal["pdserve", "vllm", "both"]
METRIC_NAMES: Final[tuple[MetricNames, ...]] = ("pdserve", "vllm", "both")

_FRESH: Final[Seconds] = 0.1
"""How long a page is reused; scrapers come every few seconds."""
_REST: Final = 9.0
"""After a page of another form none is made for so many times what the last one took: all forms
together take a tenth of the loop at most. A page of 64 models takes 40 ms."""
_LONGEST_REST: Final[Seconds] = 0.5
"""Also a page of several processes, which waits for them, is followed by another so soon."""
_WORTH_IT: Final = 1400
"""Bytes from which on a page is compressed: less fits one packet."""
_TAKES_GZIP: Final = re.compile(r"gzip(;(?!q=0\.?0*$).*)?")
_LEVEL: Final = 1
"""Of gzip: a page of metrics shrinks to a tenth at once, and hardly further."""


class ScrapeForm(NamedTuple):
    """The form of a page."""

    names: MetricNames = "pdserve"
    openmetrics: bool = False
    gzip: bool = False

    @classmethod
    def asked(
        cls, accept: str, encodings: str, names: str | None, default: MetricNames
    ) -> ScrapeForm:
        """Reads the headers `Accept` and `Accept-Encoding`, and the parameter `names`.

        Errors: `InvalidRequest` for names that are not known.
        """
        if names is not None and names not in METRIC_NAMES:
            raise InvalidRequest(
                f"'names' must be one of {', '.join(METRIC_NAMES)}, as in /metrics?names=vllm",
                param="names",
            )
        zipped = any(map(_TAKES_GZIP.fullmatch, encodings.replace(" ", "").lower().split(",")))
        chosen = default if names is None else names
        return cls(chosen, OPENMETRICS in accept, zipped)


PLAIN: Final = ScrapeForm()


class ScrapedPage(NamedTuple):
    """The answer to a scrape."""

    body: bytes
    content_type: str
    encoding: str = ""
    """The header `Content-Encoding`; empty: none."""


class ScrapeHandler(Protocol):
    """Answers a scrape: for one process, or for several that share a port."""

    names: MetricNames
    """The names that a scrape gets which asks for none."""

    async def page(self, form: ScrapeForm = PLAIN) -> ScrapedPage: ...


def page_of(families: list[ScrapedFamily], form: ScrapeForm) -> ScrapedPage:
    """The page in this form."""
    if form.names == "both":
        families = [*families, *vllm_families(families)]
    elif form.names == "vllm":
        # The standard `process_*` are everybody's.
        standard = [one for one in families if one.name.startswith("process_")]
        families = [*standard, *vllm_families(families)]
    body = render(families, openmetrics=form.openmetrics)
    kind = content_type(openmetrics=form.openmetrics)
    if form.gzip and len(body) >= _WORTH_IT:
        return ScrapedPage(gzip.compress(body, _LEVEL, mtime=0), kind, "gzip")
    return ScrapedPage(body, kind)


class CachedPages:
    """Renders at most one page at a time, none while the last one of its form is fresh, and rests
    between two."""

    def __init__(self, pages: ScrapeHandler, time: Callable[[], Seconds]) -> None:
        self.names = pages.names
        self._pages = pages
        self._time = time
        self._turn = asyncio.Lock()
        self._kept: dict[ScrapeForm, tuple[Seconds, ScrapedPage]] = {}
        self._rest_until: Seconds = 0.0

    async def page(self, form: ScrapeForm = PLAIN) -> ScrapedPage:
        """A page in this form; there are twelve forms."""
        async with self._turn:
            kept = self._kept.get(form)
            if kept is not None and self._time() - kept[0] < _FRESH:
                return kept[1]
            await asyncio.sleep(self._rest_until - self._time())
            began = self._time()
            page = await self._pages.page(form)
            now = self._time()
            self._kept[form] = (now, page)
            self._rest_until = now + min(_LONGEST_REST, _REST * (now - began))
            return page
