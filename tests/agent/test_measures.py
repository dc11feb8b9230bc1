"""What an agent's metrics say of its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.agent.measures import AgentMeasures
from pdserve.agent.records import RecordStore
from pdserve.agent.workers import SeenWorker, Workers
from pdserve.errors import ActuatorDenied, ActuatorExhausted
from pdserve.ids import NodeId
from pdserve.messages.agent import StartWorker
from pdserve.observe.metrics import Metrics
from tests.agent.support import FakeProcesses, command

if TYPE_CHECKING:
    from pathlib import Path

SLOTS = {"gpu": ("0", "1")}


def agent(path: Path, processes: FakeProcesses) -> tuple[Workers, Metrics]:
    metrics = Metrics()
    store, measures = RecordStore(path), AgentMeasures(metrics)
    kinds = ("gpu", "gpu/big")
    return Workers(SLOTS, kinds, store, processes, command, "agent-h", measures), metrics


def order(change: str, kind: str = "gpu", mode: str = "aggregated") -> StartWorker:
    return StartWorker(change=change, kind=kind, mode=mode)


def counts(family: object) -> dict[tuple[str, ...], float]:
    return {labels: one.value for labels, one in family if one.value}  # type: ignore[attr-defined]


def test_slots_and_workers_by_state(tmp_path: Path) -> None:
    processes = FakeProcesses()
    workers, metrics = agent(tmp_path, processes)
    workers.poll(0.0, {})
    assert counts(metrics.agent_slots) == counts(metrics.agent_free_slots) == {("gpu",): 2}
    workers.start(order("a"), 0.0)
    workers.start(order("b", "gpu/big"), 0.0)
    workers.poll(1.0, {"a": SeenWorker(NodeId("w"))})
    assert counts(metrics.agent_workers) == {("gpu", "running"): 1, ("gpu/big", "booting"): 1}
    assert counts(metrics.agent_free_slots) == {}
    workers.stop("a", 10.0, 1.0)
    workers.poll(2.0, {"a": SeenWorker(NodeId("w"))})
    assert counts(metrics.agent_workers) == {("gpu", "ending"): 1, ("gpu/big", "booting"): 1}
    processes.end(100)
    workers.poll(3.0, {})
    assert counts(metrics.agent_workers) == {("gpu/big", "booting"): 1}
    assert counts(metrics.agent_free_slots) == {("gpu",): 1}


def test_starts_by_outcome(tmp_path: Path) -> None:
    processes = FakeProcesses()
    workers, metrics = agent(tmp_path, processes)
    workers.start(order("a"), 0.0)
    workers.start(order("a"), 0.0)  # a repeat is no start
    processes.fails = OSError(12, "Cannot allocate memory")
    workers.start(order("b"), 0.0)
    processes.fails = None
    workers.start(order("c"), 0.0)
    for wrong in (order("d"), order("e", mode="both"), order("f", "anything")):
        with pytest.raises((ActuatorExhausted, ActuatorDenied)):
            workers.start(wrong, 0.0)
    assert counts(metrics.agent_starts) == {
        ("gpu", "started"): 2,
        ("gpu", "failed"): 1,
        ("gpu", "refused"): 2,
        ("other", "refused"): 1,
    }
    assert counts(metrics.agent_exits) == {}


def test_exits_by_how(tmp_path: Path) -> None:
    processes = FakeProcesses()
    workers, metrics = agent(tmp_path, processes)
    for change, pid, status, ordered in (("a", 100, 0, True), ("b", 101, 1, False)):
        workers.start(order(change), 0.0)
        if ordered:
            workers.stop(change, 10.0, 0.0)
        processes.end(pid, status)
        workers.poll(1.0, {})
    workers.start(order("c"), 1.0)
    workers.stop("c", 10.0, 1.0)
    workers.poll(20.0, {})  # killed
    workers.poll(21.0, {})
    assert counts(metrics.agent_exits) == {
        ("gpu", "ended"): 1,
        ("gpu", "failed"): 1,
        ("gpu", "killed"): 1,
    }


def test_a_later_agent_counts_what_it_finds_and_what_is_gone(tmp_path: Path) -> None:
    processes = FakeProcesses()
    workers, _ = agent(tmp_path, processes)
    workers.start(order("a"), 0.0)
    later, metrics = agent(tmp_path, processes)
    later.adopt(1.0)
    assert counts(metrics.agent_adopted) == {("gpu",): 1}
    rebooted, metrics = agent(tmp_path, FakeProcesses("boot-2"))
    rebooted.adopt(0.0)
    assert counts(metrics.agent_exits) == {("gpu", "lost"): 1}
    assert counts(metrics.agent_adopted) == {}
