"""An operator's order to forget KV, from the core's command to its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine_core.kv_drops import drop_kv
from pdserve.engine_core.scheduler.block_hasher import BlockHasher
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.tiers.block import TierBlock
from pdserve.messages.engine import DropKv, KvDropped
from pdserve.messages.kv_events import BlockRemoved, PoolCleared
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.scripted import ScriptedExecutor
from tests.engine_core.test_core import SPEC, request

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from pdserve.ids import Seconds
    from pdserve.messages.kv_events import Tier

NAMES = BlockHasher(b"s" * 32, 4, "model")


class Lower:
    """Tiers below the device, played."""

    def __init__(self, *blocks: TierBlock) -> None:
        self._blocks = blocks
        self.dropped: list[tuple[set[bytes] | None, Seconds]] = []

    def blocks(self) -> Iterable[TierBlock]:
        return self._blocks

    def drop(
        self, hashes: Collection[bytes] | None, older: Seconds, now: Seconds
    ) -> dict[Tier, int]:
        assert now == 5.0
        self.dropped.append((None if hashes is None else set(hashes), older))
        return {"disk": len(self._blocks)}


def pool_of(chains: dict[str, list[bytes]], lora: str = "") -> BlockPool:
    """A pool with chains by cache salt, all reusable."""
    pool = BlockPool(16, 4)
    for salt, names in chains.items():
        blocks = pool.reserve(len(names))
        assert blocks is not None
        pool.commit_run(blocks, names, NAMES.root(salt, lora))
        pool.release(blocks)
    pool.drain_events()
    return pool


def order(pool: BlockPool, lower: Lower | None = None, **fields: object) -> KvDropped:
    command = DropKv(3, **fields)  # type: ignore[arg-type]
    return drop_kv(command, pool, NAMES, ("lora@1",), lower, 5.0)


def test_all_that_is_reusable_goes() -> None:
    pool = pool_of({"": [b"a", b"b"], "salt:x": [b"c"]})
    lower = Lower(TierBlock(b"d", b"e"))
    assert order(pool, lower) == KvDropped(3, {"device": 3, "disk": 1})
    assert lower.dropped == [(None, 0.0)]
    assert pool.drain_events() == [PoolCleared()]
    assert order(pool) == KvDropped(3, {"device": 0})


def test_an_owners_blocks_go_and_no_others() -> None:
    chains = {"": [b"a"], "tenant:t\0": [b"b", b"c"], "tenant:u\0": [b"d"], "salt:t": [b"e"]}
    pool = pool_of(chains)
    assert order(pool, owners=("tenant:t",)).blocks == {"device": 2}
    (removed,) = pool.drain_events()
    assert isinstance(removed, BlockRemoved)
    assert set(removed.hashes) == {b"b", b"c"}
    assert order(pool, owners=("salt:t",)).blocks == {"device": 1}
    assert set(pool.names()) == {b"a", b"d"}


def test_blocks_of_adapters_go_too() -> None:
    pool = pool_of({"tenant:t\0": [b"a"]}, lora="lora@1")
    assert order(pool, owners=("tenant:t",)).blocks == {"device": 1}


def test_a_mark_on_a_lower_tier_tells_of_salts_that_nobody_named() -> None:
    """A tenant's request had a `cache_salt` of its own, and its blocks are on both tiers."""
    pool = pool_of({"tenant:t\0own": [b"a", b"b"], "": [b"x"]})
    mark = NAMES.owner_mark("tenant:t")
    lower = Lower(TierBlock(b"b", b"a", root=mark), TierBlock(b"y", b"x"))
    assert order(pool, lower, owners=("tenant:t",)).blocks["device"] == 2
    assert lower.dropped == [({b"a", b"b"}, 0.0)]


def test_what_is_old_is_not_on_the_device() -> None:
    pool, lower = pool_of({"": [b"a"]}), Lower()
    assert order(pool, lower, older=60.0).blocks == {"disk": 0}
    assert lower.dropped == [(None, 60.0)]
    assert len(pool.names()) == 1


def test_blocks_in_use_stay() -> None:
    pool = pool_of({"": [b"a", b"b"]})
    pool.acquire(pool.match([b"a"]))
    assert order(pool, owners=("",)).blocks == {"device": 1}
    assert set(pool.names()) == {b"a"}


def test_without_a_prefix_cache_there_is_nothing() -> None:
    command = DropKv(1, owners=("",))
    assert drop_kv(command, BlockPool(2, 4), None, (), None, 0.0) == KvDropped(1, {"device": 0})


def test_a_core_answers_and_computes_anew() -> None:
    prompt = range(10, 10 + 3 * SPEC.block_size)
    with InlineEngine.of(ScriptedExecutor(), SPEC) as engine:
        engine.generate([request(*prompt, max_tokens=1, cache_salt="tenant:t\0")])
        engine.core.handle(DropKv(1, owners=("tenant:other",)))
        engine.core.handle(DropKv(2, owners=("tenant:t",)))
        events = [event for event in engine.core.step() if isinstance(event, KvDropped)]
        assert [(one.number, one.blocks["device"]) for one in events] == [(1, 0), (2, 3)]
        ledger = engine.submit(request(*prompt, max_tokens=1, cache_salt="tenant:t\0"))
        engine.run()
    assert ledger.finishes[0] is not None
    assert ledger.finishes[0].cached_tokens == 0
