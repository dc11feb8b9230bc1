"""Measures a scrape: a page of one process, and the sum of frontends that share a port.

    python bench/micro/scrape.py

Each of 8 frontends has served 64 models with long names, so every histogram has its series. The
parts are those of `GroupMetrics.page`: collect this process's numbers, decode those of seven
siblings, sum them, write the page, compress it. The arm beside it writes the same page with the
Prometheus client's own encoder from families that are already collected. CPU time, the best of
several rounds, so that other programs count less. The aims are 30 ms and 1 MiB for a scrape as
Prometheus asks for it, which is compressed. Writes bench/results/scrape.md.
"""

from __future__ import annotations

import gzip
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bench.machine import facts
from pdserve.messages.status import MetricPage
from pdserve.observe.merge import merge
from pdserve.observe.metrics import Metrics
from pdserve.observe.scrapes import ScrapeForm, page_of
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric

    from pdserve.observe.exposition import ScrapedFamily

MODELS = 64
FRONTENDS = 8
ROUNDS = 15
AIM_MS = 30.0
AIM_BYTES = 1 << 20
RESULT = Path(__file__).parent.parent / "results" / "scrape.md"
_HISTOGRAMS = (
    *("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue"),
    *("request_prefill", "request_decode", "request_time_per_output_token"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_generation_tokens"),
    *("request_uncached_tokens", "migration_gap"),
)


def served(draw: random.Random) -> Metrics:
    """A frontend that has served every model."""
    metrics = Metrics()
    for number in range(MODELS):
        model = metrics.of_model(f"organisation/Model-Name-8B-Instruct-{number:02d}")
        for name in _HISTOGRAMS:
            for _ in range(50):
                getattr(model, name).observe(draw.expovariate(0.3))
        for outcome in ("completed", "cancelled", "invalid", "overloaded"):
            model.ended(outcome)
        for reason in ("stop", "length", "tool_calls", "abort"):
            model.finished(reason)
    return metrics


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of CPU time, the best round."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        rounds.append(time.process_time() - began)
    return min(rounds) * 1e3


class _Collected:
    """A Prometheus collector of families that are collected already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def with_client(page: bytes) -> Callable[[], bytes]:
    """Writes this page with the Prometheus client."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(text_string_to_metric_families(page.decode()))))
    return lambda: generate_latest(registry)


def measure() -> tuple[dict[str, float], dict[str, int]]:
    """Milliseconds by part, and sizes by name."""
    draw = random.Random(1)
    own, *siblings = [served(draw) for _ in range(FRONTENDS)]
    told = [encode(MetricPage((), tuple(each.families()))) for each in siblings]
    read = decoder(MetricPage)

    def group() -> list[ScrapedFamily]:
        return merge([own.families(), *(read(each).scraped for each in told)])

    families = group()
    page = page_of(families, ScrapeForm()).body
    parts = {
        "collect one process": timed(own.families),
        "its message to a sibling": timed(lambda: encode(MetricPage((), tuple(own.families())))),
        f"{FRONTENDS - 1} messages decoded": timed(lambda: [read(each) for each in told]),
        f"{FRONTENDS} processes collected, decoded and summed": timed(group),
        "page written": timed(lambda: page_of(families, ScrapeForm())),
        "page written with the Prometheus client": timed(with_client(page)),
        "page compressed": timed(lambda: gzip.compress(page, 1)),
        "scrape of one process": timed(lambda: page_of(own.families(), ScrapeForm(gzip=True))),
        "scrape of all": timed(lambda: page_of(group(), ScrapeForm(gzip=True))),
        "scrape of all under vLLM's names": timed(
            lambda: page_of(group(), ScrapeForm("vllm", gzip=True))
        ),
    }
    sizes = {
        "message to a sibling": len(told[0]),
        "page": len(page),
        "page, compressed": len(page_of(families, ScrapeForm(gzip=True)).body),
        "lines": page.count(b"\n"),
    }
    return parts, sizes


def report(parts: dict[str, float], sizes: dict[str, int]) -> str:
    """Returns the result file."""
    whole, body = parts["scrape of all"], sizes["page, compressed"]
    kept = whole <= AIM_MS and body <= AIM_BYTES
    return "\n".join(
        [
            "# Scrapes",
            "",
            f"{FRONTENDS} frontends that share a port, {MODELS} models with names of 38",
            f"characters each; CPU time, best of {ROUNDS} rounds. Repeat with",
            "`python bench/micro/scrape.py`.",
            "",
            *[f"- {fact}" for fact in facts()],
            "",
            "| what | ms |",
            "|---|---:|",
            *[f"| {name} | {took:.1f} |" for name, took in parts.items()],
            "",
            "| what | size |",
            "|---|---:|",
            *[f"| {name} | {size:,} |" for name, size in sizes.items()],
            "",
            f"The aims for a scrape of all are {AIM_MS:.0f} ms and {AIM_BYTES:,} bytes as they",
            f"travel: {'kept' if kept else 'missed'}. Prometheus asks for compressed pages; a",
            f"scraper that does not gets {sizes['page'] / AIM_BYTES:.1f} times as many.",
            "",
        ]
    )


if __name__ == "__main__":
    text = report(*measure())
    RESULT.write_text(text)
    print(text)
