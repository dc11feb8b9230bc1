"""The engine process of a start, and the launchers of its cores."""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.clock import SystemClock
from pdserve.engine.process import CoreProcess
from pdserve.launch.cluster.node_factory import NodeFactory
from pdserve.launch.config.resolve import resolve
from pdserve.launch.console import Console
from pdserve.launch.early_engine import EarlyEngine
from pdserve.launch.roles.base import RoleContext
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics

if TYPE_CHECKING:
    from pathlib import Path


def engine(folder: Path, *, pair: bool) -> EarlyEngine:
    flags = {"engine-option": "content=on"} if pair else {}
    config = resolve({"engine": "instant"} | flags, {"PDSERVE_CONFIG": "none"}, folder)
    membership = NodeFactory(config.cluster, private=True)
    screen = Console(io.StringIO(), SystemClock())
    return EarlyEngine(RoleContext(config, membership, screen, Metrics(), Degradations(Metrics())))


@pytest.mark.parametrize("pair", [False, True])
async def test_the_first_launch_finds_the_process_that_started_early(tmp_path: Path, pair: bool):
    made = engine(tmp_path, pair=pair)
    await made.start()
    launcher = made.launcher(0)
    with await launcher.launch():
        pid = launcher.pid
        if pair:
            other = made.launcher(1)
            with await other.launch():
                assert other.pid == pid
        launcher.kill()
        async with asyncio.timeout(20):
            await launcher.ended()
    again = made.launcher(0)
    assert again is not launcher
    assert again.pid is None


async def test_a_process_that_does_not_start_is_left_to_the_launch(
    tmp_path: Path, monkeypatch: Any
):
    async def fails(*args: object, **named: object) -> CoreProcess:
        raise OSError("no processes left")

    monkeypatch.setattr(CoreProcess, "start", fails)
    made = engine(tmp_path, pair=False)
    await made.start()
    with pytest.raises(OSError, match="no processes left"):
        await made.launcher().launch()
    await made.discard()
