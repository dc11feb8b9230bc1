"""The queues on a router's node, as workers find them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.blocks.hashing import short_hashes
from pdserve.messages.kv_events import KV, BlockStored
from pdserve.messages.node import NodeCard
from pdserve.router.prefill_queue import service as module
from pdserve.runtime.topics.service import Topics
from pdserve.worker.kv_event_publisher import KvEventPublisher
from tests.net.world import virtually
from tests.worker.disagg.queue.world import World, item, world

if TYPE_CHECKING:
    import pytest

HASH = b"n" * 16


def names(blocks: int) -> bytes:
    """Short ones, of one prompt."""
    return short_hashes(b"".join(bytes([n]) * 16 for n in range(blocks)))


async def one_router(w: World) -> None:
    await w.router("r")
    await w.decoder("d")
    await w.prefiller("p")
    await w.settled()
    w.prefillers["p"].offer(0)
    await w.until(lambda: w.decoders["d"].queue.state("m") is not None)


@virtually
async def test_prefixes_are_those_of_the_routers_index() -> None:
    """What a prefill worker tells of its pool decides who gets the item."""
    async with world() as w:
        await one_router(w)
        q = await w.prefiller("q")
        kv = KvEventPublisher()
        topics = Topics(q.node, q.node.timers)
        kv.connect(topics.publish_log(KV, kv).append)
        q.node.publish_card(NodeCard(role="worker", mode="prefill", topics=topics.names), {})
        kv.apply([BlockStored([HASH], b"p" * 16)])
        index = w.routers["r"].service.core.index
        await w.until(lambda: index.known_blocks(q.node.id) == 1)
        w.prefillers["p"].offer(1)
        q.offer(1)
        await asyncio.sleep(0.1)
        prompt = short_hashes(HASH + b"o" * 16)
        w.decoders["d"].enqueue(item(1, prompt_tokens=100, names=prompt, block_size=32))
        await w.until(lambda: len(w.prefillers["p"].taken) + len(q.taken) == 1)
        assert q.requests == [1]
        topics.close()


@virtually
async def test_what_was_given_counts_as_cached_at_once() -> None:
    """So siblings do not scatter."""
    async with world() as w:
        await one_router(w)
        q = await w.prefiller("q")
        for prefiller in (w.prefillers["p"], q):
            prefiller.node.publish_card(NodeCard(role="worker", mode="prefill"), {})
        index = w.routers["r"].service.core.index
        await w.until(lambda: {life.node for life in index.lives} >= {"p", "q"})
        for prefiller in (w.prefillers["p"], q):
            prefiller.offer(9)
        await asyncio.sleep(0.1)
        for request in range(4):
            wanted = item(request, prompt_tokens=3300, names=names(100), block_size=32)
            w.decoders["d"].enqueue(wanted)
            await asyncio.sleep(0.05)
            for prefiller in (w.prefillers["p"], q):  # it was computed meanwhile
                prefiller.offer(9)
            await asyncio.sleep(0.05)
        await w.until(lambda: len(w.prefillers["p"].taken) + len(q.taken) == 4)
        assert {len(w.prefillers["p"].taken), len(q.taken)} == {0, 4}


@virtually
async def test_a_worker_that_drains_gets_nothing_more() -> None:
    async with world() as w:
        await one_router(w)
        p, queues = w.prefillers["p"], w.routers["r"].queues
        p.node.publish_card(NodeCard(role="worker", mode="prefill", draining=True), {})
        await w.until(lambda: queues.states()["m"].workers == 0)
        p.offer(5)
        heard = w.decoders["d"].enqueue(item(1))
        await w.until(lambda: heard.refused == ["no_worker"])
        assert p.taken == []


@virtually
async def test_who_is_held_for_dead_has_nothing_here() -> None:
    """Its connection may stand for long after the cluster has given it up."""
    async with world() as w:
        await one_router(w)
        await w.decoder("x")  # accusations need a third
        p, queues = w.prefillers["p"], w.routers["r"].queues
        p.offer(1)
        w.decoders["d"].enqueue(item(1))
        await w.until(lambda: len(p.taken) == 1)
        w.nodes.world.pause("p")
        gone = w.routers["r"].node.registry.get
        await w.until(lambda: gone(p.node.id) is None, 60.0)
        state = queues.states()["m"]
        assert (state.waiting, state.claimed, state.workers) == (1, 0, 0)
        w.nodes.world.resume("p")
        await w.until(w.nodes.converged, 60.0)


def test_the_number_of_queues_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_MODELS", 2)

    @virtually
    async def run() -> None:
        async with world() as w:
            await one_router(w)
            d, p = w.decoders["d"], w.prefillers["p"]
            p.offer(1, "m2")
            await w.until(lambda: d.queue.state("m2") is not None)
            p.offer(1, "m3")
            heard = d.enqueue(item(1, model="m3"))
            await w.until(lambda: heard.refused == ["too_many_models"])
            d.enqueue(item(2, model="m2"))
            await w.until(lambda: p.requests == [2])

    run()


@virtually
async def test_a_queue_that_nobody_needs_is_forgotten() -> None:
    async with world() as w:
        await one_router(w)
        queues = w.routers["r"].queues
        heard = w.decoders["d"].enqueue(item(1, model="other"))
        await w.until(lambda: bool(heard.refused))
        assert list(queues.states()) == ["m"]
        w.prefillers["p"].close()
        await w.until(lambda: not queues.states())
        assert queues.counters["refused_no_worker"] == 1
        assert queues.counters["enqueued"] == 1


@virtually
async def test_a_router_that_closes_ends_the_streams() -> None:
    async with world() as w:
        await one_router(w)
        queues = w.routers["r"].queues
        heard = w.decoders["d"].enqueue(item(1))
        await w.until(lambda: bool(heard.queued))
        queues.close()
        assert queues.streams == 0
        await w.until(lambda: bool(heard.refused))
        assert heard.refused[0] in ("router_unreachable", "no_router", "draining")


@virtually
async def test_a_router_at_rest_does_nothing() -> None:
    """No timer runs while nothing waits."""
    async with world() as w:
        await one_router(w)
        queues = w.routers["r"].queues
        w.prefillers["p"].offer(1)
        w.decoders["d"].enqueue(item(1, deadline=9.0))
        await w.until(lambda: len(w.prefillers["p"].taken) == 1)
        w.prefillers["p"].taken[0].end("done")
        await asyncio.sleep(10.0)
        assert (queues._timer, queues._told) == (None, None)
        w.decoders["d"].queue.opened(1)


@virtually
async def test_names_that_are_none_cost_nobody_a_stream() -> None:
    async with world() as w:
        await one_router(w)
        p, d = w.prefillers["p"], w.decoders["d"]
        p.node.publish_card(NodeCard(role="worker", mode="prefill"), {})
        index = w.routers["r"].service.core.index
        await w.until(lambda: {life.node for life in index.lives} >= {"p"})
        odd = [(names(3) + b"123", 32), (b"123", 32), (names(100), 1), (names(3), 0)]
        for request, (wrong, size) in enumerate(odd):
            d.enqueue(item(request, prompt_tokens=100, names=wrong, block_size=size))
        await asyncio.sleep(0.1)
        p.offer(9)
        await w.until(lambda: len(p.taken) == len(odd))
        counters = w.routers["r"].queues.counters
        assert counters["redelivered"] == counters["abandoned"] == 0
        assert w.routers["r"].queues.streams == 2
