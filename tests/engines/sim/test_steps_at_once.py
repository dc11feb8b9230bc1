"""Many steps as one: nothing but the number of events may differ from single steps."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.messages.engine import ClearCache, SetHashSecret
from pdserve.messages.kv_events import BlockRemoved, BlockStored, KvEvent, PoolCleared
from tests.engines.sim.driver import Driver, request, spec

if TYPE_CHECKING:
    from pdserve.kv.block_pool import BlockPool
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.request import GenerateRequest

Deed = tuple[float, str, Any]
CORNERS = {"saved", "preempted", "cached", "rejected", "aborted", "deadline", "evicted"}


def random_spec(rng: random.Random, steps: int) -> EngineSpec:
    size, length = rng.choice([1, 4, 4, 8]), rng.choice([26, 60, 96])
    return spec(
        steps_at_once=steps,
        block_size=size,
        max_model_len=length,
        blocks=-(-length // size) + rng.choice([0, 3, 8, 30, 300]),
        max_sequences=rng.choice([1, 2, 4, 8]),
        max_batch_tokens=rng.choice([8, 16, 64]),
        max_waiting=rng.choice([3, 100]),
        prefix_cache=rng.random() < 0.8,
        noise=rng.choice([0.0, 0.3]),
        slowdown=rng.choice([1.0, 1.0, 20.0]),
        preset=rng.choice(["h100-8b", "h200-70b", "dynamo-mocker"]),
    )


def random_request(rng: random.Random, longest: int) -> GenerateRequest:
    stem = [rng.choice([5, 6])] * rng.choice([0, 4, 8, 12])
    prompt = stem + rng.choices(range(4, 97), k=rng.randint(1, 8))
    n = rng.choice([1, 1, 1, 2, 3])
    return request(
        prompt,
        n=n,
        output=[rng.choices(range(97), k=rng.randint(0, 4)) for _ in range(n)]
        if rng.random() < 0.2
        else [],
        priority=rng.choice([0, 0, 1]),
        deadline=rng.choice([None, None, rng.uniform(0.0, 3.0)]),
        max_tokens=rng.randint(1, longest),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randint(0, 3),
        stop_token_ids=tuple(rng.choices(range(4, 97), k=rng.choice([0, 0, 3]))),
        min_tokens=rng.choice([0, 0, 5]),
        logprobs=rng.choice([None, None, None, 1]),
    )


def random_deeds(rng: random.Random, longest: int) -> list[Deed]:
    span = rng.choice([0.05, 1.0, 5.0])
    deeds: list[Deed] = []
    for number in range(1, rng.randint(2, 24)):
        at = rng.uniform(0.0, span)
        deeds.append((at, "submit", random_request(rng, longest)))
        if rng.random() < 0.2:
            deeds.append((at + rng.uniform(0.0, span / 4), "abort", number))
    deeds += [(rng.uniform(0.0, span), "clear", None) for _ in range(rng.choice([0, 0, 1]))]
    if rng.random() < 0.2:
        deeds.append((rng.uniform(0.0, span), "rekey", None))
    return sorted(deeds, key=lambda deed: deed[0])


def live(spec: EngineSpec, deeds: list[Deed]) -> Driver:
    with Driver(spec) as driver:
        for at, deed, what in deeds:
            driver.run_until(at)
            match deed:
                case "submit":
                    driver.submit(what)
                case "abort" if what in driver.story.ledgers:
                    driver.abort(what)
                case "clear":
                    driver.tell(ClearCache())
                case "rekey":
                    driver.tell(SetHashSecret(hash_secret=b"another"))
        driver.run()
        driver.core.pool.check()
        return driver


def flat(events: list[KvEvent]) -> list[tuple[Any, ...]]:
    """Block by block: runs may be cut anywhere."""
    found: list[tuple[Any, ...]] = []
    for event in events:
        match event:
            case BlockStored():
                parents = [event.parent, *event.hashes]
                found += [("stored", *pair) for pair in zip(event.hashes, parents, strict=False)]
            case BlockRemoved():
                found += [("removed", name) for name in event.hashes]
            case PoolCleared():
                found.append(("cleared",))
    return found


def pool_of(pool: BlockPool) -> tuple[Any, ...]:
    return pool._free, list(pool._cached), pool._refs, pool._hash, pool._by_hash


def told(driver: Driver) -> dict[int, tuple[Any, ...]]:
    return {
        handle: (ledger.tokens, ledger.logprobs, ledger.starts, ledger.finishes)
        for handle, ledger in driver.story.ledgers.items()
        if not ledger.aborted
    }


def alike(one: object, other: object) -> bool:
    """Equal, but for the last bits of times: a sum in one go is rounded otherwise."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    if type(one) is not type(other):
        return False
    if isinstance(one, msgspec.Struct):
        return alike(msgspec.structs.astuple(one), msgspec.structs.astuple(other))  # type: ignore[arg-type]
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


def test_only_last_bits_are_forgiven() -> None:
    assert alike({"a": [1.0, (2, 0.1 + 0.2)]}, {"a": [1.0, (2, 0.3)]})
    for other in ({"a": [1.0, (2, 0.3001)]}, {"a": [1.0, (3, 0.3)]}, {"b": 1}, {"a": [1.0]}):
        assert not alike({"a": [1.0, (2, 0.3)]}, other)


@pytest.mark.timeout(900)  # half a minute in long mode, alone
def test_many_steps_at_once_are_what_single_steps_are(seed: int, long: bool):
    seen: Counter[str] = Counter()
    for number in range(2000 if long else 150):
        rng = random.Random(f"{seed} {number}")
        steps = rng.choice([2, 7, 50, 1000])
        world = rng.getrandbits(32)
        longest = rng.choice([5, 20, 80])
        deeds = random_deeds(random.Random(world), longest)
        single = live(random_spec(random.Random(world), 1), deeds)
        macro = live(random_spec(random.Random(world), steps), deeds)
        name = f"seed {seed}, world {number}"
        assert alike(told(macro), told(single)), name
        assert alike(macro.story.ended, single.story.ended), name
        assert alike(macro.story.rejected, single.story.rejected), name
        assert alike(macro.core.stats(), single.core.stats()), name
        assert alike(macro.story.stats, single.story.stats), name
        assert flat(macro.story.kv) == flat(single.story.kv), name
        assert pool_of(macro.core.pool) == pool_of(single.core.pool), name
        seen.update(_corners(single, macro))
    assert set(seen) >= CORNERS, seen  # each comes in at least one world in twenty


def _corners(single: Driver, macro: Driver) -> set[str]:
    stats = single.core.stats()
    kinds = {kind for _, kind, _ in single.story.rejected.values()}
    corners = {
        "saved": macro.story.calls < single.story.calls,
        "preempted": stats.preemptions,
        "cached": stats.cached_tokens,
        "rejected": "Overloaded" in kinds,
        "deadline": "DeadlineExceeded" in kinds,
        "aborted": stats.aborted,
        "evicted": any(isinstance(event, BlockRemoved) for event in single.story.kv),
    }
    return {name for name, seen in corners.items() if seen}
