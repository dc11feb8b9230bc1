"""All of it together: real workers, queue, engine cores and transports in one simulated world; what
is decoded is what one worker alone would have said."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.blocks.hashing import HASH_SECRET_TEST
from pdserve.errors import NotReady
from pdserve.messages.engine import TransferSpec
from pdserve.messages.handoff import SetDisagg
from pdserve.messages.node import NodeCard
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.observe.metrics import Metrics
from pdserve.runtime.hash_secret import FixedHashSecret
from pdserve.runtime.rpc_methods import DISAGG
from pdserve.sim.engine import VirtualTimeEngine
from pdserve.sim.virtual_model import VirtualModel
from pdserve.testing.fake_rdma import FakeFabric
from pdserve.testing.scripted import ENGINE, reference_tokens
from pdserve.token_ids import token_ids
from pdserve.worker.config import WorkerConfig
from pdserve.worker.disagg.prefill_job import PrefillJob
from pdserve.worker.node import WorkerNode
from tests.net.world import virtually
from tests.runtime.cluster import cluster
from tests.worlds.roles import NodeSettings, Router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.request import FirstTokenStats, TokenDelta
    from pdserve.runtime.node import Node
    from tests.runtime.cluster import Cluster

SIZE = 8
PATCH = pytest.MonkeyPatch()


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    PATCH.undo()


class Worker(WorkerNode):
    def __init__(self, node: Node, mode: Any, fabric: FakeFabric, **fields: Any) -> None:
        fields.setdefault("transfer", TransferSpec(backends=("fake",)))
        config = WorkerConfig(
            engine=ENGINE,
            engine_options={"blocks": "64", "max_len": "200"},
            block_size=SIZE,
            max_sequences=8,
            max_batch_tokens=64,
            mode=mode,
            disagg_min_tokens=16,
            **fields,
        )

        def make_engine(spec: EngineSpec) -> VirtualTimeEngine:
            return VirtualTimeEngine(spec, pace=0.02, load_time=0.1, fabric=fabric)

        super().__init__(
            node,
            config,
            make_engine,
            NodeCard(role="worker"),
            FixedHashSecret(HASH_SECRET_TEST),
            Metrics(),
            source=VirtualModel("m"),
        )

    def stats(self) -> Any:
        return self.service.engine.stats()


class Sink:
    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finished = 0
        self.where: list[str] = []
        self.started: list[FirstTokenStats] = []
        self.error: Exception | None = None
        self.received = 0

    def on_delta(self, delta: TokenDelta) -> None:
        self.tokens.setdefault(delta.choice, []).extend(delta.tokens)
        self.finished += delta.finish is not None
        if delta.started is not None:
            self.where.append(delta.started.prefill)
            self.started.append(delta.started)
            self.received = delta.started.received_tokens

    def on_error(self, error: Exception) -> None:
        self.error = error


class Whole:
    """A router, a decode worker and prefill workers."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.fabric = FakeFabric(random.Random(1))
        self.workers: dict[str, Worker] = {}

    async def begin(self, *prefills: str, **fields: Any) -> None:
        self.router = Router(self.nodes.make("r", role="router"), NodeSettings())
        self.nodes.nodes["r"] = self.router.node
        await self.router.start()
        for name, mode in (("d", "decode"), *((p, "prefill") for p in prefills)):
            node = self.nodes.make(name)
            self.nodes.nodes[name] = node
            self.workers[name] = Worker(node, mode, self.fabric, **fields)
            await self.workers[name].join()
            await self.workers[name].load()
        self.d = self.workers["d"]
        await self.nodes.until(self.nodes.converged)
        await self.nodes.until(self._known)

    def _known(self) -> bool:
        assert self.d.agent.decode is not None
        queue = self.d.agent.decode.queue
        assert queue is not None
        state = queue.state("m")
        return len(self.workers) == 1 or (
            state is not None and state.workers == len(self.workers) - 1 and state.credits > 0
        )

    async def ask(self, asked: GenerateRequest, timeout: float = 30.0) -> Sink:
        sink = Sink()
        self.d.agent.submit(asked, sink)
        await self.nodes.until(lambda: sink.finished == asked.n or bool(sink.error), timeout)
        return sink

    async def close(self) -> None:
        for worker in self.workers.values():
            await worker.close(leave=False)
        await self.router.stop(leave=False)


def asked(name: str, prompt: list[int], **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=10, seed=5, ignore_eos=True)
    return GenerateRequest(
        request_id=name, model="m", prompt=token_ids(prompt), sampling=sampling, **fields
    )


def right(sink: Sink, wanted: GenerateRequest) -> bool:
    assert sink.error is None
    return all(
        sink.tokens[choice] == reference_tokens(wanted, choice, max_len=200)
        for choice in range(wanted.n)
    )


@virtually
async def test_tokens_are_those_of_one_worker() -> None:
    async with cluster() as nodes:
        whole = Whole(nodes)
        await whole.begin("p")
        for length in (17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 100, 150):
            wanted = asked(f"r{length}", [(length * 7 + i) % 90 + 3 for i in range(length)])
            sink = await whole.ask(wanted)
            assert sink.where == ["remote; node=p; reason=rule"]
            assert sink.received == length
            assert right(sink, wanted)
        decode, prefill = whole.d.agent.decode, whole.workers["p"].agent.prefill
        assert decode is not None
        assert prefill is not None
        assert decode.numbers().ended == {"done": 12}
        await nodes.until(lambda: len(prefill) == 0)
        assert prefill.numbers().ended == {"done": 12}
        assert whole.d.stats().received_tokens == sum(
            (17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 100, 150)
        )
        await whole.close()


@virtually
async def test_a_request_that_asks_is_told_how_its_prompt_came() -> None:
    async with cluster() as nodes:
        whole = Whole(nodes)
        await whole.begin("p")
        sink = await whole.ask(asked("traced", [9] * 45, trace=True))
        (started,) = sink.started
        assert [phase.name for phase in started.phases] == [
            "handoff_queue",
            "handoff_open",
            "handoff_fill",
            "handoff_activate",
        ]
        ends = [phase.end for phase in started.phases]
        assert [phase.start for phase in started.phases[1:]] == ends[:-1]
        fill = started.phases[2]
        assert (fill.node, fill.backend, fill.attempt, fill.tokens) == ("p", "fake", 1, 45)
        assert fill.end > fill.start
        silent = await whole.ask(asked("silent", [8] * 45))
        assert silent.started[0].phases == ()
        local = await whole.ask(asked("local", [4] * 16, trace=True))
        assert [phase.name for phase in local.started[0].phases] == ["chunk"]
        await whole.close()


@virtually
async def test_choices_share_what_was_received() -> None:
    async with cluster() as nodes:
        whole = Whole(nodes)
        await whole.begin("p")
        wanted = asked("n", [9] * 45, n=3)
        sink = await whole.ask(wanted)
        assert sink.where == ["remote; node=p; reason=rule"] * 3
        assert right(sink, wanted)
        await whole.close()


@virtually
async def test_short_prompts_and_those_without_prefill_workers_stay() -> None:
    async with cluster() as nodes:
        whole = Whole(nodes)
        await whole.begin("p")
        short = asked("short", [4] * 16)
        sink = await whole.ask(short)
        assert sink.where == ["local; node=d; reason=short_prompt"]
        assert right(sink, short)
        await nodes.crash("p")
        await whole.workers.pop("p").close()
        wanted = asked("alone", [4] * 40)
        await asyncio.sleep(60.0)
        sink = await whole.ask(wanted)
        assert sink.where == ["local; node=d; reason=no_prefill_worker"]
        assert right(sink, wanted)
        await whole.close()


@virtually
async def test_an_operator_changes_the_choice() -> None:
    async with cluster() as nodes:
        whole = Whole(nodes)
        await whole.begin("p")
        link = await whole.router.node.link(whole.d.node.id, timeout=1.0)
        before = await link.request(DISAGG, SetDisagg("never"), timeout=1.0)
        await nodes.until(lambda: getattr(whole.d.node.card, "disagg", "") == "never")
        assert before.before == "rule"
        sink = await whole.ask(asked("r", [4] * 40))
        assert sink.where == ["local; node=d; reason=never"]
        numbers = whole.d.agent.handoffs()
        assert numbers is not None
        assert numbers.disagg == "never"
        await whole.close()


@virtually
async def test_a_prefill_worker_takes_no_requests() -> None:
    async with cluster() as nodes:
        whole = Whole(nodes)
        await whole.begin("p")
        with pytest.raises(NotReady, match="p is a prefill worker"):
            whole.workers["p"].agent.submit(asked("r", [4] * 40), Sink())
        card = whole.workers["p"].node.card
        assert card is not None
        assert (card.mode, card.transfers) == ("prefill", ("fake",))
        await whole.close()


@virtually
async def test_what_is_cancelled_leaves_nothing() -> None:
    async with cluster() as nodes:
        whole = Whole(nodes)
        await whole.begin("p")
        decode, prefill = whole.d.agent.decode, whole.workers["p"].agent.prefill
        assert decode is not None
        assert prefill is not None
        for delay in [0.0, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3]:
            sink = Sink()
            handle = whole.d.agent.submit(asked(f"r{delay}", [int(delay * 100) + 3] * 120), sink)
            await asyncio.sleep(delay)
            whole.d.agent.abort(handle)
            took = await nodes.until(
                lambda: len(decode) == 0 and len(prefill) == 0 and idle(whole), timeout=5.0
            )
            assert took <= 1.5
        await whole.close()


def idle(whole: Whole) -> bool:
    """Statistics are told once a second."""
    stats = [worker.stats() for worker in whole.workers.values()]
    return all(
        s.blocks_used == s.blocks_quarantined == s.remote == s.sending == s.running == 0
        for s in stats
    )


@virtually
async def test_prefill_workers_die_under_work() -> None:
    async with cluster() as nodes:
        whole = Whole(nodes)
        await whole.begin("p1", "p2")
        wanted = [asked(f"r{i}", [i + 3] * 120) for i in range(6)]
        sinks = [Sink() for _ in wanted]
        for one, sink in zip(wanted, sinks, strict=True):
            whole.d.agent.submit(one, sink)
        await asyncio.sleep(0.1)
        dead = whole.workers.pop("p1")
        await nodes.crash("p1")
        await nodes.until(lambda: all(sink.finished or sink.error for sink in sinks), 60.0)
        assert all(right(sink, one) for sink, one in zip(sinks, wanted, strict=True))
        await dead.close()
        await nodes.until(lambda: idle(whole), 30.0)
        await whole.close()


@virtually
async def test_a_prefill_worker_that_drains_hands_over_what_it_has_computed() -> None:
    hand_over = PrefillJob._hand_over

    async def slowly(self: PrefillJob) -> None:
        await asyncio.sleep(1.0)
        await hand_over(self)

    async with cluster() as nodes:
        PATCH.setattr(PrefillJob, "_hand_over", slowly)
        whole = Whole(nodes)
        await whole.begin("p", "q")
        sink, wanted = Sink(), asked("r", [9] * 45)
        whole.d.agent.submit(wanted, sink)

        def handing() -> Worker | None:
            found = [w for w in whole.workers.values() if w.agent.prefill and w.agent.prefill]
            states = [(w, w.agent.handoffs()) for w in found]
            return next((w for w, n in states if n and n.states.get("sent")), None)

        await nodes.until(lambda: handing() is not None)
        p = handing()
        assert p is not None
        assert await p.agent.drain(10.0)
        p.agent.close()
        await p.service.stop()
        await nodes.until(lambda: sink.finished == 1)
        assert right(sink, wanted)
        decode = whole.d.agent.decode
        assert decode is not None
        assert decode.numbers().ended == {"done": 1}, "computed once"
        await whole.close()


@virtually
async def test_draining_does_not_outlast_its_time() -> None:
    async def never(self: PrefillJob) -> None:
        await asyncio.sleep(100.0)

    async with cluster() as nodes:
        PATCH.setattr(PrefillJob, "_hand_over", never)
        whole = Whole(nodes)
        await whole.begin("p")
        whole.d.agent.submit(asked("r", [9] * 45), Sink())
        prefill = whole.workers["p"].agent.prefill
        assert prefill is not None
        await nodes.until(lambda: bool(prefill.numbers().states.get("sent")))
        before = nodes.loop.time()
        assert not await whole.workers["p"].agent.drain(2.0)
        assert nodes.loop.time() - before == pytest.approx(2.0, abs=0.2)
        await whole.close()


@virtually
async def test_given_output_alone_is_worth_a_prefill_worker() -> None:
    async with cluster() as nodes:
        whole = Whole(nodes)
        await whole.begin("p")
        text = [i % 90 + 3 for i in range(24)]
        assert right(await whole.ask(asked("before", text)), asked("before", text))
        output = [*text[16:], *range(3, 63)]
        sampling = SamplingParams(max_tokens=len(output) + 10, seed=5, ignore_eos=True)
        wanted = GenerateRequest(
            request_id="r",
            model="m",
            prompt=token_ids(text[:16]),
            sampling=sampling,
            output=[output],
        )
        sink = await whole.ask(wanted)
        assert sink.error is None
        assert len(sink.tokens[0]) == 10
        assert sink.where == ["remote; node=p; reason=rule"]
        decode = whole.d.agent.decode
        assert decode is not None
        numbers = decode.numbers()
        assert numbers.remote == {"rule": 2}
        assert numbers.ended == {"done": 2}
        assert numbers.local == {}
        await whole.close()
