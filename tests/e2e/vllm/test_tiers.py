"""Prompts whose KV comes from the other worker, from host memory and from disk, as real processes.

Where it came from is said by the answer, and vLLM's own counter says that it was not computed.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import eventually
from tests.e2e.tiers import ask, tier_count
from tests.e2e.vllm.cluster import BLOCK, VllmCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.chaos.cluster import Node
    from tests.e2e.tiers import Answer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.long(one_in=2, turn=1)]

REUSED = 4 * BLOCK
LENGTH = REUSED + 5
ANSWER = 8
PULLED = "pdserve_kv_pulled_bytes_total"
PLANS = 'pdserve_kv_plans_total{source="peer"}'
TIERS = (
    *("--kv-memory", "8MiB", "--host-kv", "8MiB", "--host-kv-admission", "all"),
    *("--kv-fetch", "always"),
)
"""A device and a host of 256 blocks each, and fetches of whatever the other worker has."""


@pytest.fixture(scope="module")
def running(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    """A cluster of its own: small devices and fetches change what routers choose. One worker has
    a disk tier, too, which takes blocks out of its host tier early."""
    folder = tmp_path_factory.mktemp("tiers")
    disk = ("--disk-kv", f"{folder / 'disk'}:64MiB", "--disk-kv-write-budget", "1TiB")
    with VllmCluster(folder, tiny) as cluster:
        cluster.open(left=(*TIERS, *disk), right=TIERS)
        yield cluster


def prompt(seed: object, length: int = LENGTH) -> list[int]:
    """Four whole blocks and a few tokens."""
    return random.Random(f"vllm {seed}").choices(range(10, 200), k=length)


def rest(tokens: list[int], cached: int) -> int:
    """Tokens to compute: the prompt's others, and of the answer all but its last one."""
    return len(tokens) - cached + ANSWER - 1


def put(cluster: VllmCluster, worker: str, tokens: list[int]) -> Answer:
    return ask(cluster.front, tokens, worker, return_token_ids=True, max_tokens=ANSWER)


def known(cluster: VllmCluster, worker: str, tokens: list[int]) -> dict[str, int]:
    """Where the router knows a worker to have tokens of a prompt."""
    found = cluster.front.post("/route", {"model": "tiny", "prompt": tokens})
    sources: dict[str, int]
    (sources,) = (one["reused_tokens"] for one in found["candidates"] if one["worker"] == worker)
    return sources


def wait_known(cluster: VllmCluster, worker: str, tokens: list[int]) -> None:
    """Until the router knows that a worker has the prompt."""
    eventually(
        lambda: sum(known(cluster, worker, tokens).values()) == REUSED,
        lambda: (worker, known(cluster, worker, tokens)),
    )


def computed(node: Node) -> int:
    """Tokens that vLLM says it has computed."""
    return int(node.count("pdserve_computed_tokens_total"))


def wait_computed(node: Node, tokens: int) -> None:
    eventually(lambda: computed(node) == tokens, lambda: (node.name, computed(node), tokens))


# ---------------------------------------------------------------------- from the other worker


def test_a_prefix_of_another_worker_is_fetched(cluster: VllmCluster) -> None:
    asker, owner, tokens = cluster.workers["right"], cluster.workers["left"], prompt("theirs")
    there = put(cluster, "left", tokens)
    assert there.cached == {}
    wait_known(cluster, "left", tokens)
    before, pulled, planned = computed(asker), asker.count(PULLED), asker.count(PLANS)
    served = owner.count("pdserve_kv_served_bytes_total")
    fetched = put(cluster, "right", tokens)
    assert len(fetched.tokens) == ANSWER
    assert fetched == there._replace(worker="right", cached={"peer": REUSED}, node="left")
    wait_computed(asker, before + rest(tokens, REUSED))
    assert asker.count(PULLED) > pulled
    assert asker.count(PLANS) == planned + 1
    assert owner.count("pdserve_kv_served_bytes_total") > served
    again = put(cluster, "right", tokens)
    assert again == there._replace(worker="right", cached={"device": REUSED})


@pytest.mark.long
def test_an_owner_that_is_killed_in_the_middle_of_a_pull_costs_only_time(
    cluster: VllmCluster,
) -> None:
    """Its engine stands still when it is asked, and is killed then."""
    owner, asker, tokens = cluster.workers["left"], cluster.workers["right"], prompt("lost")
    there = put(cluster, "left", tokens)
    wait_known(cluster, "left", tokens)
    core, found = owner.core(), []
    pulls = asker.count("pdserve_kv_pulls_total")
    core.suspend()
    request = threading.Thread(target=lambda: found.append(put(cluster, "right", tokens)))
    request.start()
    try:
        eventually(
            lambda: found or asker.count("pdserve_kv_pulls_total") > pulls, "no pull has begun"
        )
    finally:
        core.kill()
        request.join()
    assert found == [there._replace(worker="right")]
    cluster.wait_whole()


# ---------------------------------------------------------------------- from lower tiers

EVICTED = 60 * BLOCK
"""Reusable tokens of a prompt that takes longer to compute than to load, on most machines."""
ATTEMPTS = 6
"""On a busy machine, blocks are evicted before they are stored, or computing is sooner."""


@pytest.mark.parametrize(("name", "tier"), [("right", "host"), ("left", "disk")])
def test_what_vllm_evicts_comes_back(cluster: VllmCluster, name: str, tier: str) -> None:
    """The answer is right whatever is loaded, and once it is loaded from this tier."""
    prompts = (prompt(f"{tier} {number}", EVICTED + 5) for number in range(ATTEMPTS))
    assert any(tier in comes_back(cluster, name, tokens, tier) for tokens in prompts)


def comes_back(cluster: VllmCluster, name: str, tokens: list[int], tier: str) -> dict[str, int]:
    """Have a worker evict a prompt, and ask it again; returns the loaded tokens by tier."""
    worker, cold = cluster.workers[name], put(cluster, name, tokens)
    assert cold.cached == {}
    eventually(lambda: known(cluster, name, tokens), "the router knows of no block")
    if not evict(cluster, name, tokens, tier):
        return {}
    before, hits = computed(worker), tier_count(worker, tier, "hit_tokens_total")
    warm = put(cluster, name, tokens)
    assert warm == cold._replace(cached=warm.cached)
    wait_computed(worker, before + rest(tokens, sum(warm.cached.values())))
    assert tier_count(worker, tier, "hit_tokens_total") == hits + warm.cached.get(tier, 0)
    return warm.cached


def evict(cluster: VllmCluster, name: str, tokens: list[int], tier: str) -> bool:
    """Ask for other prompts until nothing of this one is on the device, and some on a tier; False:
    it is nowhere."""
    for number in range(90):
        places = known(cluster, name, tokens)
        if not places or (tier in places and "device" not in places):
            return bool(places)
        put(cluster, name, prompt(f"not {tokens[:8]} {number}", 10 * BLOCK))
    raise AssertionError(f"it is on {places}")
