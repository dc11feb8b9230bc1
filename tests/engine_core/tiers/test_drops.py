"""An operator's order to forget KV, from the core's command to its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.engine_core.scheduler.block_hasher import BlockHasher
from pdserve.engine_core.tiers.drops import drop_kv
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.tiers.block import TierBlock
from pdserve.messages.engine import DropKv, KvDropped
from pdserve.messages.kv_events import BlockRemoved, PoolCleared
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.scripted import ScriptedExecutor
from tests.engine_core.test_core import SPEC, request
from tests.engine_core.test_tiers import DISK, Bench, prompt
from tests.engine_core.test_tiers import request as asked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

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


# ---------------------------------------------------------------------- with tiers

TENANT = "tenant:t\0a salt of its own"


def filled(folder: Path) -> Bench:
    """A core whose host and disk have blocks of a tenant and of others."""
    bench = Bench(tiers=replace(DISK, disk_path=str(folder)))
    bench.run(asked(prompt(0, 4), cache_salt=TENANT))
    for start in (20, 30, 40, 50, 60, 70):
        bench.run(asked(prompt(start, 4), cache_salt=TENANT if start == 40 else "salt:u"))
    bench.clock.advance(60.0)
    bench.engine.step()
    bench.run(asked(prompt(20, 4), cache_salt="salt:u"))
    assert bench.lower.disk is not None
    assert len(bench.lower.disk) > 8
    return bench


def told(bench: Bench, command: DropKv) -> KvDropped:
    bench.core.handle(command)
    (event,) = [one for one in bench.core.step() if isinstance(one, KvDropped)]
    for _ in range(50):
        bench.clock.advance(1.0)
        bench.engine.step()
    bench.lower.check()
    return event


def payloads(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*/seg-*")))


def test_a_tenants_blocks_leave_every_tier_and_the_disk_itself(tmp_path: Path) -> None:
    with filled(tmp_path) as bench:
        assert bench.lower.disk is not None
        mine = {
            h for start in (0, 40) for h in bench.hashes(asked(prompt(start, 4), cache_salt=TENANT))
        }
        assert len([h for h in mine if h in bench.lower.disk]) >= 4
        assert any(h in payloads(tmp_path) for h in mine)
        others = {block.hash for block in bench.lower.blocks()} - mine
        gone = told(bench, DropKv(1, owners=("tenant:t",)))
        assert gone.blocks["host"] + gone.blocks["disk"] >= 8
        assert {block.hash for block in bench.lower.blocks()} == others
        assert not any(h in bench.core.pool.names() for h in mine)
        assert not any(h in payloads(tmp_path) for h in mine), "headers are overwritten, too"
        again = bench.run(asked(prompt(0, 4), cache_salt=TENANT))
        assert again.finishes[0] is not None
        assert again.finishes[0].cached_tokens == 0
        warm = bench.run(asked(prompt(20, 4), cache_salt="salt:u"))
        assert warm.finishes[0] is not None
        assert warm.finishes[0].cached_tokens == 16


def test_everything_goes(tmp_path: Path) -> None:
    with filled(tmp_path) as bench:
        gone = told(bench, DropKv(1))
        assert min(gone.blocks.values()) > 0
        assert list(bench.lower.blocks()) == []
        assert bench.core.pool.counts().cached == 0


def test_what_was_used_lately_stays(tmp_path: Path) -> None:
    with filled(tmp_path) as bench:
        before = len(list(bench.lower.blocks()))
        assert told(bench, DropKv(1, older=3600.0)).blocks == {"host": 0, "disk": 0}
        assert len(list(bench.lower.blocks())) == before
        bench.clock.advance(3600.0)
        gone = told(bench, DropKv(2, older=3600.0)).blocks
        assert gone["disk"] > 8
        assert bench.core.pool.counts().cached > 0


def test_a_block_that_is_read_while_it_is_dropped_is_not_kept(tmp_path: Path) -> None:
    with filled(tmp_path) as bench:
        lower, pool, now = bench.lower, bench.core.pool, bench.clock.now()
        assert lower.disk is not None
        named = bench.hashes(asked(prompt(0, 4), cache_salt=TENANT))
        alone = [h for h in named if h in lower.disk and h not in lower.host][:1]
        blocks = pool.reserve(1)
        assert blocks is not None
        lower.fetch(99, alone, lower.parent(alone[0]) or b"", blocks, now, now + 60.0)
        assert list(lower._fills) == alone
        assert told(bench, DropKv(1, owners=("tenant:t",))).blocks["disk"] > 0
        assert not lower._fills
        assert not any(block.hash in named for block in lower.blocks())
        pool.release(blocks)
