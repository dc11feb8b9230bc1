"""The form of a page, and that many scrapes cost no more than a few."""

import asyncio
import gzip

import pytest

from pdserve.errors import InvalidRequest
from pdserve.observe.exposition import ScrapedFamily, ScrapedSeries
from pdserve.observe.scrapes import (
    METRIC_NAMES,
    CachedPages,
    MetricNames,
    ScrapedPage,
    ScrapeForm,
    page_of,
)

PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
PAIRS = [(False, False), (False, True), (True, False), (True, True)]


class Pages:
    names: MetricNames = "both"

    def __init__(self):
        self.made = 0

    async def page(self, form=None):
        self.made += 1
        await asyncio.sleep(0)
        return ScrapedPage(f"{self.made} {form.openmetrics}".encode(), "text/plain")


async def test_a_page_is_shown_again_for_a_moment():
    pages, now = Pages(), 100.0
    recent = CachedPages(pages, lambda: now)
    assert recent.names == "both"
    shown = await asyncio.gather(*(recent.page() for _ in range(50)))
    assert set(shown) == {(b"1 False", "text/plain", "")}
    assert (await recent.page(ScrapeForm(openmetrics=True))).body == b"2 True"
    now += 0.2
    assert (await recent.page()).body == b"3 False"
    assert pages.made == 3


async def test_pages_of_all_forms_together_take_a_tenth_of_the_time(monkeypatch):
    now, worked = 100.0, 0.0

    class Slow(Pages):
        async def page(self, form=None):
            nonlocal now, worked
            now, worked = now + 0.04, worked + 0.04
            return await super().page(form)

    async def sleep(seconds):
        nonlocal now
        now += max(0.0, seconds)

    monkeypatch.setattr("pdserve.observe.scrapes.asyncio.sleep", sleep)
    recent = CachedPages(Slow(), lambda: now)
    forms = [ScrapeForm(names, *more) for names in METRIC_NAMES for more in PAIRS]
    for form in forms * 3:
        await recent.page(form)
    assert worked == pytest.approx(3 * 12 * 0.04)
    assert worked <= (now - 100.0) * 0.11


def test_the_form_is_what_the_scraper_asks_for():
    def asked(accept="", encodings="", names=None):
        return ScrapeForm.asked(accept, encodings, names, "pdserve")

    assert asked() == asked("*/*", "identity, br") == ScrapeForm("pdserve", False, False)
    assert asked(PROMETHEUS, "gzip") == ScrapeForm("pdserve", True, True)
    assert asked(encodings="deflate, gzip;q=1.0").gzip
    assert not asked(encodings="gzip;q=0").gzip
    assert not asked(encodings="br, gzip;q=0.000").gzip
    assert not asked(encodings="gzipped").gzip
    assert asked(encodings="gzip;q=0.001").gzip
    assert asked(names="vllm").names == "vllm"
    assert ScrapeForm.asked("", "", None, "vllm").names == "vllm"


def test_names_that_are_not_known_are_refused_with_those_that_are():
    with pytest.raises(InvalidRequest, match="must be one of pdserve, vllm, both") as refused:
        ScrapeForm.asked("", "", "sglang", "pdserve")
    assert refused.value.param == "names"


def test_a_long_page_is_compressed_for_who_can_read_that():
    series = [ScrapedSeries((f"m{n}",), n) for n in range(200)]
    family = ScrapedFamily("pdserve_x", "gauge", "Of x.", ("model",), series)
    plain, zipped = page_of([family], ScrapeForm()), page_of([family], ScrapeForm(gzip=True))
    assert (plain.encoding, zipped.encoding) == ("", "gzip")
    assert gzip.decompress(zipped.body) == plain.body
    assert len(zipped.body) < len(plain.body) / 5
    family.series = series[:1]
    assert page_of([family], ScrapeForm(gzip=True)).encoding == ""
