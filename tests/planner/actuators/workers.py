"""What tests with real environments share: workers of a few lines, and waiting."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import TYPE_CHECKING

import psutil

from pdserve.errors import ActuatorTransient
from tests.support.slurm import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.messages.planner import Instance
    from pdserve.planner.actuators.base import Actuator

POLITE = """\
#!/bin/bash
trap 'echo drained; exit 0' TERM
echo "$@"
for number in $(seq 3000); do sleep 0.1; done
"""
"""Drains at once."""
DEAF = """\
#!/bin/bash
trap 'echo "TERM $((++count))"' TERM
echo "$@"
for number in $(seq 3000); do sleep 0.1; done
"""
"""Never ends by itself."""
COUNTS = """\
#!/bin/bash
trap 'echo "TERM $((++count))"; if [ $count = 2 ]; then exit 9; fi' TERM
echo "$@"
for number in $(seq 3000); do sleep 0.1; done
"""
"""Drains for ever, and ends at the second SIGTERM, as pdserve does."""
FAILS = """\
#!/bin/bash
echo "pdserve: error: no model" >&2
exit 2
"""


def write_program(folder: Path, text: str) -> str:
    """Writes an executable; returns its path."""
    path = folder / "worker"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def read(log: Path) -> str:
    """An output so far."""
    return log.read_text() if log.exists() else ""


def workers_of(folder: Path, change: str) -> list[psutil.Process]:
    """The processes that run a folder's program for a change; the shells above it do not count."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if f"--change={change}" in words and str(folder / "worker") in words:
                found.append(process)
    return found


async def kill_worker(folder: Path, change: str) -> None:
    """Ends a worker as a crash does, once it runs."""
    async with asyncio.timeout(PATIENCE):
        while not (found := workers_of(folder, change)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    for process in found:
        process.send_signal(signal.SIGKILL)


async def find(actuator: Actuator, change: str) -> Instance | None:
    """The instance of a change, as it is listed now."""
    return next((one for one in await actuator.list() if one.change == change), None)


async def until(actuator: Actuator, change: str, *states: str) -> Instance:
    """Waits until a change is in one of these states."""
    deadline = time.monotonic() + PATIENCE
    seen: object = None
    while time.monotonic() < deadline:
        try:
            seen = found = await find(actuator, change)
        except ActuatorTransient as error:
            seen, found = error, None
        if found is not None and found.state in states:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"{change} is not {states}: {seen}")
