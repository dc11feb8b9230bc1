"""A server's numbers, from two scrapes."""

from __future__ import annotations

import math

import pytest

from pdserve.cli.dashboard import MetricsPage, dashboard, quantile

PAGE = """
# TYPE pdserve_requests counter
pdserve_requests_total{{outcome="stop"}} {stop}
pdserve_requests_total{{outcome="length"}} 2
# TYPE pdserve_prompt_tokens counter
pdserve_prompt_tokens_total {prompt}
# TYPE pdserve_cached_prompt_tokens counter
pdserve_cached_prompt_tokens_total {cached}
# TYPE pdserve_kv_cache_usage_ratio gauge
pdserve_kv_cache_usage_ratio 0.25
# TYPE pdserve_time_to_first_token_seconds histogram
pdserve_time_to_first_token_seconds_bucket{{le="0.1"}} {fast}
pdserve_time_to_first_token_seconds_bucket{{le="0.2"}} {all}
pdserve_time_to_first_token_seconds_bucket{{le="+Inf"}} {all}
pdserve_time_to_first_token_seconds_count {all}
pdserve_time_to_first_token_seconds_sum 1
"""


def page(at: float, stop: int, prompt: int, cached: int, fast: int, total: int) -> MetricsPage:
    text = PAGE.format(stop=stop, prompt=prompt, cached=cached, fast=fast, all=total)
    return MetricsPage.read(text, at)


def test_rates_are_of_the_window_and_latencies_too() -> None:
    pages = [page(10.0, 100, 1000, 0, 100, 100), page(15.0, 110, 1500, 100, 100, 120)]
    text = dashboard(pages, {"status": "ok"}, "http://x")
    assert "over the last 5 s" in text
    assert "requests    2.0/s" in text
    assert "100.0/s of prompts, 20% of these cached" in text
    assert "TTFT        p50 150.0 ms, p99 199.0 ms" in text, "the hundred fast ones came before"
    assert "[#####...............] 25%" in text


def test_one_look_shows_sums_and_a_restarted_server_begins_again() -> None:
    first = page(10.0, 100, 1000, 0, 100, 100)
    assert "requests    102" in dashboard([first], {}, "http://x")
    again = dashboard([first, page(11.0, 3, 10, 0, 1, 1)], {}, "http://x")
    assert "requests    5.0/s" in again
    assert "TTFT        p50 50.0 ms" in again


def test_what_is_degraded_is_named_without_control_characters() -> None:
    health = {"status": "ok", "degraded": {"kv": "slow\x1b[2J"}}
    text = dashboard([page(1.0, 0, 0, 0, 0, 0)], health, "http://x")
    assert "DEGRADED\n  kv: slow" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ({}, 0.5, math.nan),
        ({1.0: 0, math.inf: 0}, 0.5, math.nan),
        ({1.0: 10, 2.0: 10, math.inf: 10}, 0.5, 0.5),
        ({1.0: 0, 2.0: 10, math.inf: 10}, 0.5, 1.5),
        ({1.0: 0, 2.0: 0, math.inf: 10}, 0.99, 2.0),
    ],
)
def test_quantiles_of_histograms(counts, share, value) -> None:
    assert quantile(counts, share) == pytest.approx(value, nan_ok=True)


def test_what_is_no_page_of_metrics_is_an_error() -> None:
    with pytest.raises(ValueError, match="metric name"):
        MetricsPage.read("<html>not numbers</html>", 0.0)
