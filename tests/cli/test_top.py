"""`pdserve top` on a terminal of its own, without a server or with one."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from pdserve.cli.console.layout import Table
from pdserve.cli.top import _place
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
