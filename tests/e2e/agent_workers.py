"""The worker processes that an agent has started: found, and ended with the test."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import msgspec
import psutil

from pdserve.agent.records import WorkerRecord

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["kill_workers", "pids", "records"]


def records(directory: Path) -> list[WorkerRecord]:
    """What the agent has written down, of workers that have ended, too."""
    found = [msgspec.json.decode(path.read_bytes()) for path in directory.glob("*.json")]
    return [msgspec.convert(one, WorkerRecord) for one in found]


def pids(address: str) -> dict[str, int]:
    """Process ids by change: the workers that run and join the cluster at this address."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        changes = [word for word in words if word.startswith("--change=")]
        ours = any(word.startswith("--join=") and address in word for word in words)
        with contextlib.suppress(psutil.NoSuchProcess):
            if changes and ours and process.status() != psutil.STATUS_ZOMBIE:
                found[changes[0].removeprefix("--change=")] = process.pid
    return found


def kill_workers(address: str) -> None:
    """Ends every worker, whoever started it: workers outlive their agent."""
    for pid in pids(address).values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
