"""Items on their way from decode workers by way of routers to prefill workers."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import Draining
from pdserve.messages.handoff import PREFILL_QUEUE, CreditOffer, EnqueueItem, QueueState
from pdserve.router.prefill_queue import service as router_module
from pdserve.wire.codec import encode
from pdserve.worker.disagg.queue import connection as connection_module
from tests.net.world import virtually
from tests.support.net_support import RecordingStreamSink, send_item
from tests.worker.disagg.queue.world import Heard, item, world

if TYPE_CHECKING:
    from pdserve.ids import NodeId
    from pdserve.net.base import ItemStream
    from tests.worker.disagg.queue.world import Decoder, Prefiller, Router, World


async def three(w: World) -> tuple[Decoder, Prefiller]:
    """Two routers, one worker of each kind that knows the other."""
    for name in ("r1", "r2"):
        await w.router(name)
    d, p = await w.decoder("d"), await w.prefiller("p")
    await w.settled()
    p.offer(0)
    await w.until(lambda: d.queue.state("m") is not None)
    return d, p


# ------------------------------------------------------------------------ the straight road


@virtually
async def test_an_item_goes_from_one_worker_to_another() -> None:
    async with world() as w:
        await w.router("r")
        d, p = await w.decoder("d"), await w.prefiller("p")
        await w.settled()
        p.offer(1)
        await w.until(lambda: d.queue.state("m") is not None)
        heard = d.enqueue(item(1))
        await w.until(lambda: p.requests == [1])
        (claim,) = p.taken
        assert heard.queued == [("r", w.routers["r"].node.epoch)]
        assert (claim.decode, claim.decode_epoch) == ("d", d.node.epoch)
        assert d.open(claim, "p")
        claim.opened()
        claim.end("done")
        await w.until(lambda: w.routers["r"].queues.counters["ended_done"] == 1)
        assert (len(d.queue), len(p.claims)) == (0, 0)


@virtually
async def test_a_claim_is_fast() -> None:
    """Nothing on the way waits for a timer: a few turns and two ways through the network."""
    async with world() as w:
        d, p = await three(w)
        p.offer(1)
        d.enqueue(item(1))  # the first one opens the stream
        await w.until(lambda: p.requests == [1])
        p.offer(1)
        await asyncio.sleep(0.1)
        start = w.nodes.loop.time()
        d.enqueue(item(2))
        await w.until(lambda: p.requests == [1, 2])
        assert w.nodes.loop.time() - start < 0.025
        assert w.owner().queues.streams == 2


@virtually
async def test_the_report_says_how_things_are() -> None:
    async with world() as w:
        d, p = await three(w)
        p.offer(0, load=500)
        for request in (1, 2):
            d.enqueue(item(request))
        expected = QueueState(waiting=2, waiting_tokens=2000, workers=1, uncomputed_tokens=500)
        await w.until(lambda: d.queue.state("m") == expected)
        p.offer(1, load=500)
        claimed = QueueState(
            waiting=1, waiting_tokens=1000, claimed=1, workers=1, uncomputed_tokens=1500
        )
        await w.until(lambda: d.queue.state("m") == claimed)
        numbers = w.owner().service.numbers()
        assert numbers.prefill == {"m": claimed}
        assert numbers.prefill_events["claimed"] == 1
        assert d.queue.state("other") is None
        p.close()
        await w.until(lambda: d.queue.state("m") is None)
        d.queue.cancel(1)
        d.queue.cancel(2)


@virtually
async def test_reports_are_not_more_frequent_than_they_need_be() -> None:
    async with world() as w:
        d, p = await three(w)
        d.enqueue(item(0))
        await asyncio.sleep(0.2)
        subscription = d.topics.stats()["followed/prefill"]["values"]
        for request in range(1, 100):
            d.enqueue(item(request))
            await asyncio.sleep(0.002)
        told = d.topics.stats()["followed/prefill"]["values"] - subscription
        assert 2 <= told <= 6
        p.offer(100)
        await w.until(lambda: len(p.taken) == 100)


@virtually
async def test_models_have_queues_of_their_own() -> None:
    async with world() as w:
        d, p = await three(w)
        q = await w.prefiller("q")
        names = [f"m{n}" for n in range(8)]
        for index, name in enumerate(names):
            (p, q)[index % 2].offer(1, name)
        owners = {d.queue._owner(name).node for name in names}  # type: ignore[union-attr]
        assert owners == {"r1", "r2"}
        await w.until(lambda: all(d.queue.state(name) for name in names))
        for index, name in enumerate(names):
            d.enqueue(item(index, model=name))
        await w.until(lambda: len(p.taken) + len(q.taken) == 8)
        assert sorted(p.requests) == [0, 2, 4, 6]
        assert {claim.owner for claim in p.taken} | {claim.owner for claim in q.taken} == owners


@virtually
async def test_credits_are_a_total_over_all_routers() -> None:
    """Two owners of two models give at the same moment: what is too much goes back, and comes again
    when there is room."""
    async with world() as w:
        d, p = await three(w)
        p.offer(1)
        await asyncio.sleep(0.1)
        owner = w.owner()
        (other,) = [router for router in w.routers.values() if router is not owner]
        stream = await _enqueue_at(w, other.node.id, 7)
        d.enqueue(item(1))
        await w.until(lambda: len(p.taken) == 1)
        await asyncio.sleep(0.1)
        assert p.claims.returned + len(p.taken) == 2 or other.queues.states()["m"].waiting == 1
        assert len(p.taken) == 1
        p.offer(1)
        await w.until(lambda: sorted(p.requests) == [1, 7])
        stream.abort(RuntimeError("the test is over"))


async def _enqueue_at(w: World, router: NodeId, request: int) -> ItemStream:
    """By a decode worker that has another view of who is the owner."""
    link = await w.decoders["d"].node.link(router, timeout=1.0)
    stream = link.open_stream(PREFILL_QUEUE, b"", RecordingStreamSink(), window=1 << 16)
    await send_item(stream, encode(EnqueueItem(item(request))), timeout=1.0)
    return stream


# ------------------------------------------------------------------------ ends


@virtually
async def test_cancelling_reaches_whoever_has_it() -> None:
    async with world() as w:
        d, p = await three(w)
        p.offer(1)
        d.enqueue(item(1))
        d.enqueue(item(2))
        await w.until(lambda: p.requests == [1])
        d.queue.cancel(1)
        d.queue.cancel(2)
        await w.until(lambda: p.stopped == p.taken)
        await w.until(lambda: w.owner().queues.counters["cancelled"] == 2)
        assert len(p.claims) == 0
        p.taken[0].end("cancelled")  # too late, and harmless


@virtually
async def test_once_it_is_open_the_queue_has_no_say() -> None:
    async with world() as w:
        d, p = await three(w)
        p.offer(1)
        d.enqueue(item(1))
        await w.until(lambda: p.requests == [1])
        (claim,) = p.taken
        assert d.open(claim, "p")
        claim.opened()
        d.close()
        await w.until(lambda: w.events("abandoned") == 1)
        await asyncio.sleep(0.5)
        assert p.stopped == []
        claim.end("done")


@virtually
async def test_without_a_router_it_is_refused_at_once() -> None:
    async with world() as w:
        d = await w.decoder("d")
        assert d.enqueue(item(1)).refused == ["no_router"]
        assert d.queue.state("m") is None


@virtually
async def test_without_a_worker_it_is_refused_with_the_reason() -> None:
    async with world() as w:
        await w.router("r")
        d = await w.decoder("d")
        await w.settled()
        heard = d.enqueue(item(1))
        took = await w.until(lambda: bool(heard.refused))
        assert heard.refused == ["no_worker"]
        assert 1.9 < took < 2.5


@virtually
async def test_a_deadline_ends_it_in_the_queue() -> None:
    async with world() as w:
        d, _ = await three(w)
        heard = d.enqueue(item(1, deadline=0.5))
        took = await w.until(lambda: bool(heard.refused))
        assert heard.refused == ["deadline"]
        assert 0.4 < took < 0.6


@virtually
async def test_a_new_round_takes_the_place_of_the_one_before() -> None:
    async with world() as w:
        d, p = await three(w)
        first = d.enqueue(item(1))
        await w.until(lambda: bool(first.queued))
        second = d.enqueue(item(1, round=1))
        await w.until(lambda: bool(second.queued))
        p.offer(2)
        await w.until(lambda: p.requests == [1])
        assert p.taken[0].item.round == 1
        assert w.owner().queues.counters["replaced"] == 1
        assert first.refused == second.refused == []


@virtually
async def test_the_bound_of_the_worker_holds() -> None:
    async with world() as w:
        d, _ = await three(w)
        for request in range(4097):
            heard = d.enqueue(item(request))
        await asyncio.sleep(0.5)
        assert heard.refused == ["too_many"]
        assert len(d.queue) == 4096
        assert w.owner().queues.states()["m"].waiting == 4096


# ------------------------------------------------------------------------ owners come and go


@virtually
async def test_when_the_owner_dies_the_next_one_has_it() -> None:
    async with world() as w:
        d, p = await three(w)
        p.offer(1)
        heard = [d.enqueue(item(request)) for request in (1, 2)]
        await w.until(lambda: len(p.taken) == 1)
        (early,) = p.taken
        owner = w.owner()
        await w.crash(owner.node.id)
        await w.until(lambda: all(h.owners[-1][0] != owner.node.id for h in heard))
        assert [h.owners[-1][2] for h in heard] == [1, 1]
        assert not d.open(early, "p")  # its router is not whom the request is queued with
        assert p.stopped == []
        early.end("refused")
        p.offer(2)
        await w.until(lambda: len(p.taken) == 3)
        assert all(d.open(claim, "p") for claim in p.taken[1:])


@virtually
async def test_a_claim_of_a_dead_router_is_good_until_the_item_is_elsewhere() -> None:
    """Both must agree only on what the decode worker has heard."""
    async with world() as w:
        d, p = await three(w)
        p.offer(1)
        d.enqueue(item(1))
        await w.until(lambda: len(p.taken) == 1)
        owner = w.owner()
        w.nodes.world.pause(owner.node.id)
        assert d.open(p.taken[0], "p")
        await w.crash(owner.node.id)
        await w.nodes.until(w.nodes.converged)
        assert (len(d.queue), p.stopped) == (0, [])
        assert d.heard[1].refused == []


@virtually
async def test_without_another_router_it_is_refused() -> None:
    async with world() as w:
        await w.router("r")
        d, p = await w.decoder("d"), await w.prefiller("p")
        await w.settled()
        p.offer(0)
        await w.until(lambda: d.queue.state("m") is not None)
        heard = d.enqueue(item(1))
        await w.until(lambda: bool(heard.queued))
        await w.crash("r")
        took = await w.until(lambda: bool(heard.refused))
        assert heard.refused[0] in ("no_router", "router_unreachable")
        assert took < 3.0


@virtually
async def test_a_router_that_drains_hands_its_queue_on() -> None:
    async with world() as w:
        d, p = await three(w)
        p.offer(1)
        heard = [d.enqueue(item(request)) for request in (1, 2, 3)]
        await w.until(lambda: len(p.taken) == 1)
        assert d.open(p.taken[0], "p")
        p.taken[0].opened()
        owner = w.owner()
        owner.service.drain()
        await w.until(lambda: w.owner() is not owner and len(d.queue) == 2)
        assert owner.queues.counters["refused_draining"] == 2  # at once, not when its card came
        waiting = [h for h in heard if h is not d.heard[p.requests[0]]]
        await w.until(lambda: all(h.queued[-1][0] == w.owner().node.id for h in waiting))
        p.offer(2)
        await w.until(lambda: len(p.taken) == 3)
        assert all(d.open(claim, "p") for claim in p.taken[1:])
        assert p.stopped == []
        p.taken[0].end("done")
        await w.until(lambda: owner.queues.counters["ended_done"] == 1)


@virtually
async def test_an_owner_that_is_one_no_longer_forgets_what_it_had() -> None:
    async with world() as w:
        first = await w.router("r1")
        d, p = await w.decoder("d"), await w.prefiller("p")
        await w.settled()
        models = [f"m{n}" for n in range(8)]
        for model in models:
            p.offer(0, model)
        heard = [d.enqueue(item(n, model=model)) for n, model in enumerate(models)]
        await w.until(lambda: all(h.queued for h in heard))
        second = await w.router("r2")
        await w.until(lambda: any(h.owners[-1][0] == "r2" for h in heard))
        await asyncio.sleep(0.2)
        counts = [
            sum(state.waiting for state in router.queues.states().values())
            for router in (first, second)
        ]
        assert sum(counts) == 8
        assert min(counts) > 0


@virtually
async def test_a_router_that_cannot_be_reached_is_not_waited_for() -> None:
    async with world() as w:
        d, _ = await three(w)
        for name in w.routers:
            w.nodes.world.partition("d", name)
        heard = d.enqueue(item(1))
        took = await w.until(lambda: bool(heard.refused))
        assert heard.refused == ["router_unreachable"]
        assert (heard.owners, 1.9 < took < 2.2) == ([], True)


@virtually
async def test_a_worker_that_starts_afresh_says_all_again() -> None:
    """Claims of the stream before count for nothing on the next one."""
    async with world() as w:
        d, p = await three(w)
        p.offer(3)
        d.enqueue(item(1))
        await w.until(lambda: p.requests == [1])
        router = w.owner()
        await asyncio.sleep(0.2)
        _cut(router, "p")
        await w.until(lambda: p.requests == [1, 1])  # the claim of the first stream, once more
        await asyncio.sleep(0.2)
        assert router.queues.states()["m"].credits == 1
        assert p.claims._routers[router.node.id].received == {"m": 1}


@virtually
async def test_a_worker_that_starts_afresh_repeats_what_has_not_changed() -> None:
    async with world() as w:
        _, p = await three(w)
        router = w.owner()
        await asyncio.sleep(0.2)
        _cut(router, "p")
        assert router.queues.states() == {} or router.queues.states()["m"].workers == 0
        await w.until(lambda: router.queues.streams == 1)
        await asyncio.sleep(0.2)
        assert router.queues.states()["m"].workers == 1
        p.offer(0)


def _cut(router: Router, node: str) -> None:
    """The router ends the stream of a worker."""
    (stream,) = [s for s in router.queues._streams.values() if s.peer.node == node]
    stream.cut(Draining("the test says so"))


@virtually
async def test_an_owner_may_change_back_and_forth() -> None:
    """The fence follows; nobody has two good claims, nothing is lost."""
    async with world() as w:
        await w.router("r1")
        d, p = await w.decoder("d"), await w.prefiller("p")
        await w.settled()
        p.offer(0)
        await w.until(lambda: d.queue.state("m") is not None)
        heard = [d.enqueue(item(request, model=f"m{request % 5}")) for request in range(20)]
        for n in range(5):
            p.offer(0, f"m{n}")
        await asyncio.sleep(0.2)
        for turn in range(3):
            await w.router("r2")
            await w.until(lambda: any(h.owners[-1][0] == "r2" for h in heard))
            await asyncio.sleep(0.1)
            await w.crash("r2")
            await w.until(lambda: all(h.owners[-1][0] == "r1" for h in heard))
            assert max(h.owners[-1][2] for h in heard) == 2 * (turn + 1)
        for n in range(5):
            p.offer(4, f"m{n}")
        await w.until(lambda: len(p.taken) == 20)
        assert all(d.open(claim, "p") for claim in p.taken)
        assert sorted(p.requests) == list(range(20))


@virtually
async def test_a_router_in_doubt_owns_nothing_while_there_is_another() -> None:
    async with world() as w:
        d, p = await three(w)
        heard = d.enqueue(item(1))
        await w.until(lambda: bool(heard.queued))
        owner = w.owner()
        w.nodes.world.pause(owner.node.id)
        took = await w.until(lambda: heard.owners[-1][0] != owner.node.id)
        assert took < 4.0
        p.offer(1)
        await w.until(lambda: len(p.taken) == 1)
        assert d.open(p.taken[0], "p")
        w.nodes.world.resume(owner.node.id)
        await w.until(w.nodes.converged)


# ------------------------------------------------------------------------ workers come and go


@virtually
async def test_claims_of_a_dead_worker_go_to_another() -> None:
    async with world() as w:
        d, p = await three(w)
        p.offer(2)
        for request in (1, 2):
            d.enqueue(item(request))
        await w.until(lambda: len(p.taken) == 2)
        assert d.open(p.taken[0], "p")
        other = await w.prefiller("q")
        other.offer(2)
        await w.crash("p")
        await w.until(lambda: len(other.taken) == 2)
        assert [d.open(claim, "q") for claim in other.taken] == [False, True]
        other.taken[0].end("refused")
        other.taken[1].end("done")
        await w.until(lambda: w.owner().queues.states()["m"].claimed == 0)
        assert w.owner().queues.counters["redelivered"] == 2


@virtually
async def test_with_a_dead_decode_worker_its_items_go() -> None:
    async with world() as w:
        _, p = await three(w)
        e = await w.decoder("e")
        await w.settled()
        p.offer(1)
        for request in (1, 2, 3):
            e.enqueue(item(request))
        await w.until(lambda: len(p.taken) == 1)
        await w.crash("e")
        await w.until(lambda: len(p.stopped) == 1)
        state = w.owner().queues.states()["m"]
        assert (state.waiting, state.claimed) == (0, 0)


@virtually
async def test_after_a_partition_both_sides_agree_again() -> None:
    async with world() as w:
        d, p = await three(w)
        owner = w.owner()
        p.offer(1)
        heard = [d.enqueue(item(request)) for request in (1, 2, 3)]
        await w.until(lambda: len(p.taken) == 1)
        w.nodes.world.partition("d", owner.node.id)
        w.nodes.world.partition("p", owner.node.id)
        await asyncio.sleep(8.0)
        w.nodes.world.heal()
        p.offer(5)
        await w.until(w.nodes.converged, 60.0)
        await w.until(lambda: all(h.refused or h.queued for h in heard), 20.0)
        await asyncio.sleep(1.0)
        opened = [claim.item.request for claim in p.taken if d.open(claim, "p")]
        refused = [request for request, h in d.heard.items() if h.refused]
        assert sorted([*opened, *refused]) == [1, 2, 3]


# ------------------------------------------------------------------------ slow peers


@virtually
async def test_a_router_that_does_not_read_is_not_given_more() -> None:
    async with world() as w:
        d, _ = await three(w)
        first = d.enqueue(item(0))
        await w.until(lambda: bool(first.queued))
        w.nodes.world.pause(w.owner().node.id)
        names = b"x" * 60_000
        heard = [d.enqueue(item(request, names=names)) for request in range(1, 200)]
        refused = [h for h in heard if h.refused]
        assert {reason for h in refused for reason in h.refused} == {"congested"}
        assert 100 < len(refused) < 150
        w.nodes.world.resume(w.owner().node.id)
        await w.until(lambda: all(h.queued or h.refused for h in heard))
        assert d.enqueue(item(999)).refused == []


def test_a_worker_that_does_not_read_is_cut_and_starts_afresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_module, "_MOST_WAITING", 500)
    monkeypatch.setattr(connection_module, "_WINDOW", 256)

    @virtually
    async def run() -> None:
        async with world() as w:
            d, p = await three(w)
            first = d.enqueue(item(0))
            await w.until(lambda: bool(first.queued))
            owner = w.owner()
            w.nodes.world.partition(owner.node.id, "d", one_way=True)
            for round in range(3):
                heard = [d.enqueue(item(request, round=round)) for request in range(1, 300)]
                await asyncio.sleep(0.1)
            await w.until(lambda: owner.queues.streams == 1)  # of `p` alone
            w.nodes.world.heal()
            await w.until(lambda: all(h.queued for h in heard))
            assert max(h.owners[-1][2] for h in heard) >= 3
            p.offer(300)
            await w.until(lambda: len({c.item.request for c in p.taken}) == 300)
            assert len(d.queue) == 300

    run()


@virtually
async def test_what_is_not_understood_ends_the_stream_and_nothing_else() -> None:
    async with world() as w:
        d, p = await three(w)
        heard = d.enqueue(item(1))
        await w.until(lambda: bool(heard.queued))
        connection = d.queue._connections[w.owner().node.id]
        stream = connection._stream
        assert stream is not None
        stream.try_send(b"nonsense")
        await w.until(lambda: heard.fence[2] == 1)
        await w.until(lambda: len(heard.queued) == 2)
        p.offer(1)
        await w.until(lambda: p.requests == [1])
        assert d.open(p.taken[0], "p")


@virtually
async def test_a_listener_may_turn_away_in_the_middle() -> None:
    async with world() as w:
        d, _ = await three(w)

        class Fickle(Heard):
            def on_owner(self, owner: NodeId, epoch: int, round: int) -> None:
                super().on_owner(owner, epoch, round)
                d.queue.cancel(1)

        d.queue.enqueue(item(1), Fickle())
        await asyncio.sleep(0.2)
        assert len(d.queue) == 0
        assert w.owner().queues.states()["m"].waiting == 0


@virtually
async def test_offers_are_sent_when_they_change_only() -> None:
    async with world() as w:
        _, p = await three(w)
        router = p.claims._routers[w.owner().node.id]
        sent: list[object] = []
        post = router.connection.post
        router.connection.post = lambda message: (sent.append(message), post(message))[1]  # type: ignore[method-assign, func-returns-value]
        for _ in range(5):
            p.offer(3, load=7)
            p.offer(4, load=7)
            await asyncio.sleep(0.01)
        assert sent == [CreditOffer(model="m", credits=4, uncomputed_tokens=7)]


# ------------------------------------------------------------------------ random worlds


async def _random_world(seed: int) -> dict[str, int]:
    """Whatever happens, each request is opened once or refused once, while the fence holds."""
    dice = random.Random(seed)
    seen: dict[str, int] = {}
    async with world(seed) as w:
        for n in range(3):
            await w.router(f"r{n}")
        for n in range(2):
            await w.decoder(f"d{n}")
            await w.prefiller(f"p{n}")
        await w.settled()
        models = ("m", "x")
        request = 0

        def offers() -> None:
            for prefiller in w.prefillers.values():
                for model in models:
                    prefiller.offer(dice.randrange(4), model, load=dice.randrange(3000))

        def work() -> None:
            for name, prefiller in w.prefillers.items():
                for claim in tuple(prefiller.taken):
                    if dice.random() < 0.5:
                        prefiller.taken.remove(claim)
                        if claim in prefiller.stopped:
                            continue
                        decoder = w.decoders.get(claim.decode)
                        alive = decoder is not None and decoder.node.epoch == claim.decode_epoch
                        if alive and decoder is not None and decoder.open(claim, name):
                            claim.opened()
                            claim.end("done")
                        else:
                            claim.end("refused")

        async def fault() -> None:
            kind = dice.choice(("crash", "pause", "cut", "drain", "reset", "none", "none", "none"))
            seen[kind] = seen.get(kind, 0) + 1
            names = sorted(w.nodes.nodes)
            victim = dice.choice(names)
            if kind == "crash" and victim[0] == "r":
                await w.crash(victim)
                await w.router(victim)
            elif kind == "crash" and victim[0] == "p":
                await w.crash(victim)
                await w.prefiller(victim)
            elif kind == "pause":
                w.nodes.world.pause(victim)
                await asyncio.sleep(dice.uniform(0.1, 2.5))
                w.nodes.world.resume(victim)
            elif kind == "cut":
                other = dice.choice([name for name in names if name != victim])
                w.nodes.world.partition(victim, other)
                await asyncio.sleep(dice.uniform(0.1, 4.0))
                w.nodes.world.heal()
            elif kind == "drain" and victim[0] == "r":
                w.routers[victim].service.drain()
                await asyncio.sleep(dice.uniform(0.0, 1.0))
                await w.crash(victim)
                await w.router(victim)
            elif kind == "reset":
                for link in tuple(w.nodes.nodes[victim].endpoint.links.values()):
                    link.abort("the test says so")

        for _ in range(15):
            for decoder in w.decoders.values():
                for _ in range(dice.randrange(4)):
                    request += 1
                    decoder.enqueue(
                        item(
                            request,
                            prompt_tokens=dice.randrange(10, 4000),
                            model=dice.choice(models),
                        )
                    )
                known = [r for r in decoder.heard if r not in decoder.opened]
                if known and dice.random() < 0.2:
                    gone = dice.choice(known)
                    decoder.queue.cancel(gone)
                    del decoder.heard[gone]
            offers()
            await fault()
            await asyncio.sleep(dice.uniform(0.01, 0.5))
            work()
            for router in w.routers.values():
                router.check()
        await w.until(w.nodes.converged, 60.0)
        for _ in range(200):
            for prefiller in w.prefillers.values():
                for model in models:
                    prefiller.offer(8, model)
            await asyncio.sleep(0.05)
            work()
            if all(not decoder.queue for decoder in w.decoders.values()):
                break
        for decoder in w.decoders.values():
            assert len(decoder.queue) == 0
            for number, heard in decoder.heard.items():
                assert (number in decoder.opened) != bool(heard.refused)
        await asyncio.sleep(3.0)
        work()
        await asyncio.sleep(1.0)
        for router in w.routers.values():
            for state in router.queues.states().values():
                assert (state.waiting, state.claimed) == (0, 0)
            router.check()
        seen["opened"] = sum(len(decoder.opened) for decoder in w.decoders.values())
        seen["resubmitted"] = sum(d.queue.resubmitted for d in w.decoders.values())
    return seen


@pytest.mark.timeout(600)
def test_random_worlds(seed: int, long: bool) -> None:
    total: dict[str, int] = {}
    for n in range(60 if long else 3):

        @virtually
        async def run(n: int = n) -> None:
            for kind, count in (await _random_world(seed + n)).items():
                total[kind] = total.get(kind, 0) + count

        run()
    assert total["opened"] > 0
    assert total["resubmitted"] > 0
