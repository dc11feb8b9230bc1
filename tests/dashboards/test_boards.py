"""All boards: metrics and labels of every expression exist, and every panel explains itself."""

from __future__ import annotations

import re

from grafana_foundation_sdk.models import units

from pdserve.dashboards.alerts import Promise, recordings
from pdserve.dashboards.boards import BOARDS
from pdserve.dashboards.table import Query, selected
from pdserve.observe.metrics import Metrics
from tests.support.promql import Reading, Registry

REGISTRY = Registry(Metrics.definitions(), {one.name: one.expr for one in recordings(Promise())})
PANELS = [panel for board in BOARDS for row in board.rows for panel in row.panels]
QUERIES = [query for panel in PANELS for query in panel.queries]
UNITS = {name for name in vars(units).values() if isinstance(name, str)}
"""Grafana's names of units: an unknown one would be printed behind each number."""
MOST_RARE = 15
"""Queries that may be empty on a sound cluster."""


def problems(query: Query) -> list[str]:
    return [f"{query.expr}: {problem}" for problem in REGISTRY.problems(selected(query.expr))]


def test_every_metric_and_label_exists() -> None:
    assert [problem for query in QUERIES for problem in problems(query)] == []


def test_a_metric_that_does_not_exist_is_found() -> None:
    query = Query("sum by (model) (rate(pdserve_request_total{MODEL}[RATE]))", "")
    assert problems(query) == [f"{query.expr}: there is no pdserve_request_total"]


def test_every_panel_explains_itself() -> None:
    for panel in PANELS:
        assert panel.title
        assert panel.description.endswith("."), panel.title
        assert panel.unit in UNITS, panel.title
        assert panel.queries, panel.title


def test_every_query_follows_the_variables() -> None:
    for query in QUERIES:
        for one in Reading(selected(query.expr)).selectors:
            if one.metric != "pdserve:error_budget":
                assert one.matchers.get("cluster") == "$cluster", query.expr


def test_legends_of_a_panel_differ() -> None:
    for panel in PANELS:
        legends = [query.legend for query in panel.queries]
        assert len(legends) == len(set(legends)), panel.title


def test_labels_of_legends_are_labels_of_results() -> None:
    """`{{model}}` of an expression that sums over models would be empty."""
    for query in QUERIES:
        groups = [set(one.labels) for one in Reading(selected(query.expr)).groupings]
        for label in re.findall(r"{{(\w+)}}", query.legend):
            assert not groups or any(label in labels for labels in groups), query


def test_few_queries_are_rare() -> None:
    assert sum(query.rare for query in QUERIES) <= MOST_RARE


def test_boards_have_names_of_their_own() -> None:
    assert len({board.uid for board in BOARDS}) == len({board.title for board in BOARDS}) == 5
