from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.errors import Draining, WorkerLost
from pdserve.ids import NodeId
from pdserve.messages.engine import EngineCapabilities, EngineStats
from pdserve.messages.kv_events import (
    KV,
    BlockStored,
    HashesChange,
    HashesCleared,
    HashesStored,
    PoolCleared,
)
from pdserve.messages.node import NodeCard, model_card, summarize_card
from pdserve.messages.request import Finish, FirstTokenStats, TokenDelta, WorkerPhase
from pdserve.messages.routing import LOAD, SEQUENCES, WorkerLoad, booking_key, booking_of
from pdserve.messages.tiers import LaneLoad
from pdserve.messages.worker_stream import (
    WORKER_STREAM,
    AbortRequest,
    OpenRequest,
    OutputBatch,
    WorkerMigrationHint,
)
from pdserve.observe.exposition import render
from pdserve.observe.metrics import Metrics
from pdserve.runtime.topics.replicated_set import SetView
from pdserve.runtime.topics.service import Topics
from pdserve.wire.codec import decoder, encode
from pdserve.worker import agent as module
from pdserve.worker.agent import WorkerAgent
from pdserve.worker.config import WorkerConfig
from pdserve.worker.kv_fetch.push import PUSH_TIMEOUT
from tests.frontend.dispatch.test_model_discovery import model
from tests.net.world import virtually
from tests.runtime.cluster import cluster
from tests.support.net_support import RecordingStreamSink, send_item
from tests.worker.test_request_streams import request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from pdserve.engine.port import TokenSink
    from pdserve.messages.card import ModelCard
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.tiers import KvFetchMode
    from pdserve.runtime.registry import Member
    from pdserve.worker.mode.jobs import LiveMode
    from tests.runtime.cluster import Cluster

CAPABILITIES = EngineCapabilities(
    engine="fake",
    model_type="fake",
    dtype="float32",
    device="cpu",
    max_model_len=64,
    vocab_size=100,
    block_size=32,
    num_blocks=8,
    block_bytes=1,
    kv_layers=5,
    max_batch_tokens=64,
    max_sequences=16,
)


class FakeEngine:
    """What a member needs of an `Engine`."""

    def __init__(self) -> None:
        self.capabilities: EngineCapabilities | None = None
        self.reported = EngineStats()
        self.sinks: dict[int, TokenSink] = {}
        self.aborted: list[int] = []
        self.kv: list[Callable[[Sequence[KvEvent]], None]] = []

    def subscribe_kv(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        self.kv.append(listener)

    def say(self, *events: KvEvent) -> None:
        for listener in self.kv:
            listener(events)

    def stats(self) -> EngineStats:
        return self.reported

    def submit(self, request: GenerateRequest, sink: TokenSink) -> int:
        handle = len(self.sinks) + 1
        self.sinks[handle] = sink
        return handle

    def abort(self, handle: int) -> None:
        self.aborted.append(handle)


class FakeService:
    """What a member needs of a `WorkerService`."""

    def __init__(self) -> None:
        self.config = WorkerConfig()
        self.metrics = Metrics()
        self.engine = FakeEngine()
        self.models: dict[str, ModelCard] = {}
        self.reason: str | None = "starting: loading weights"
        self.draining = False
        self.mode: LiveMode = "aggregated"
        self.changing = ""
        self.leaving = False
        self.tells_kv: bool | None = None

    def ready(self, *cards: ModelCard) -> None:
        self.models = {name: card for card in cards for name in (card.name, *card.aliases)}
        self.engine.capabilities, self.reason = CAPABILITIES, None
        self.tells_kv = CAPABILITIES.kv_events if self.tells_kv is None else self.tells_kv

    def cards(self) -> Mapping[str, ModelCard]:
        return self.models

    def unready_reason(self) -> str | None:
        return self.reason

    def check_accepts(self) -> None:
        if self.draining:
            raise Draining("the worker is shutting down")

    def drain(self) -> None:
        self.draining, self.reason = True, "draining: no new requests are taken"

    def undo_drain(self) -> None:
        self.draining, self.reason = False, None


class Heard:
    """What a log says, pieces of snapshots and events; level with a log of a name of zeros."""

    def __init__(self, heard: list[bytes]) -> None:
        self.load = self.apply = heard.append

    def reset(self) -> None: ...

    def commit(self) -> None: ...

    def digest(self) -> int:
        return 0


class World:
    """A worker `w`, and a frontend `f` that looks at it."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.front, self.node = nodes.nodes["f"], nodes.nodes["w"]
        self.service = FakeService()
        self.topics = Topics(self.node, self.node.timers)
        service: Any = self.service
        card = NodeCard(role="worker", started=1, host="here")
        self.member = WorkerAgent(service, self.node, self.topics, card)
        self.seen = Topics(self.front, self.front.timers)
        self.loads: list[WorkerLoad] = []
        self.held: list[SetView] = []
        self.seen.subscribe_state(LOAD, decoder(WorkerLoad), self._on_load)
        self.seen.subscribe_log(SEQUENCES, self._follow)
        self.sink = RecordingStreamSink()

    def _on_load(self, member: Member, load: WorkerLoad) -> None:
        self.loads.append(load)

    def _follow(self, member: Member) -> SetView:
        self.held.append(SetView())
        return self.held[-1]

    @property
    def card(self) -> NodeCard | None:
        member = self.front.registry.get(NodeId("w"))
        return None if member is None else member.card

    @property
    def batches(self) -> list[OutputBatch]:
        return [decoder(OutputBatch)(item) for item in self.sink.items]

    @property
    def moving(self) -> list[WorkerMigrationHint]:
        return [one for batch in self.batches for one in batch.moving]

    @property
    def bookings(self) -> list[int]:
        return [booking_of(key) for key in self.held[-1].items]

    async def card_with(self, **fields: Any) -> NodeCard:
        def there() -> bool:
            card = self.card
            return card is not None and all(getattr(card, n) == v for n, v in fields.items())

        await self.nodes.until(there)
        assert self.card is not None
        return self.card

    async def open(self, number: int, booking: int, priority: int = 0) -> None:
        link = await self.front.link(NodeId("w"), timeout=1.0)
        if number == 1:
            self.stream = link.open_stream(WORKER_STREAM, b"", self.sink, window=1 << 20)
            await asyncio.sleep(0.01)
        await send_item(
            self.stream,
            encode(OpenRequest(number, booking, replace(request(), priority=priority))),
            timeout=1.0,
        )
        await asyncio.sleep(0.01)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with cluster() as nodes:
        await nodes.add("f", role="frontend")
        await nodes.add("w")
        made = World(nodes)
        yield made
        made.member.close()
        assert made.member.requests == 0
        made.topics.close()
        made.seen.close()


@virtually
async def test_a_card_says_what_is_served_once_it_can_be() -> None:
    async with world() as w:
        card = await w.card_with(reason="starting", models=())
        assert (card.host, card.max_sequences, set(card.topics)) == ("here", 0, {LOAD, SEQUENCES})
        whole = model(aliases=("default",))
        w.service.ready(whole)
        card = await w.card_with(reason="", max_sequences=16, kv_block_bytes=1, kv_layers=5)
        (small,) = card.models
        parts = {h: await w.front.part(NodeId("w"), h, timeout=5.0) for h in small.parts}
        assert model_card(small, parts) == whole


@virtually
async def test_models_go_and_come_back_with_the_engine() -> None:
    async with world() as w:
        w.service.ready(model())
        before = await w.card_with(reason="")
        w.service.reason = "the engine is restarting: " + "x" * 10_000
        card = await w.card_with(models=())
        assert card.reason.startswith("the engine is restarting: x")
        await w.nodes.until(lambda: bool(w.loads) and not w.loads[-1].ready)
        w.service.reason = None
        assert await w.card_with(reason="") == before
        await w.nodes.until(lambda: w.loads[-1].ready)


@virtually
async def test_large_parts_are_hashed_once_not_at_every_look() -> None:
    async with world() as w:
        made = []
        with pytest.MonkeyPatch.context() as patch:

            def counting(card: ModelCard) -> Any:
                made.append(card)
                return summarize_card(card)

            patch.setattr(module, "summarize_card", counting)
            w.service.ready(model())
            await w.card_with(reason="")
            await asyncio.sleep(5.0)
            assert len(made) == 1
            w.service.ready(model("other"))
            await w.nodes.until(lambda: len(made) == 2)


@virtually
async def test_what_can_be_reused_is_told_from_the_first_event_on() -> None:
    async with world() as w:
        w.service.engine.say(BlockStored([bytes(16)], b"R" * 16))  # before anybody can follow
        w.service.ready(model())
        card = await w.card_with(reason="")
        assert set(card.topics) == {LOAD, SEQUENCES, KV}
        heard: list[bytes] = []
        w.seen.subscribe_log(KV, lambda member: Heard(heard))
        await w.nodes.until(lambda: len(heard) == 1)
        w.service.engine.say(PoolCleared())
        await w.nodes.until(lambda: len(heard) == 2)
        changes = [decoder(list[HashesChange])(event) for event in heard]
        assert changes == [
            [HashesStored(0, b"R" * 8, bytes(8))],
            [HashesCleared(0)],
        ]


@virtually
async def test_an_engine_that_tells_nothing_has_no_topic_for_it() -> None:
    """An empty one would say that nothing is there."""
    async with world() as w:
        w.service.tells_kv = False
        w.service.ready(model())
        assert KV not in (await w.card_with(reason="")).topics
        w.service.tells_kv = True
        await w.nodes.until(lambda: KV in (w.card or NodeCard()).topics)
        w.service.tells_kv = None  # it restarts: nothing is known, nothing changes
        await asyncio.sleep(1.0)
        assert KV in (w.card or NodeCard()).topics
        w.service.tells_kv = False
        await w.nodes.until(lambda: KV not in (w.card or NodeCard()).topics)


@virtually
async def test_a_worker_with_too_many_names_says_so_and_lives_on() -> None:
    async with world() as w:
        w.service.ready(model(aliases=tuple(f"{'name' * 20}-{n}" for n in range(200))))
        card = await w.card_with(reason="its names, aliases and adapters do not fit a card")
        assert card.models == ()
        w.service.ready(model())
        await w.card_with(reason="")


@virtually
async def test_a_first_token_is_told_at_once_and_how_it_came() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        await w.open(1, booking=41)
        await w.open(2, booking=42)
        await w.nodes.until(lambda: w.bookings == [41, 42])
        assert set(w.held[-1].items.values()) == {b""}
        told_to_the_frontend = (WorkerPhase("chunk", 0.5, 0.75, 64),)
        started = FirstTokenStats(64, 0.5, 0.25, 0.125, phases=told_to_the_frontend)
        for choice in (0, 1):  # of several choices the first that comes counts
            delta = TokenDelta(handle=1, choice=choice, tokens=[1], started=started)
            w.service.engine.sinks[1].on_delta(delta)
            started = FirstTokenStats(0, 9.0, 9.0, 9.0)
        await asyncio.sleep(0.008)  # on the way; gathering more would take longer
        told = w.held[-1].items[booking_key(41)]
        assert decoder(FirstTokenStats)(told) == FirstTokenStats(64, 0.5, 0.25, 0.125)


@virtually
async def test_a_first_token_is_told_even_if_it_is_the_last() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        heard: list[bytes] = []
        view = w.held[-1]
        view._on_change = lambda puts, drops: heard.extend([*puts.values(), *drops])
        await w.open(1, booking=41)
        await w.nodes.until(lambda: heard == [b""])
        started, finish = FirstTokenStats(0, 0.0, 0.0, 0.0), Finish(reason="length")
        delta = TokenDelta(handle=1, choice=0, tokens=[1], finish=finish, started=started)
        w.service.engine.sinks[1].on_delta(delta)
        await w.nodes.until(lambda: len(heard) == 3)
        assert heard[1:] == [encode(started), booking_key(41)]


@virtually
async def test_what_has_ended_no_longer_runs_whatever_the_engine_said_last() -> None:
    """Its numbers are older than its deltas."""
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        await w.open(1, booking=41)
        lane = LaneLoad("h2d", 5, 1e9, 0.001)
        w.service.engine.reported = EngineStats(
            running=1, kv_tokens=70, uncomputed_tokens=9, itl=0.25, lanes=(lane,)
        )
        await w.nodes.until(lambda: w.loads[-1].running == 1)
        load = w.loads[-1]
        assert (load.kv_tokens, load.uncomputed_tokens, load.itl) == (70, 9, 0.25)
        assert load.lanes == (lane,)
        finish = Finish(reason="stop")
        w.service.engine.sinks[1].on_delta(
            TokenDelta(handle=1, choice=0, tokens=[1], finish=finish)
        )
        await w.nodes.until(lambda: w.loads[-1].running == 0)


@virtually
async def test_bookings_are_told_while_they_are_held() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        await w.open(1, booking=41)
        await w.open(2, booking=42)
        await w.nodes.until(lambda: w.bookings == [41, 42])
        await w.nodes.until(lambda: w.loads[-1].waiting == 2)
        w.service.engine.reported = EngineStats(running=2, waiting=0)
        await w.nodes.until(lambda: (w.loads[-1].running, w.loads[-1].waiting) == (2, 0))
        finish = Finish(reason="stop")
        w.service.engine.sinks[1].on_delta(
            TokenDelta(handle=1, choice=0, tokens=[1], finish=finish)
        )
        await w.nodes.until(lambda: w.bookings == [42])
        assert w.member.requests == 1


@virtually
async def test_a_frontend_held_for_dead_frees_all_it_had_here() -> None:
    """Its connection may stand for long after the cluster has given it up."""
    async with world() as w:
        await w.nodes.add("x")
        w.service.ready(model())
        await w.card_with(reason="")
        await w.open(1, booking=41)
        link = w.node.link_nowait(NodeId("f"))
        assert link is not None
        w.nodes.world.pause("f")
        await w.nodes.until(lambda: w.node.registry.get(NodeId("f")) is None, 30.0)
        assert (w.member.requests, w.service.engine.aborted, link.down) == (0, [1], None)
        w.nodes.world.resume("f")
        assert isinstance(await w.sink.end(), WorkerLost)
        await w.nodes.until(w.nodes.converged, 30.0)


@virtually
async def test_draining_is_told_at_once_and_waits_for_what_runs() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        await w.open(1, booking=41)
        draining = asyncio.ensure_future(w.member.drain(10.0))
        before = w.nodes.loop.time()
        card = await w.card_with(draining=True)
        assert w.nodes.loop.time() - before < 0.5
        assert len(card.models) == 1  # it is no unknown model while it goes
        await w.nodes.until(lambda: not w.loads[-1].ready)
        assert not draining.done()
        finish = Finish(reason="stop")
        w.service.engine.sinks[1].on_delta(
            TokenDelta(handle=1, choice=0, tokens=[1], finish=finish)
        )
        assert await draining
        assert w.batches[-1].deltas[-1].finish == finish


@virtually
async def test_a_drained_worker_offers_its_blocks_within_the_time() -> None:
    pushes: list[float] = []

    class Pusher:
        async def push(self, timeout: float) -> int:
            pushes.append(timeout)
            return 0

    modes: tuple[KvFetchMode, ...] = ("auto", "never")
    async with world() as w:
        pusher: Any = Pusher()
        w.member._pusher = pusher
        w.service.ready(model())
        for mode in modes:
            w.service.config = WorkerConfig(kv_fetch=mode)
            assert await w.member.drain(5.0)
            assert await w.member.drain(100.0)
            assert await w.member.drain(0.0)
        assert pushes == [pytest.approx(5.0, abs=0.1), PUSH_TIMEOUT]


@virtually
async def test_whoever_has_a_request_here_is_asked_to_move_it_when_the_worker_drains() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        await w.open(1, booking=41)
        await w.open(2, booking=42)
        draining = asyncio.ensure_future(w.member.drain(10.0))
        await w.nodes.until(lambda: len(w.batches[-1].moving) == 2, timeout=0.1)
        assert w.batches[-1].moving == [
            WorkerMigrationHint(1, "drain"),
            WorkerMigrationHint(2, "drain"),
        ]
        assert w.member.left == 2
        for number in (1, 2):
            await send_item(w.stream, encode(AbortRequest(number)), timeout=1.0)
        assert await draining
        assert w.service.engine.aborted == [1, 2]


@virtually
async def test_what_cannot_move_in_time_ends_so_that_its_frontend_sends_it_on() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        await w.open(1, booking=41)
        before = w.nodes.loop.time()
        assert not await w.member.drain(2.0)
        assert w.nodes.loop.time() - before == pytest.approx(2.0)
        assert isinstance(await w.sink.end(), Draining)
        assert (w.member.left, w.service.engine.aborted) == (0, [1])
        assert await w.member.drain(2.0)  # by a signal, after an operator's wish


@virtually
async def test_a_draining_worker_gives_its_engine_no_new_requests() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        await w.open(1, booking=41)
        w.service.drain()
        await w.open(2, booking=42)
        await w.nodes.until(lambda: bool(w.batches))
        assert [one.kind for one in w.batches[-1].rejected] == ["Draining"]
        assert set(w.service.engine.sinks) == {1}


@virtually
async def test_closing_tells_frontends_why() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        await w.open(1, booking=41)
        w.member.close()
        error = await w.sink.end()
        assert isinstance(error, Draining)
        assert error.retry_after is not None
        await w.nodes.until(lambda: w.bookings == [])
        assert [OutputBatch] == [type(decoder(OutputBatch)(item)) for item in w.sink.items]


async def _start(w: World, *handles: int) -> None:
    for handle in handles:
        delta = TokenDelta(
            handle=handle, choice=0, tokens=[1], started=FirstTokenStats(0, 0.0, 0.0, 0.0)
        )
        w.service.engine.sinks[handle].on_delta(delta)
    await asyncio.sleep(0.01)


@virtually
async def test_a_worker_whose_pool_runs_out_asks_for_relief_where_there_is_another() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        for number in (1, 2, 3):
            await w.open(number, booking=number)
        await _start(w, 1, 2)
        w.service.engine.reported = EngineStats(running=3, blocks_total=8, blocks_free=0)
        await asyncio.sleep(1.0)
        assert w.moving == []
        other = await w.nodes.add("x")
        small, parts = summarize_card(model())
        other.publish_card(NodeCard(role="worker", models=(small,), draining=True), parts)
        await asyncio.sleep(1.0)
        assert w.moving == []
        other.publish_card(NodeCard(role="worker", models=(small,)), parts)
        await w.nodes.until(lambda: bool(w.moving))
        assert w.moving == [WorkerMigrationHint(2, "kv")], "the latest of those that have begun"
        await asyncio.sleep(5.0)
        assert w.moving == [WorkerMigrationHint(2, "kv")]
        assert 'moves_asked_total{reason="kv"} 1.0' in render(w.service.metrics.families()).decode()


@virtually
async def test_the_least_important_is_preempted_first_and_of_those_the_latest() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        for number in (1, 2, 3, 4):
            await w.open(number, booking=number, priority=1 if number == 4 else 0)
        await _start(w, 1, 2, 4)
        assert w.member._channels.victims() == [2, 1, 4]


@virtually
async def test_a_worker_whose_drain_is_undone_takes_requests_again() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        await w.open(1, booking=41)
        draining = asyncio.ensure_future(w.member.drain(10.0))
        await w.card_with(draining=True)
        draining.cancel()
        w.member.undo_drain()
        await w.card_with(draining=False, reason="")
        await w.open(2, booking=42)
        await w.nodes.until(lambda: w.member.left == 2)
        assert w.member.load().ready
        assert not any(batch.rejected for batch in w.batches)


@virtually
async def test_one_whose_requests_were_ended_takes_new_ones_after_an_undo() -> None:
    async with world() as w:
        w.service.ready(model())
        await w.card_with(reason="")
        await w.open(1, booking=41)
        assert not await w.member.drain(1.0)
        w.member.undo_drain()
        await w.card_with(draining=False, reason="")
        assert w.member.load().ready
