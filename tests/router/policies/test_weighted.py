"""Four marks and three ways to select."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from pdserve.router.policies.weighted import Weighted
from tests.router.policies.support import ask, snapshot, weighed, worker


def test_each_mark_counts_by_its_weight():
    busy = worker("a", 8, 8, ttft=1.0, blocks_total=100, blocks_used=75)
    state = snapshot([busy, worker("b", ttft=2.0)], overlaps={"a": 5})
    terms = weighed(Weighted(), ask(10), state)
    assert terms["a"] == pytest.approx(
        {"cache": 0.5, "load": 0.5, "latency": 0.5, "memory": 0.25, "score": 0.475}
    )
    assert terms["b"]["score"] == pytest.approx(0.3 + 0.0 + 0.1)


@pytest.mark.parametrize(("mark", "better"), [
    ("cache", "a"), ("load", "b"), ("latency", "b"), ("memory", "b"),
])  # fmt: skip
def test_one_weight_alone_decides(mark: str, better: str):
    weights: dict[str, Any] = dict.fromkeys(("cache", "load", "latency", "memory"), 0.0) | {
        mark: 1.0
    }
    policy = Weighted(**{f"{name}_weight": value for name, value in weights.items()})
    used = {"blocks_total": 100, "blocks_used": 75}
    state = snapshot([worker("a", 6, ttft=2.0, **used), worker("b", ttft=1.0)], overlaps={"a": 9})
    assert policy(ask(10), state, Random()).node == better


def test_a_draw_follows_the_scores():
    policy, random = Weighted(select="weighted_random"), Random(5)
    state = snapshot([worker("a"), worker("b", 8)], overlaps={"a": 10})  # 1.0 and 0.45
    drawn = Counter(str(policy(ask(10), state, random).node) for _ in range(650))
    assert 390 < drawn["a"] < 510


def test_of_scores_alike_the_least_busy():
    policy = Weighted(select="load_balanced")
    state = snapshot([worker("a", 2), worker("b", 1)], overlaps={"a": 10, "b": 9})
    assert policy(ask(10), state, Random()).node == "b"
    assert Weighted()(ask(10), state, Random()).node == "a"


@pytest.mark.parametrize(
    "options", [{"cache_weight": -1.0}, {"select": "best"}, {f"{m}_weight": 0.0 for m in (
        "cache", "load", "latency", "memory")}]
)  # fmt: skip
def test_options_that_cannot_work_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match="must"):
        Weighted(**options)
