"""Atomic requests through the real pool and tiers, against caches of a few lines.

The pool and the host index with a few lines between them are an LRU list hit for hit; with the
core's cleaner, jobs and fetches between them, nearly. A generated trace always; in long runs
Mooncake's conversation trace, too, from the folder that PDSERVE_TRACES names.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from bench.atomic_tiers import (
    BLOCK,
    PLAIN,
    AtomicCluster,
    AtomicTiers,
    Prompt,
    belady_hits,
    by_prefix,
    read,
    replay,
    with_turns,
)
from bench.tier_trace import LRU_HITS, TURN_RATES
from pdserve.clock import ManualClock
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.tiers.admission import HostAdmission
from pdserve.kv.tiers.cleaner import AHEAD, WINDOW, BlockUse, Cleaner
from pdserve.kv.tiers.eviction import EvictionOrder
from pdserve.kv.tiers.host_index import HostIndex
from pdserve.kv.tiers.lower_tiers import LowerTiers
from pdserve.kv.tiers.virtual_io import DEFAULT_RATES, LaneRate, VirtualTierIo
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.kv.tiers.lower_tiers import FetchDone

TURNS = EvictionOrder()


def conversations(random: Random, count: int) -> list[Prompt]:
    """Prompts of conversations that share a system prompt and grow turn by turn.

    Several of a kind come at one time, and some are asked again or continued in two ways.
    """
    known: list[list[int]] = [[0]]
    requests: list[tuple[float, list[int]]] = []
    number = 0
    for index in range(count):
        stem = known[0] if random.random() < 0.5 else random.choice(known[-60:])
        keep = len(stem) if random.random() < 0.9 else random.randint(1, len(stem))
        fresh = random.randint(0 if len(stem) > 1 else 1, 5)
        prompt = stem[:keep] + [number + 1 + i for i in range(fresh)]
        number += fresh
        known.append(prompt[:-1] if len(prompt) > 1 else prompt)
        requests.append((3.0 * (index // 4), prompt[:24]))
    return list(with_turns(requests))


def lru_list(prompts: Sequence[Prompt], capacity: int) -> list[int]:
    """The hits of a plain list in order of use, in which a prompt's deeper blocks are older."""
    cached: OrderedDict[bytes, None] = OrderedDict()
    hits = []
    for prompt in prompts:
        names = prompt.names
        hits.append(next((i for i, name in enumerate(names) if name not in cached), len(names)))
        for name in reversed(names):
            cached[name] = None
            cached.move_to_end(name)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits


@pytest.fixture(scope="module")
def mooncake() -> list[Prompt]:
    folder = os.environ.get("PDSERVE_TRACES", "") if is_long() else ""
    path = next(Path(folder).rglob("conversation_trace.jsonl"), None) if folder else None
    if path is None:
        pytest.skip("needs a long run, and Mooncake's conversation trace in PDSERVE_TRACES")
    return read(path)


@pytest.fixture
def prompts(seed: int) -> list[Prompt]:
    return conversations(Random(seed), 4000 if is_long() else 500)


# ---------------------------------------------------------------- a generated trace


@pytest.mark.parametrize("blocks", [30, 60, 120])
def test_each_tier_alone_is_an_lru_list(prompts, blocks: int) -> None:
    wanted = lru_list(prompts, blocks)
    assert replay(prompts, AtomicTiers(blocks, 0)) == wanted
    assert replay(prompts, AtomicTiers(0, blocks)) == wanted
    assert 0 < sum(wanted) < sum(lru_list(prompts, 200)), "the size matters"


@pytest.mark.parametrize(("device", "host"), [(30, 1), (30, 60), (100, 30), (60, 300)])
def test_exclusive_tiers_are_one_lru_list_of_the_sum(prompts, device: int, host: int) -> None:
    tiers = AtomicTiers(device, host)
    assert replay(prompts, tiers) == lru_list(prompts, device + host)
    assert tiers.pool is not None
    assert tiers.host is not None
    assert not set(tiers.pool.names()) & set(tiers.host.names()), "a block is in both"


@pytest.mark.parametrize(("device", "host"), [(30, 60), (100, 40)])
def test_a_mirror_is_one_lru_list_of_the_larger(prompts, device: int, host: int) -> None:
    tiers = AtomicTiers(device, host, placement="mirror")
    assert replay(prompts, tiers) == lru_list(prompts, max(device, host))


@pytest.mark.parametrize("blocks", [30, 100])
def test_no_order_and_no_admission_beats_one_that_knows_the_future(prompts, blocks: int) -> None:
    half = blocks // 2 + 10  # the longest prompt has to fit
    arms = [
        AtomicTiers(0, blocks),
        AtomicTiers(0, blocks, order=TURNS),
        AtomicTiers(half, blocks - half, order=TURNS),
        AtomicTiers(half, blocks - half, admission=HostAdmission("reused", blocks - half)),
    ]
    best = belady_hits(prompts, blocks)
    for tiers in arms:
        assert sum(replay(prompts, tiers)) <= best


def test_a_disk_adds_hits_and_writes_each_block_once(prompts) -> None:
    without = sum(replay(prompts, AtomicTiers(40, 60)))
    tiers = AtomicTiers(40, 60, 100_000)
    assert without < sum(replay(prompts, tiers)) == sum(lru_list(prompts, 10**6))
    assert tiers.disk is not None
    assert tiers.spilled == len(tiers.disk)
    small = AtomicTiers(40, 60, 100)
    assert without < sum(replay(prompts, small)) <= belady_hits(prompts, 200)


def test_a_pool_finds_at_others_what_the_route_missed(prompts) -> None:
    """Workers that keep everything find together what one of them would."""
    found = {}
    for pool in (False, True):
        workers = [AtomicTiers(10_000, 0) for _ in range(3)]
        cluster = AtomicCluster(
            workers, lambda prompt, found, load: load.index(min(load)), pool=pool
        )
        for prompt in prompts:
            cluster.serve(prompt)
        found[pool] = (cluster.local, cluster.fetched)
    assert found[False][1] == 0
    assert found[False][0] == found[True][0]
    assert sum(found[True]) == sum(lru_list(prompts, 10**6)) > found[False][0]


def test_the_route_by_prefix_stays_within_its_bound() -> None:
    route, prompt = by_prefix(1.5), Prompt(0.0, (b"",))
    assert route(prompt, [1, 5, 5], [0, 0, 0]) == 1
    assert route(prompt, [1, 5, 5], [10, 12, 11]) == 2, "equal prefixes: the least served"
    assert route(prompt, [1, 5, 0], [0, 18, 0]) == 0


def test_one_that_knows_the_future_is_the_best_there_is(seed: int) -> None:
    """Against every choice of what to keep, on traces of a few blocks."""
    random = Random(seed)
    for _ in range(60):
        uses = [random.choice(b"abcd") for _ in range(9)]
        prompts = [Prompt(0.0, (bytes([name]),)) for name in uses]
        assert belady_hits(prompts, 2) == most_hits(tuple(uses), frozenset(), 2)


def most_hits(uses: tuple[int, ...], cached: frozenset[int], room: int) -> int:
    if not uses:
        return 0
    name, rest = uses[0], uses[1:]
    kept = cached | {name}
    choices = [kept] if len(kept) <= room else [kept - {one} for one in kept]
    return (name in cached) + max(most_hits(rest, one, room) for one in choices)


def test_a_bonus_for_turns_helps_where_conversations_go_on(seed: int) -> None:
    """Some go on for long with pauses in which many end after one prompt."""
    random, requests, chats, number = Random(seed), [], [[0] for _ in range(12)], 0
    for index in range(600):
        chat = chats[index // 4 % len(chats)] if index % 4 == 0 else [0]
        chat.extend(range(number + 1, number + random.randint(4, 6)))
        number += 6
        requests.append((float(index), [*chat[:60], -1 - index]))
    prompts = list(with_turns((at, [name % 2**64 for name in names]) for at, names in requests))
    plain = sum(replay(prompts, AtomicTiers(0, 200)))
    bonus = sum(replay(prompts, AtomicTiers(0, 200, order=TURNS)))
    assert bonus > 1.2 * plain


# ---------------------------------------------------------------- cleaner, jobs and fetches


class AtomicCore:
    """A device pool with the cleaner and the lower tiers of an engine core, whose jobs end at once.

    What is evicted was copied before, and what is found below the device comes by a fetch.
    """

    def __init__(self, device: int, host: int, order: EvictionOrder = PLAIN) -> None:
        self._clock = ManualClock()
        self.pool = BlockPool(device, BLOCK)
        rates = dict.fromkeys(DEFAULT_RATES, LaneRate(1e18))
        self._io = VirtualTierIo(self._clock, 1, rates=rates)
        self.lower = LowerTiers(
            HostIndex(host, order=order),
            HostAdmission("all", host),
            self._io,
            block_bytes=1,
            block_size=BLOCK,
            device=self.pool,
        )
        self._cleaner = Cleaner(self.pool, self.lower)
        self._fetches = 0

    def serve(self, prompt: Prompt) -> int:
        """Serves a request; returns the blocks that were on the device or came to it."""
        self._wait_until(prompt.at)
        names, pool, now = prompt.names, self.pool, self._clock.now()
        shared = pool.match(names)
        pool.acquire(shared)
        missing = len(names) - len(shared)
        self._cleaner.clean(int(missing / AHEAD) + 1, now)
        self._settle()
        fresh = pool.reserve(missing)
        assert fresh is not None
        self._follow()
        parent = names[len(shared) - 1] if shared else b""
        found = len(shared) + self._fetch(names[len(shared) :], parent, fresh)
        pool.commit_run(fresh, names[len(shared) :], parent)
        self._follow()
        self._cleaner.left(names, BlockUse(prompt.turns), now)
        pool.release(shared + fresh)
        self._follow()
        return found

    def _fetch(self, names: Sequence[bytes], parent: bytes, blocks: Sequence[int]) -> int:
        count, now = len(self.lower.run(names)), self._clock.now()
        if not count:
            return 0
        self._fetches += 1
        self.lower.fetch(self._fetches, names[:count], parent, blocks[:count], now, now + 60.0)
        (done,) = self._settle()
        assert done.blocks == count, done.reason
        return count

    def _settle(self) -> list[FetchDone]:
        """All jobs end."""
        done = self.lower.advance(self._clock.now())
        while (due := self._io.next_due()) is not None:
            self._wait_until(due)
            done += self.lower.advance(self._clock.now())
        return done

    def _wait_until(self, at: float) -> None:
        self._clock.advance(max(0.0, at - self._clock.now()))

    def _follow(self) -> None:
        events = self.pool.drain_events()
        self.lower.follow(events, self._clock.now())
        self._cleaner.follow(events)
        self.lower.drain_events()


def through_core(prompts: Sequence[Prompt], core: AtomicCore) -> int:
    hits = 0
    for number, prompt in enumerate(prompts):
        hits += core.serve(prompt)
        if number % 100 == 0:
            core.lower.check()
            core.pool.check()
    assert core.lower.host.counts().claimed == core.lower.host.counts().filling == 0
    return hits


def test_the_cores_tiers_are_nearly_one_lru_list_of_the_sum(seed: int) -> None:
    """They lack the blocks that are copied ahead of eviction and those that a fetch reads: for a
    moment, these are on both tiers."""
    prompts = conversations(Random(seed), 8000 if is_long() else 800)
    device, host = 180, 180
    both = WINDOW + max(len(prompt.names) for prompt in prompts)
    hits = through_core(prompts, AtomicCore(device, host))
    assert sum(lru_list(prompts, device + host - both)) <= hits
    assert hits <= belady_hits(prompts, device + host)
    assert hits > sum(lru_list(prompts, max(device, host))), "a copy on both adds nothing"


# ---------------------------------------------------------------- Mooncake's conversation trace


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("blocks", LRU_HITS)
def test_each_tier_alone_finds_the_known_number(mooncake, blocks: int) -> None:
    assert sum(replay(mooncake, AtomicTiers(blocks, 0))) == LRU_HITS[blocks]
    assert sum(replay(mooncake, AtomicTiers(0, blocks))) == LRU_HITS[blocks]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("device", "host"), [(976, 3906), (1953, 9765), (3906, 1953)])
def test_exclusive_tiers_are_hit_for_hit_one_list(mooncake, device: int, host: int) -> None:
    both = replay(mooncake, AtomicTiers(device, host))
    assert both == replay(mooncake, AtomicTiers(device + host, 0))
    assert both == lru_list(mooncake, device + host)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("blocks", TURN_RATES)
def test_the_turn_bonus_finds_the_known_part(mooncake, blocks: int) -> None:
    total = sum(len(prompt.names) for prompt in mooncake)
    hits = sum(replay(mooncake, AtomicTiers(0, blocks, order=TURNS)))
    assert hits / total >= TURN_RATES[blocks] - 0.003
    assert hits <= belady_hits(mooncake, blocks)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", [PLAIN, TURNS], ids=["lru", "turns"])
@pytest.mark.parametrize(("device", "host"), [(976, 3906), (1953, 9765)])
def test_the_cores_tiers_find_nearly_as_much(mooncake, device, host, order) -> None:
    total = sum(len(prompt.names) for prompt in mooncake)
    wanted = sum(replay(mooncake, AtomicTiers(device, host, order=order)))
    hits = through_core(mooncake, AtomicCore(device, host, order))
    assert hits / total >= wanted / total - 0.01
