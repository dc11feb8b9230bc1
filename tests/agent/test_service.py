"""An agent on a node: what it answers before it is ready, and what it tells its operator."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from pdserve.agent.records import RecordStore
from pdserve.agent.service import AgentService
from pdserve.agent.workers import Workers
from pdserve.errors import NotReady
from pdserve.messages.agent import AgentQuery, StartWorker
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.runtime.rpc_methods import AGENT_REPORT, START_WORKER
from tests.agent.support import FakeProcesses, command
from tests.net.world import virtually
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from pathlib import Path

ORDER = StartWorker(change="a", kind="cpu", mode="aggregated")
ORDER_B = StartWorker(change="b", kind="cpu", mode="aggregated")


@virtually
async def test_it_answers_once_it_has_read_its_records(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("nonsense")
    async with cluster() as made:
        planner = await made.add("planner", role="planner")
        node = await made.add("agent", role="agent")
        degradations = Degradations(Metrics())
        service = AgentService(node, degradations)
        await made.until(made.converged)
        agent = planner.ref(node.id)
        with pytest.raises(NotReady, match="the agent is starting"):
            await agent.ask(START_WORKER, ORDER, timeout=5.0)
        processes = FakeProcesses()
        store = RecordStore(tmp_path)
        service.begin(Workers({"cpu": ("",)}, ("cpu",), store, processes, command, "agent"))
        assert "b.json" in degradations.reasons()["agent_records"]
        assert (await agent.ask(START_WORKER, ORDER, timeout=5.0)).state == "booting"
        report = await agent.ask(AGENT_REPORT, AgentQuery(), timeout=5.0)
        assert report.free == {"cpu": 0}
        assert report.directory == str(tmp_path)


@virtually
async def test_it_looks_at_workers_by_itself_and_tells_what_keeps_it_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as made:
        node = await made.add("agent", role="agent")
        degradations = Degradations(Metrics())
        service = AgentService(node, degradations)
        processes = FakeProcesses()
        store = RecordStore(tmp_path)
        workers = Workers({"cpu": ("",)}, ("cpu",), store, processes, command, "agent")
        service.begin(workers)
        workers.start(ORDER, node.now())
        processes.end(100, 1)
        await made.until(lambda: workers.running == 0, 2.0)
        for error, words in (
            (OSError(28, "No space left on device"), "No space left"),
            (KeyError("a defect"), "KeyError, see the agent's log"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(workers, "poll", Mock(side_effect=error))
                await made.until(partial(told, degradations, words), 2.0)
            await made.until(lambda: "agent_watch" not in degradations.reasons(), 2.0)
        assert len([record for record in caplog.records if record.exc_info]) == 1
        workers.start(ORDER_B, node.now())
        (tmp_path / "b.json.new").mkdir()
        processes.end(101, 1)
        await made.until(partial(told, degradations, "Is a directory; make room"), 2.0)
        (tmp_path / "b.json.new").rmdir()
        await made.until(lambda: "agent_watch" not in degradations.reasons(), 2.0)
        await made.until(lambda: workers.running == 0, 2.0)


def told(degradations: Degradations, words: str) -> bool:
    return words in degradations.reasons().get("agent_watch", "")
