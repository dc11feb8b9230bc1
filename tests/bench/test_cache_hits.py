"""The replay of a cache against a plain LRU list, on traces of our own."""

from __future__ import annotations

from random import Random

import pytest

from bench.cache_hits import ideal_rate, lru_rate, pool_rate
from pdserve.sim.workloads.mooncake import BLOCK


def grown(seed: int) -> list[list[int]]:
    """Prompts that continue earlier ones: an id stands for its whole prefix."""
    random, known, number = Random(seed), [[0]], 0
    for _ in range(400):
        stem = random.choice(known[-40:])
        prompt = stem[: random.randint(1, len(stem))]
        fresh = random.randint(0, 5)
        prompt = prompt + [number + 1 + i for i in range(fresh)]
        number += fresh
        known.append(prompt)
    return known


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("blocks", [30, 80, 200])
def test_the_pool_hits_as_a_list_of_blocks_in_order_of_use(seed: int, blocks: int) -> None:
    prompts = grown(seed)
    rate = pool_rate(prompts, blocks * BLOCK)
    assert rate == lru_rate(prompts, blocks * BLOCK)
    assert 0 < rate <= ideal_rate(prompts)


def test_a_pool_for_all_hits_as_often_as_one_can() -> None:
    prompts = grown(7)
    assert pool_rate(prompts, 10_000 * BLOCK) == ideal_rate(prompts)
