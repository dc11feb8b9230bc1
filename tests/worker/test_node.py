"""A worker's node begins, drains and ends as a whole; its engine is simulated."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.blocks.hashing import HASH_SECRET_TEST, hash_secret_id
from pdserve.messages.node import NodeCard
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.observe.metrics import Metrics
from pdserve.runtime.hash_secret import FixedHashSecret
from pdserve.sim.engine import VirtualTimeEngine
from pdserve.sim.virtual_model import VirtualModel
from pdserve.testing.scripted import ENGINE
from pdserve.token_ids import token_ids
from pdserve.worker.config import WorkerConfig
from pdserve.worker.node import WorkerNode
from tests.frontend.fake_cluster import Sink
from tests.net.world import virtually
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from pdserve.messages.engine import EngineSpec
    from pdserve.runtime.node import Node
    from tests.runtime.cluster import Cluster


def engine(spec: EngineSpec) -> VirtualTimeEngine:
    return VirtualTimeEngine(spec, pace=0.02, load_time=0.5)


def worker(node: Node) -> WorkerNode:
    config = WorkerConfig(engine=ENGINE, engine_options={"blocks": "64", "max_len": "200"})
    return WorkerNode(
        node,
        config,
        engine,
        NodeCard(role="worker"),
        FixedHashSecret(HASH_SECRET_TEST),
        Metrics(),
        source=VirtualModel("m"),
    )


def served(made: WorkerNode, watcher: Node) -> list[str] | None:
    """The models in its card, as the watcher knows it; None if the worker is gone."""
    member = watcher.registry.get(made.node.id)
    if member is None:
        return None
    return [] if member.card is None else [model.name for model in member.card.models]


async def started(nodes: Cluster) -> tuple[WorkerNode, Node]:
    watcher = await nodes.add("watcher", role="router")
    made = worker(nodes.make("w"))
    await made.join()
    await nodes.until(lambda: served(made, watcher) is not None)
    return made, watcher


@virtually
async def test_others_see_the_worker_before_its_model_has_loaded() -> None:
    async with cluster() as nodes:
        made, watcher = await started(nodes)
        assert served(made, watcher) == []
        await made.load()
        await nodes.until(lambda: served(made, watcher) == ["m"])
        assert made.service.names_id == hash_secret_id(HASH_SECRET_TEST)
        await made.close()
        assert await nodes.until(lambda: served(made, watcher) is None) < 0.1


@virtually
async def test_a_drain_waits_for_requests_and_ends_what_is_left() -> None:
    async with cluster() as nodes:
        made, watcher = await started(nodes)
        await made.load()
        assert await made.drain(1.0)
        await nodes.until(lambda: served(made, watcher) == ["m"])
        member = watcher.registry.get(made.node.id)
        assert member is not None
        assert member.card is not None
        assert member.card.draining
        await made.close()


@virtually
async def test_an_engine_ends_its_requests_when_the_node_closes() -> None:
    async with cluster() as nodes:
        made, _ = await started(nodes)
        await made.load()
        sink = Sink()
        sampling = SamplingParams(max_tokens=100, ignore_eos=True)
        asked = GenerateRequest(
            request_id="r", model="m", prompt=token_ids([1, 2, 3]), sampling=sampling
        )
        made.agent.submit(asked, sink)
        await asyncio.sleep(0.2)
        await made.close(leave=False)
        assert sink.errors
