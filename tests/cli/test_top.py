"""`pdserve top` on a terminal of its own, without a server or with one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pdserve.cli.console.layout import Table
from pdserve.cli.top import _place, _Server
from pdserve.errors import Unavailable
from tests.e2e.model import write_model
from tests.e2e.server import PATIENCE, serving

if TYPE_CHECKING:
    from pathlib import Path


def test_what_changes_most_stands_first() -> None:
    names = [("NODE", "ROLE"), ("WORKER", "MODE"), ("WORKER", "READY"), ("MODEL", "WORKERS")]
    found = sorted((Table(heads, []) for heads in names), key=_place)
    assert [table.name for table in found] == [
        *("WORKER READY", "MODEL WORKERS", "WORKER MODE", "NODE ROLE")
    ]


def test_a_server_that_never_answers_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither now nor at the end, where a pool's threads would be waited for."""
    monkeypatch.setattr("pdserve.cli.top._PATIENCE", 0.05)
    monkeypatch.setattr("pdserve.cli.status._HTTP_TIMEOUT", 600.0)

    async def look_twice(url: str) -> None:
        server = _Server(url)
        for _ in range(2):
            with pytest.raises(Unavailable, match="has not answered for"):
                await server.look(minute=False)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(look_twice(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        silent.accept()[0].close()
        silent.settimeout(0.05)
        with pytest.raises(TimeoutError):
            silent.accept()


def test_a_server_is_watched_over_http_too(tmp_path: Path) -> None:
    with serving(write_model(tmp_path / "tiny"), "--engine", "instant") as server:
        command = [sys.executable, "-m", "pdserve", "top", "--url", server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                shown = [process.stdout.readline() for _ in range(12)]
            finally:
                process.kill()
                process.wait(PATIENCE)
    assert shown[0].startswith(f"{server.url} is ok  (last ")
    assert any(line.startswith("TTFT") for line in shown)
    assert any(line.startswith("KV cache") for line in shown)
