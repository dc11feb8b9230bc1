"""SGLang's rule, branch by branch, with both its sets of defaults."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pdserve.router.policies.approx_prefix import ApproxPrefix
from tests.router.policies.support import ask, snapshot, worker


def chosen(policy: ApproxPrefix, *counts: int, routed: dict[str, int], **sizes: int) -> str:
    workers = [worker(node, count, 1000) for node, count in zip("abc", counts, strict=False)]
    state = snapshot(workers, routed=routed, routed_blocks=sizes)
    return policy(ask(10), state, Random(3)).node


def test_a_match_over_the_threshold_wins():
    assert chosen(ApproxPrefix(), 5, 0, routed={"a": 4}) == "a"


@pytest.mark.parametrize(("preset", "blocks", "wins"), [
    ("command_line", 3, False), ("command_line", 4, True), ("library", 5, False),
    ("library", 6, True),
])  # fmt: skip
def test_the_threshold_is_the_presets(preset: str, blocks: int, *, wins: bool):
    policy = ApproxPrefix(preset=preset)
    assert (chosen(policy, 9, 0, routed={"a": blocks}, a=blocks) == "a") is wins


@pytest.mark.parametrize(("preset", "spread"), [("command_line", 64), ("library", 32)])
def test_queues_that_drift_apart_are_levelled_first(preset: str, spread: int):
    policy = ApproxPrefix(preset=preset)
    assert chosen(policy, spread, 0, routed={"a": 10}) == "a"
    assert chosen(policy, spread + 1, 0, routed={"a": 10}) == "b"


def test_a_large_spread_between_large_queues_is_no_imbalance():
    assert chosen(ApproxPrefix(), 299, 200, routed={"a": 10}) == "a"
    assert chosen(ApproxPrefix(), 301, 200, routed={"a": 10}) == "b"


def test_a_miss_goes_to_the_smallest_tree_or_to_the_least_busy():
    sizes = {"a": 5, "b": 90, "c": 80}
    assert chosen(ApproxPrefix(), 9, 0, 3, routed={}, **sizes) == "a"
    assert chosen(ApproxPrefix(miss="least_loaded"), 9, 0, 3, routed={}, **sizes) == "b"


def test_among_equal_matches_the_least_busy_wins():
    assert chosen(ApproxPrefix(), 5, 2, 0, routed={"a": 8, "b": 8, "c": 4}) == "b"


def test_it_asks_for_the_routers_own_memory():
    assert ApproxPrefix.needs_routed


@pytest.mark.parametrize("options", [{"preset": "other"}, {"miss": "other"}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match="must be"):
        ApproxPrefix(**options)
