"""The agent role: its name and directory, and the command line of a worker."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import pytest

from pdserve.agent.records import WorkerRecord
from pdserve.clock import SystemClock
from pdserve.errors import ConfigError
from pdserve.launch.cluster.node_factory import NodeFactory
from pdserve.launch.config.resolve import Config, resolve
from pdserve.launch.console import Console
from pdserve.launch.roles.agent import AgentRole, agent_directory, with_kept_name
from pdserve.launch.roles.base import RoleContext
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics

if TYPE_CHECKING:
    from pathlib import Path


def config(path: Path, **flags: str) -> Config:
    given = {"role": "agent", "agent-slots": "gpu=0+1;cpu=x1", "agent-dir": str(path / "state")}
    own = {name.replace("_", "-"): text for name, text in flags.items()}
    return resolve(given | own, {"PDSERVE_CONFIG": "none"}, path)


def role(path: Path, **flags: str) -> AgentRole:
    factory = NodeFactory(config(path).cluster, private=True)
    screen = Console(io.StringIO(), SystemClock())
    context = RoleContext(
        config(path, **flags), factory, screen, Metrics(), Degradations(Metrics())
    )
    return AgentRole(context, factory.node("agent"))


RECORD = WorkerRecord(
    change="c1", kind="gpu", mode="prefill", slot=0, node="h-gpu-0", boot="b", pid=1
)


def test_the_directory_is_the_users_unless_one_is_given(tmp_path: Path) -> None:
    assert agent_directory(config(tmp_path)) == tmp_path / "state"
    own = resolve({"cluster": "mine"}, {"PDSERVE_CONFIG": "none"}, tmp_path)
    assert agent_directory(own, {"HOME": "/h"}).as_posix() == "/h/.local/state/pdserve/agent/mine"
    assert agent_directory(own, {"XDG_STATE_HOME": "/s"}).as_posix() == "/s/pdserve/agent/mine"


def test_an_agent_keeps_its_name(tmp_path: Path) -> None:
    first = with_kept_name(config(tmp_path)).cluster.node_name
    assert first.startswith("agent-")
    assert with_kept_name(config(tmp_path)).cluster.node_name == first
    assert with_kept_name(config(tmp_path, node_name="x")).cluster.node_name == "x"


async def test_it_serves_once_it_has_joined_and_leaves_the_directory(tmp_path: Path) -> None:
    part = role(tmp_path, agent_worker="gpu=--engine=instant --kv-memory=1GiB", engine="sim")
    assert part.unready_reason()
    await part.begin()
    with pytest.raises(ConfigError, match="in use by another agent"):
        await role(tmp_path).begin()
    await part.join()
    assert part.unready_reason() is None
    card = part.node.card
    assert card is not None
    assert (card.role, card.draining, part.left, part.needed()) == ("agent", False, 0, "")
    await part.drain(1.0)
    assert part.node.card is not None
    assert part.node.card.draining
    assert part.service.draining
    await part.undo_drain()
    assert not part.service.draining
    command = part._command(RECORD, "0,1")
    program = (sys.executable, "-P", "-m", "pdserve.launch.worker_main")
    assert command.words[:5] == (*program, str(tmp_path / "state/c1.exit"))
    flags = set(command.words[5:])
    assert {"--engine=instant", "--kv-memory=1GiB", "--mode=prefill", "--change=c1"} <= flags
    assert {"--role=worker", "--config=none", "--node-name=h-gpu-0"} <= flags
    assert f"--join={part.node.address}" in flags
    assert command.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert not [x for x in command.environ if x.startswith("PDSERVE_CONFIG")]
    await part.close()
    again = role(tmp_path)
    await again.begin()
    await again.close()


async def test_flags_that_no_worker_takes_are_found_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent-worker cpu: --prot is unknown"):
        role(tmp_path, agent_worker="cpu=--prot=80")
