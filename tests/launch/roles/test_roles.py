"""Roles as parts of one process, on nodes in memory; the engine is played by hand."""

from __future__ import annotations

import asyncio
import io
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from msgspec.structs import replace

from pdserve.clock import SystemClock
from pdserve.engine.port import EngineState
from pdserve.launch.cluster.node_factory import NodeFactory
from pdserve.launch.config.resolve import resolve
from pdserve.launch.console import Console
from pdserve.launch.role_traces import RoleTraces
from pdserve.launch.roles import frontend as module
from pdserve.launch.roles.base import RoleContext
from pdserve.launch.roles.frontend import FrontendRole
from pdserve.launch.roles.router import RouterRole
from pdserve.launch.roles.worker import WorkerRole
from pdserve.messages.engine import EngineStats
from pdserve.messages.node import NodeCard
from pdserve.messages.tiers import TierStats
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.runtime.topics.service import Topics
from pdserve.worker.agent import WorkerAgent
from pdserve.worker.config import DiskKv, WorkerConfig
from tests.engine_core.test_main import CAPABILITIES
from tests.frontend.support import card, until
from tests.worker.test_agent import FakeService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pdserve.launch.roles.base import Role


class World:
    """A router, a frontend, and a worker without an engine."""

    def __init__(self, folder: Path) -> None:
        config = resolve({"port": "0"}, {"PDSERVE_CONFIG": "none"}, folder)
        self.membership = NodeFactory(config.cluster, private=True)
        self.degradations = Degradations(Metrics())
        screen = Console(io.StringIO(), SystemClock())
        self.context = RoleContext(config, self.membership, screen, Metrics(), self.degradations)
        self.failures: list[BaseException] = []
        self.given_up = 0
        self.router = RouterRole(self.context, self.membership.node("router"))
        self.frontend = FrontendRole(
            self.context, self.membership.node("frontend", first=False), self.failures.append
        )
        self.service = FakeService()
        self.worker = self.membership.node("worker", first=False)
        self.topics = Topics(self.worker, self.worker.timers)
        service: Any = self.service
        self.member = WorkerAgent(service, self.worker, self.topics, NodeCard(role="worker"))

    def note_given_up(self) -> None:
        self.given_up += 1

    def worker_part(self) -> WorkerRole:
        node = self.membership.node("worker", first=False)
        return WorkerRole(self.context, node, self.note_given_up)

    @property
    def parts(self) -> tuple[Role, ...]:
        return (self.router, self.frontend)

    async def join(self) -> None:
        for part in self.parts:
            await part.begin()
        for part in self.parts:
            await part.join(tuple(p.node.address for p in self.parts if p.node.lives))
        await self.worker.start(beside=(self.router.node.address,))

    async def health(self) -> tuple[int, dict[str, Any]]:
        url = f"http://127.0.0.1:{self.frontend.service.port}/health"
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    made = World(folder)
    try:
        yield made
    finally:
        for part in reversed(made.parts):
            await part.drain(0.0)
        made.member.close()
        made.topics.close()
        await made.worker.close()
        for part in reversed(made.parts):
            await part.close()
        for part in made.parts:
            assert len(part.node.tasks) == 0
    assert made.failures == []


async def test_the_roles_find_each_other_and_are_ready_with_the_model(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        assert w.router.unready_reason() is not None
        await w.join()
        await until(lambda: w.router.unready_reason() is None)
        status, body = await w.health()
        assert status == 503, body
        w.service.ready(card())
        assert await w.frontend.wait_model()
        assert w.frontend.unready_reason() is None
        assert (await w.health())[0] == 200
        await w.frontend.announce()


async def test_a_model_that_does_not_come_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may die as soon as it is ready, and restart."""
    monkeypatch.setattr(module, "_MODEL_WAIT", 0.05)
    async with world(tmp_path) as w:
        await w.join()
        assert not await w.frontend.wait_model()
        announcing = asyncio.ensure_future(w.frontend.announce())
        w.service.ready(card())
        await asyncio.wait_for(announcing, 20.0)


async def test_a_frontend_says_where_it_answers_and_that_it_goes(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.join()
        seen = w.router.node.registry

        async def told(draining: bool) -> NodeCard:
            async with asyncio.timeout(20.0):
                while True:
                    for member in seen.by_role("frontend"):
                        if member.card is not None and member.card.draining == draining:
                            return member.card
                    await asyncio.sleep(0.01)

        assert (await told(False)).http == f"127.0.0.1:{w.frontend.service.port}"
        await w.frontend.drain(0.0)
        await told(True)


async def test_a_frontend_leaves_whatever_becomes_of_its_traces(tmp_path: Path) -> None:
    class Broken(RoleTraces):
        async def close(self) -> None:
            raise ValueError("a defect")

    async with world(tmp_path) as w:
        await w.join()
        w.frontend.traces, whole = Broken(w.context, w.frontend.node), w.frontend.traces
        try:
            with pytest.raises(ValueError, match="a defect"):
                await w.frontend.close()
            assert w.frontend.node.tasks.closed
        finally:
            w.frontend.traces = whole


async def test_parts_that_never_joined_end_as_well(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.frontend.begin()
    async with world(tmp_path):
        pass


async def test_a_context_that_was_reduced_is_a_degradation_with_its_remedy(tmp_path: Path) -> None:
    world = World(tmp_path)
    part = world.worker_part()
    service: Any = FakeService()
    part.worker.service = service
    service.engine.capabilities = replace(CAPABILITIES, reduced="max_model_len is reduced to 40")
    part._note_state(EngineState.READY, "ready")
    assert dict(world.degradations.reasons()) == {"kv_reduced": "max_model_len is reduced to 40"}
    part._note_state(EngineState.FAILED, "died too often")
    assert world.degradations.reasons()["engine_down"] == "the engine has failed: died too often"
    service.engine.capabilities = CAPABILITIES
    part._note_state(EngineState.READY, "ready")
    assert not world.degradations.reasons()


async def test_slow_kernels_are_a_degradation_until_an_engine_has_its_own(tmp_path: Path) -> None:
    world = World(tmp_path)
    part = world.worker_part()
    service: Any = FakeService()
    part.worker.service = service
    service.engine.capabilities = replace(CAPABILITIES, slow_kernels="torch computes the model")
    part._note_state(EngineState.READY, "ready")
    assert dict(world.degradations.reasons()) == {"slow_kernels": "torch computes the model"}
    service.engine.capabilities = CAPABILITIES
    part._note_state(EngineState.READY, "ready")
    assert not world.degradations.reasons()


async def test_only_an_engine_that_had_loaded_is_given_up(tmp_path: Path) -> None:
    """What is wrong before, `load` raises. If the process ended first, since the other worker of it
    has loaded, the reason would be lost."""
    world = World(tmp_path)
    prefill, decode = world.worker_part(), world.worker_part()
    service: Any = FakeService()
    other: Any = FakeService()
    prefill.worker.service, decode.worker.service = service, other
    other.ready(card())
    prefill._note_state(EngineState.FAILED, "the engine process was killed by SIGKILL")
    assert world.given_up == 0
    service.ready(card())
    prefill._note_state(EngineState.FAILED, "died too often")
    assert world.given_up == 1


async def test_a_worker_gives_its_engine_the_tiers_and_tells_of_missing_ones(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    disk = DiskKv(str(tmp_path / "kv"), 1 << 20)
    config = WorkerConfig(host_kv=1 << 20, disk_kv=disk, mode="decode", kv_share=0.5)
    node = world.membership.node("worker", first=False)
    part = WorkerRole(world.context, node, world.note_given_up, config=config)
    spec = part.worker.service._spec().tiers
    assert spec is not None
    assert (spec.host_bytes, spec.disk_bytes) == (1 << 19, 1 << 19)
    assert spec.disk_owner == f"{world.membership.card('worker').host}-decode"
    service: Any = FakeService()
    part.worker.service = service
    service.engine.capabilities = replace(CAPABILITIES, tiers=("disk",))
    part._note_state(EngineState.READY, "ready")
    assert world.degradations.reasons()["decode_kv_tiers"].startswith("--host-kv: engine ")
    service.engine.capabilities = replace(CAPABILITIES, tiers=("host", "disk"))
    part._note_state(EngineState.READY, "ready")
    assert not world.degradations.reasons()
    service.engine.reported = EngineStats(
        tiers=(TierStats(tier=1), TierStats(tier=2, trouble="full"))
    )
    part._note_second()
    assert world.degradations.reasons()["decode_kv_tier_trouble"] == "disk: full"
    service.engine.reported = EngineStats(tiers=(TierStats(tier=2, trouble="gone"),))
    part._note_second()
    assert world.degradations.reasons()["decode_kv_tier_trouble"] == "disk: gone"
    service.engine.reported = EngineStats()
    part._note_second()
    assert not world.degradations.reasons()
    assert not list((tmp_path / "kv").iterdir())
