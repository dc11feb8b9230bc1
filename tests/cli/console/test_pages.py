"""A server's overview, from its `/metrics` pages."""

from __future__ import annotations

import pytest

from pdserve.cli.console.head import head_lines
from pdserve.cli.console.pages import MetricsPage, overview_of_pages
from pdserve.observe.exposition import render
from pdserve.observe.metrics import Metrics
from pdserve.observe.slo import SloVerdict


def scraped(metrics: Metrics, at: float) -> MetricsPage:
    return MetricsPage.read(render(metrics.families()).decode(), at)


def answered(metrics: Metrics, model: str, ttft: float, times: int = 1) -> None:
    one = metrics.of_model(model)
    for _ in range(times):
        one.time_to_first_token.observe(ttft)
        one.inter_token_latency.observe(0.004, 9)
        one.request_prompt_tokens.observe(100)
        one.request_uncached_tokens.observe(75)
        one.judged([SloVerdict("both", "good")])
        one.ended("completed")


def test_rates_and_latencies_are_those_between_two_scrapes() -> None:
    metrics = Metrics()
    answered(metrics, "a", 0.0005, 100)
    first = scraped(metrics, 10.0)
    answered(metrics, "a", 0.15, 10)
    metrics.of_model("b").ended("overloaded")
    seen = overview_of_pages([first, scraped(metrics, 15.0)], {"status": "ok"}, "http://x")
    assert seen.seconds == 5.0
    assert seen.all.requests == pytest.approx(2.2)
    assert seen.all.errors == pytest.approx(0.2)
    assert seen.all.input == pytest.approx(200.0)
    assert seen.all.output == pytest.approx(20.0)
    assert seen.all.cached == pytest.approx(0.25)
    assert seen.all.kept("both") == 1.0
    assert seen.models["a"].requests == pytest.approx(2.0)
    text = "\n".join(head_lines(seen))
    assert "http://x is ok  (last 5 s)" in text
    assert "TTFT      p50 175 ms   p99 249 ms" in text, "the hundred fast ones came before"


def test_one_scrape_is_since_the_start_and_a_restarted_server_begins_again() -> None:
    metrics = Metrics()
    answered(metrics, "a", 0.15, 20)
    page = scraped(metrics, 10.0)
    assert overview_of_pages([page], {"uptime_seconds": 10}, "x").all.requests == 2.0
    unknown = overview_of_pages([page], {}, "x")
    assert (unknown.seconds, unknown.all.requests, list(unknown.models)) == (0.0, 0.0, ["a"])
    again = Metrics()
    answered(again, "a", 0.15, 5)
    assert overview_of_pages([page, scraped(again, 11.0)], {}, "x").all.requests == 5.0


def test_what_health_says_is_part_of_it() -> None:
    health = {"status": "loading", "reason": "weights", "degraded": {"kv": "slow\x1b[2J"}}
    seen = overview_of_pages([MetricsPage(0.0)], health, "u")
    assert head_lines(seen)[0] == "u is loading (weights)  (now)"
    assert seen.degraded == [("degraded", "kv: slow\x1b[2J")]


def test_what_is_no_page_of_metrics_is_an_error() -> None:
    with pytest.raises(ValueError, match="metric name"):
        MetricsPage.read("<html>not numbers</html>", 0.0)


@pytest.mark.parametrize(
    "page", ['pdserve_x_bucket{model="a",le="z"} 3\n', "x{,\t=#l,e..N}E+Pb{..\n"]
)
def test_a_page_that_only_looks_like_one_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match=r"could not convert|no page"):
        MetricsPage.read(page, 0.0)


def test_numbers_that_are_none_count_nothing() -> None:
    page = MetricsPage.read(
        "pdserve_num_requests_running NaN\npdserve_kv_blocks +Inf\n"
        'pdserve_slo_total{model="a",objective="ttft",result="good"} NaN\n',
        0.0,
    )
    seen = overview_of_pages([page], {}, "u")
    assert (seen.running, seen.blocks, seen.all.kept("ttft")) == (0, 0, None)
