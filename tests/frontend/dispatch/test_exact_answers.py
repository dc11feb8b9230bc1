"""Whatever happens to workers, clients get what they would have got: answers over a cluster whose
engines die, whose links break and whose workers want to be rid of requests, against a calm one.

Real sockets to the frontend, nodes on a network in memory, engines whose tokens depend on every
block that they read.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pdserve.errors import Draining
from pdserve.frontend.service import FrontendService
from pdserve.messages.engine import EngineSpec
from pdserve.messages.node import NodeCard, summarize_card
from pdserve.sim.engine import VirtualTimeEngine
from pdserve.testing.scripted import ENGINE
from pdserve.worker.request_streams import RequestStreams
from tests.frontend.fake_cluster import Router, World
from tests.frontend.output.test_stream_equals_unary import assembled, whole
from tests.frontend.support import HELLO, MODEL, TOKENIZER, Client, card, until
from tests.runtime.cluster import cluster
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.runtime.node import Node

EXAMPLES = 150 if is_long() else 6
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PACE = 0.001
SPEC = EngineSpec(
    engine=ENGINE,
    model="",
    block_size=8,
    max_sequences=8,
    max_batch_tokens=64,
    options={
        "blocks": "400",
        "max_len": "400",
        "vocab": str(TOKENIZER.vocab_size),
        "eos": "1",
    },
)


class EngineWorker:
    """A node with an engine of its own, which can be harmed."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.engine = VirtualTimeEngine(SPEC, pace=PACE, load_time=0.0)
        self.channels = RequestStreams(self.engine)
        node.host(self.channels)

    async def start(self) -> None:
        await self.engine.start()
        small, parts = summarize_card(card(block_size=SPEC.block_size, max_model_len=400))
        self.node.publish_card(NodeCard(role="worker", started=1, models=(small,)), parts)


class Site:
    """A frontend with its cluster of three workers."""

    def __init__(self, w: World, service: FrontendService, http: aiohttp.ClientSession) -> None:
        self.w = w
        self.client = Client(service, w.backend, http)  # type: ignore[arg-type]
        self.workers: list[EngineWorker] = []
        self.router: Router

    @property
    def idle(self) -> bool:
        engines = [worker.engine.stats() for worker in self.workers]
        busy = [s.running or s.waiting or s.blocks_used for s in engines]
        return not any(busy) and not self.w.backend.requests and not self.router.open

    def harm(self, random: random.Random) -> str:
        """Something happens to a worker."""
        worker = random.choice(self.workers)
        random.shuffle(self.router.workers)
        kind = random.choice(("die", "cut", "end", "kv", "itl", "queue", "drain"))
        if kind == "die":
            worker.engine.die(restart_after=random.choice((0.0, 0.02)))
        elif kind == "cut":
            link = self.w.node.link_nowait(worker.node.id)
            if link is not None:
                link.abort("pulled")
        elif kind == "end":
            worker.channels.close(Draining("going away, it says"))
        else:
            worker.channels.ask_to_move(None, kind)  # type: ignore[arg-type]
        return kind

    async def harass(self, random: random.Random) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.002, 0.03))
            self.harm(random)


@asynccontextmanager
async def site(**config: Any) -> AsyncIterator[Site]:
    """Afterwards nothing is left of any request."""
    async with cluster() as nodes, aiohttp.ClientSession() as http:
        w = World(nodes, await nodes.add("f", role="frontend"), poison_after=0, port=0, **config)
        service = FrontendService(w.backend.config, w.backend, w.backend.metrics)
        made = Site(w, service, http)
        made.router = await w.router("r")
        for name in "abc":
            worker = EngineWorker(await nodes.add(name, role="worker"))
            await worker.start()
            made.workers.append(worker)
            made.router.workers.append((name, worker.node.epoch))
        await until(lambda: w.backend.unready_reason() is None)
        await until(lambda: len(w.backend.members.workers(MODEL)) == 3)
        await service.start()
        await service._models.prepare()
        try:
            yield made
            await until(lambda: made.idle)
            assert not w.backend.routers.booked
        finally:
            await service.stop(0)
            w.backend.close(Draining("the test is over"))
            for worker in made.workers:
                await worker.engine.stop()


def body(random: random.Random, *, chat: bool) -> dict[str, Any]:
    """A request with whatever may go wrong when it goes on elsewhere."""
    made: dict[str, Any] = {
        "max_tokens": random.randrange(1, 60),
        "n": random.choice((1, 1, 2, 3)),
        "seed": random.getrandbits(32),
        "temperature": random.choice((0.0, 1.0)),
        "ignore_eos": random.random() < 0.5,
        "min_tokens": random.choice((0, 5)),
        "return_token_ids": random.random() < 0.5,
    }
    made["min_tokens"] = min(made["min_tokens"], made["max_tokens"])
    if random.random() < 0.5:
        made["stop"] = random.sample(["e", "th", " ", "fox", "好", "ü", "12"], 2)
    if chat:
        made |= HELLO | ({"logprobs": True, "top_logprobs": 2} if random.random() < 0.4 else {})
        return made
    made["prompt"] = random.choice(["a fox " * 20, ["x", "naïve 好"], [5, 6, 7] * 30])
    if random.random() < 0.4:
        made["logprobs"] = 1
    if random.random() < 0.4:
        made["echo"] = True
    return made


async def answered(client: Client, path: str, asked: dict[str, Any], *, stream: bool) -> Any:
    """What a client makes of it, and its usage, without what depends on the course."""
    if stream:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await client.chunks(path, **asked, stream_options=options)
        found, usage = assembled(chunks, path == CHAT), chunks[-1]["usage"]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
        assert counts == sorted(counts)
    else:
        status, _, answer = await client.post(path, asked)
        assert status == 200, answer
        found, usage = whole(answer, path == CHAT), answer["usage"]
    counted = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    return found, counted, usage["pdserve"].get("migrations") or 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_the_same_whatever_happens_to_workers(
    seed: int, path: str, stream: bool
) -> None:
    draw = random.Random(seed)
    examples = migrated = 0
    async with site() as made:
        # Some seeds draw short answers first, which end before anything happens to their worker.
        while examples < EXAMPLES or (not migrated and examples < 10 * EXAMPLES):
            examples += 1
            asked = body(draw, chat=path == CHAT)
            expected, usage, _ = await answered(made.client, path, asked, stream=stream)
            harassing = asyncio.ensure_future(made.harass(draw))
            try:
                found = await answered(made.client, path, asked, stream=stream)
            finally:
                harassing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await harassing
            assert found[:2] == (expected, usage), asked
            migrated += found[2]
        ((_, first_tokens),) = made.w.backend.metrics.time_to_first_token
        assert first_tokens.count == 2 * examples
    assert migrated, "nothing went on elsewhere"
