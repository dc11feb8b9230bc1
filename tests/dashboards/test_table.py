"""Templates of expressions."""

from __future__ import annotations

import pytest

from pdserve.dashboards.table import selected


@pytest.mark.parametrize(
    ("template", "expr"),
    [
        ("a{MODEL}", 'a{cluster=~"$cluster", model=~"$model"}'),
        ('a{CLUSTER, b="CLUSTER"}', 'a{cluster=~"$cluster", b="CLUSTER"}'),
        (
            "rate(a{PROCESS}[RATE])",
            'rate(a{job=~"pdserve.*", cluster=~"$cluster", instance=~"$worker"}[$__rate_interval])',
        ),
        (
            "a{WORKER}\n  + b",
            'a{cluster=~"$cluster", model=~"$model", instance=~"$worker"} + b',
        ),
        ("a{MODELS} + MODEL", "a{MODELS} + MODEL"),
    ],
)
def test_a_template_becomes_an_expression(template: str, expr: str) -> None:
    assert selected(template) == expr
