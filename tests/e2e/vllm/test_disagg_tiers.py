"""Prefill and decode workers with vLLM and tiers beside an aggregated one, as real processes.

The prefill worker fetches what the third worker has; the decode worker loads what it has evicted.
The counters of the worker that receives, and vLLM's own of what it computes, say so.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import eventually
from tests.e2e.tiers import tier_count
from tests.e2e.vllm.cluster import BLOCK, LOADING, VllmCluster
from tests.e2e.vllm.test_disaggregation import BLOCK_BYTES, all_healthy, total
from tests.e2e.vllm.test_tiers import (
    ANSWER,
    LENGTH,
    REUSED,
    TIERS,
    evict,
    prompt,
    put,
    wait_computed,
    wait_known,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.chaos.cluster import Node

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(one_in=4, turn=0),  # it loads three engines
    pytest.mark.timeout(900),
]

COMPUTED = "pdserve_computed_tokens_total"
PULLED = "pdserve_kv_pulled_bytes_total"
RECEIVED = 'pdserve_transfer_bytes_total{backend="shm",direction="received"}'
LATE = 3.0
"""Seconds; counters are late by one, and each may be late by itself."""


@pytest.fixture(scope="module")
def apart(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    """`owner` does both, `d` decodes what `p` has prefilled; each has a host tier."""
    with VllmCluster(tmp_path_factory.mktemp("apart"), tiny) as cluster:
        cluster.router()
        cluster.with_vllm("owner", *TIERS)
        first = cluster.with_vllm("p", "--mode", "prefill", *TIERS)
        cluster.with_vllm(
            "d", "--mode", "decode", "--disagg", "always", "--transfer", "shm", *TIERS
        )
        cluster.front = cluster.frontend()
        eventually(all_healthy([first]), lambda: first.lines, LOADING)
        eventually(
            lambda: {"owner", "d"} <= {*cluster.sound()},
            lambda: [node.lines for node in cluster.workers.values()],
            LOADING,
        )
        yield cluster


def at_rest(node: Node, *metrics: str) -> list[float]:
    """The counters, once none has changed for some seconds."""
    seen, since = [total(node, metric) for metric in metrics], time.monotonic()

    def same() -> bool:
        nonlocal seen, since
        now = [total(node, metric) for metric in metrics]
        if now != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > LATE

    eventually(same, lambda: seen)
    return seen


def wait_total(node: Node, metric: str, value: float) -> None:
    eventually(lambda: total(node, metric) == value, lambda: (metric, total(node, metric), value))


def test_the_prefill_worker_fetches_what_a_third_one_has(apart: VllmCluster) -> None:
    first, tokens = apart.workers["p"], prompt("of a third one")
    there = put(apart, "owner", tokens)
    wait_known(apart, "owner", tokens)
    before, pulled = at_rest(first, COMPUTED, PULLED)
    served = total(apart.workers["owner"], "pdserve_kv_served_bytes_total")
    found = put(apart, "d", tokens)
    assert found.tokens == there.tokens
    assert found.cached == {"prefill-peer": REUSED}
    wait_computed(first, int(before) + LENGTH - REUSED)
    moved = REUSED // BLOCK * BLOCK_BYTES
    wait_total(first, PULLED, pulled + moved)
    wait_total(apart.workers["owner"], "pdserve_kv_served_bytes_total", served + moved)
    assert total(first, 'pdserve_kv_plans_total{source="peer"}') == 1


def test_the_decode_worker_loads_what_it_has_evicted(apart: VllmCluster) -> None:
    """The prefill worker sends the last, partly filled block alone."""
    decode, tokens = apart.workers["d"], prompt("its own")
    cold = put(apart, "d", tokens)
    assert cold.cached == {}
    wait_known(apart, "d", tokens)
    assert evict(apart, "d", tokens, "host")
    before, received = at_rest(decode, COMPUTED, RECEIVED)
    hits = tier_count(decode, "host", "hit_tokens_total")
    warm = put(apart, "d", tokens)
    assert warm.tokens == cold.tokens
    assert warm.cached["host"] == REUSED
    wait_computed(decode, int(before) + ANSWER)
    wait_total(decode, RECEIVED, received + BLOCK_BYTES)
    assert tier_count(decode, "host", "hit_tokens_total") == hits + REUSED
