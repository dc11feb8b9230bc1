"""Blocks that move without a request: to the heirs of a worker that leaves, and to a new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine_core.kv_fetch.ports import REASONS
from pdserve.messages.kv_pull import KvChains, KvTaken, ListKv, OfferKv, WarmUp
from pdserve.runtime.rpc_methods import LIST_KV, OFFER_KV, WARM
from pdserve.testing.virtual_time import run
from pdserve.worker.kv_fetch import push as module
from tests.worker.kv_fetch.world import fetch_cluster, prompt_of, request_for

if TYPE_CHECKING:
    import pytest

    from tests.worker.kv_fetch.world import FetchWorker

PROMPTS = [prompt_of(number, 18) for number in range(6)]


async def computed(worker: FetchWorker, count: int = 3) -> None:
    for prompt in PROMPTS[:count]:
        await worker.compute(request_for(prompt))


async def hits(worker: FetchWorker, count: int = 3) -> int:
    """Cached tokens with which the worker answers the prompts."""
    before = worker.engine.stats().cached_tokens
    await computed(worker, count)
    return worker.engine.stats().cached_tokens - before


def test_heirs_have_what_a_worker_that_left_had(seed: int) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b", "c") as c:
            a, b, heir = c.workers["a"], c.workers["b"], c.workers["c"]
            b.publish(draining=True)
            await computed(a)
            await c.nodes.until(lambda: known_as_draining(a, "b"))
            pushed = await a.pusher.push(10.0)
            assert pushed == a.fetch.numbers.pushed == heir.fetch.numbers.warmed
            assert pushed >= 3 * 4
            assert b.engine.stats().pulled_blocks == 0
            assert await hits(heir) == 3 * 16
            await c.idle()

    run(main())


def known_as_draining(worker: FetchWorker, name: str) -> bool:
    return any(
        member.node == name and member.card is not None and member.card.draining
        for member in worker.node.registry
    )


def test_several_heirs_share_what_there_is(seed: int) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b", "c") as c:
            a = c.workers["a"]
            await computed(a, 6)
            pushed = await a.pusher.push(10.0)
            shares = [c.workers[name].engine.stats().pulled_blocks for name in "bc"]
            assert sum(shares) == pushed
            names = [c.workers[name].pool.names() for name in "bc"]
            assert not names[0].keys() & names[1].keys()
            await c.idle()

    run(main())


def test_a_new_worker_is_warmed(seed: int) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            await computed(a)
            link = await a.node.link(b.node.id, timeout=5.0)
            some = await link.request(
                WARM, WarmUp(source="a", blocks=5, timeout=10.0), timeout=10.0
            )
            assert some.blocks >= 5
            rest = await link.request(
                WARM, WarmUp(source="a", blocks=0, timeout=10.0), timeout=10.0
            )
            assert rest.refused == ""
            assert b.fetch.numbers.warmed == some.blocks + rest.blocks
            assert await hits(b) == 3 * 16
            again = await link.request(
                WARM, WarmUp(source="a", blocks=0, timeout=10.0), timeout=10.0
            )
            assert again == KvTaken(0, "")
            await c.idle()

    run(main())


def test_an_heir_takes_no_more_than_its_share(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            await computed(a, 6)
            pushed = await a.pusher.push(10.0)
            assert pushed == b.engine.stats().pulled_blocks
            assert 8 <= pushed < 8 + 6
            await c.idle()

    monkeypatch.setattr(module, "TAKEN_SHARE", 8 / 200)
    with caplog.at_level("INFO", logger="pdserve.worker.kv_fetch.push"):
        run(main())
    (said,) = [one.message for one in caplog.records if "offered blocks" in one.message]
    assert said.endswith("is not taken for one worker")


def test_every_reason_has_words() -> None:
    """The log says none of the words that travel between workers."""
    assert module._REASONS.keys() == REASONS | {"full"}


def test_what_is_meant_for_others_is_refused(seed: int) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            await computed(a)
            link = await a.node.link(b.node.id, timeout=5.0)
            offer = OfferKv(
                epoch=b.node.epoch,
                compat_hash="another",
                names_id=b.names_id,
                chains=KvChains((a.chain(PROMPTS[0]),)),
                timeout=5.0,
            )
            assert await link.request(OFFER_KV, offer, timeout=5.0) == KvTaken(0, "misfit")
            wanted = ListKv(
                epoch=b.node.epoch, compat_hash=b.compat_hash, names_id=b"another", blocks=9
            )
            assert await link.request(LIST_KV, wanted, timeout=5.0) == KvChains()

    run(main())


def test_offers_are_bounded_and_end_with_the_asker(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            await computed(a)
            link = await b.node.link(a.node.id, timeout=5.0)
            assert await link.request(
                WARM, WarmUp(source="b", blocks=0, timeout=1.0), timeout=5.0
            ) == KvTaken(0, "busy")

    monkeypatch.setattr(module, "MAX_RECEIVING", 0)
    run(main())


def test_workers_that_leave_together_push_nothing(seed: int) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            a.draining = b.draining = True
            await computed(a)
            await computed(b)
            begin = c.nodes.loop.time()
            assert await a.pusher.push(10.0) == await b.pusher.push(10.0) == 0
            assert c.nodes.loop.time() - begin < 1.0
            link = await a.node.link(b.node.id, timeout=5.0)
            order = WarmUp(source="a", blocks=0, timeout=1.0)
            assert await link.request(WARM, order, timeout=5.0) == KvTaken(0, "closed")

    run(main())


def test_a_worker_that_is_alone_pushes_nothing(seed: int) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a") as c:
            await computed(c.workers["a"])
            assert await c.workers["a"].pusher.push(10.0) == 0

    run(main())


def test_an_heir_that_dies_ends_the_push(seed: int) -> None:
    async def main() -> None:
        async with fetch_cluster(seed, "a", "b") as c:
            a, b = c.workers["a"], c.workers["b"]
            await computed(a, 6)
            c.nodes.loop.call_later(0.05, lambda: b.engine.die(60.0))
            begin = c.nodes.loop.time()
            assert await a.pusher.push(10.0) < 24
            assert c.nodes.loop.time() - begin < 11.0
            await c.nodes.until(a.idle)

    run(main())
