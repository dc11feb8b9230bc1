"""Replays whose workers have tiers below the device, or fetch from each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from pdserve.router.onboarding import onboarding_plans
from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.replay.run import ReplayResult, replay
from pdserve.sim.workloads.generate import SharedPrefix

TOKEN = 131_072
"""Bytes of KV of a token of the simulated model."""
SMALL = ReplayConfig(workers=3, block_size=64, kv_tokens=8_000, seed=1)
TRACE = SharedPrefix(requests=60, rate=4.0, groups=8, prefix=3200, question=64, output=8)
HOST = 200_000 * TOKEN


@cache
def run(**changes: Any) -> ReplayResult:
    return made(**changes)


def made(**changes: Any) -> ReplayResult:
    result = replay(replace(SMALL, **changes), iter(TRACE))
    assert result.summary["outcomes"]["completed"] == 60
    whole = sum(record.prompt_tokens for record in result.records)
    assert sum(tokens(result).values()) == whole
    for worker in result.workers:
        for tier in worker["tiers"].values():
            assert 0 <= tier["blocks_valid"] <= tier["blocks_total"]
            assert tier["failed"] == 0
    return result


def tokens(result: ReplayResult) -> dict[str, int]:
    found: dict[str, int] = result.summary["prompt_tokens"]
    return found


def told(result: ReplayResult, tier: str) -> int:
    """Tokens that workers say have come from a tier."""
    return sum(worker["tiers"][tier]["hit_tokens"] for worker in result.workers)


def test_what_the_device_evicts_is_found_on_the_host() -> None:
    plain, tiered = run(), run(host_kv=HOST)
    assert tokens(plain)["host"] == 0
    assert all(not worker["tiers"] for worker in plain.workers)
    assert tokens(tiered)["host"] > 15_000
    assert tokens(tiered)["host"] == pytest.approx(told(tiered, "host"), rel=0.3)
    assert tokens(tiered)["computed"] < 0.75 * tokens(plain)["computed"]
    assert tiered.summary["ttft"]["mean"] < plain.summary["ttft"]["mean"]


def test_routers_count_that_a_prefill_begins_before_the_last_layers_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = Counter[int]()

    def plans(*known: Any) -> Any:
        found = onboarding_plans(*known)
        groups.update(plan.groups for plan in found.values())
        return found

    monkeypatch.setattr("pdserve.router.core.onboarding_plans", plans)
    result = made(host_kv=HOST)
    assert groups[4] > 10
    early = [worker["tiers"]["host"] for worker in result.workers]
    assert sum(tier["early_starts"] for tier in early) > 3
    assert sum(tier["early_failed"] for tier in early) == 0


def test_routers_send_prompts_to_the_host_that_has_them() -> None:
    knowing, blind = run(host_kv=HOST), run(host_kv=HOST, policy="random")
    assert tokens(knowing)["computed"] < 0.8 * tokens(blind)["computed"]


def test_workers_fetch_from_each_other() -> None:
    """With random routing, so that each worker is asked for every prefix."""
    alone, pool = (run(policy="random", host_kv=HOST, kv_fetch=how) for how in ("never", "auto"))
    assert tokens(alone)["peer"] == 0
    assert tokens(pool)["peer"] > 10_000
    assert tokens(pool)["computed"] < 0.8 * tokens(alone)["computed"]
    peers = [record for record in pool.records if "peer" in record.sources]
    assert peers
    assert all(record.sources["peer"] % 64 == 0 for record in peers)


@pytest.mark.long
def test_a_replay_with_tiers_repeats() -> None:
    changes: dict[str, Any] = {"policy": "random", "host_kv": HOST, "kv_fetch": "auto"}
    assert made(**changes).plain() == run(**changes).plain()


def test_a_link_that_is_slow_is_left_alone() -> None:
    slow = run(policy="random", kv_fetch="auto", bandwidth=1e8)
    assert tokens(slow)["peer"] < 0.1 * tokens(slow)["computed"]
