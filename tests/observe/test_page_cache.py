"""Many scrapes cost no more than a few."""

import asyncio

from pdserve.observe.page_cache import CachedPages

OPEN = "application/openmetrics-text; version=1.0.0"


class Pages:
    def __init__(self):
        self.made = 0

    async def page(self, accept: str = "") -> tuple[bytes, str]:
        self.made += 1
        await asyncio.sleep(0)
        return f"{self.made} {accept}".encode(), "text/plain"


async def test_a_page_is_shown_again_for_a_moment():
    pages, now = Pages(), 100.0
    recent = CachedPages(pages, lambda: now)
    shown = await asyncio.gather(*(recent.page(f"text/plain;q={n}") for n in range(50)))
    assert set(shown) == {(b"1 ", "text/plain")}
    assert (await recent.page(OPEN))[0] == b"2 application/openmetrics-text"
    now += 0.2
    assert (await recent.page(""))[0] == b"3 "
    assert pages.made == 3
