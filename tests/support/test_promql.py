"""The reader of PromQL: what it finds, and the mistakes that it must find."""

from __future__ import annotations

import pytest

from pdserve.observe.metrics import Definition
from tests.support.promql import Reading, Registry

DEFINITIONS = (
    Definition("pdserve_requests_total", "counter", "By outcome: done, lost.", "x", ("outcome",)),
    Definition("pdserve_wait_seconds", "histogram", "Waits.", "x", ("model",)),
    Definition("pdserve_ready", "gauge", "Ready.", "x"),
)
REGISTRY = Registry(DEFINITIONS, {"pdserve:ratio:5m": "sum by (cluster) (rate(pdserve_ready[5m]))"})

SOUND = (
    'sum by (outcome) (rate(pdserve_requests_total{cluster=~"$cluster", outcome!="x|y"}[5m]))',
    "histogram_quantile(0.9, sum by (le, model) (rate(pdserve_wait_seconds_bucket[$__range])))",
    "pdserve:ratio:5m > 1.5e3 and on (cluster) (pdserve_ready offset 1d) == 0",
    'max_over_time(pdserve_ready{instance="a}b"}[1h]) unless pdserve_ready > 0',
    'count(up == 0) or vector(0) * -2 ^ sum(pdserve_requests_total{outcome="lost"})',
)
WRONG = {
    "pdserve_request_total": "there is no pdserve_request_total",
    "rate(pdserve_wait_seconds[5m])": "there is no pdserve_wait_seconds",
    "pdserve_ready_bucket": "there is no pdserve_ready_bucket",
    'pdserve_ready{model="a"}': "pdserve_ready has no label model",
    "sum by (model) (pdserve_ready)": "nothing has the label model in pdserve_ready",
    "sum by (le) (pdserve_wait_seconds_sum)": (
        "nothing has the label le in pdserve_wait_seconds_sum"
    ),
    'pdserve_requests_total{outcome="gone"}': (
        "the help of pdserve_requests_total does not name the value gone of outcome"
    ),
    "pdserve:ratio:1h": "there is no pdserve:ratio:1h",
    "sum by (outcome) (pdserve_ready) / sum by (outcome) (pdserve_requests_total)": (
        "nothing has the label outcome in pdserve_ready"
    ),
}


def test_metrics_matchers_and_groups_are_found() -> None:
    reading = Reading('sum by (a, b) (rate(m{x="1", y=~"2,3"}[5m])) / on (c) group_left () n')
    assert [(one.metric, one.matchers) for one in reading.selectors] == [
        ("m", {"x": "1", "y": "2,3"}),
        ("n", {}),
    ]
    assert [one.labels for one in reading.groupings] == [("a", "b"), ("c",), ()]


@pytest.mark.parametrize("expr", SOUND)
def test_what_exists_is_no_problem(expr: str) -> None:
    assert list(REGISTRY.problems(expr)) == []


@pytest.mark.parametrize("expr", WRONG)
def test_what_does_not_exist_is_found(expr: str) -> None:
    assert WRONG[expr] in list(REGISTRY.problems(expr))


@pytest.mark.parametrize("expr", ["sum(a", "a{b", "a#b"])
def test_what_is_not_closed_or_unreadable_is_an_error(expr: str) -> None:
    with pytest.raises(ValueError, match=r"not closed|unreadable"):
        list(REGISTRY.problems(expr.replace("sum(", "sum by (a) (")))
