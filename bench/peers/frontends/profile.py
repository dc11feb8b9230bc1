"""Takes a profile of frontend and router under a load, with py-spy.

By hand, while the load of a row runs:

    py-spy record --pid PID --duration 5 --rate 250 --format raw --output FILE
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from typing import TYPE_CHECKING, Final

from bench.frontend import OTHER

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bench.peers.frontends.arms import System
    from bench.peers.frontends.load import Load, Row

__all__ = ["Profile", "hottest", "take"]

_SECONDS: Final = 3
_RATE: Final = 250
_WAITING: Final = ("Condition.wait (threading.py)", "wait (threading.py)")

Profile = list[tuple[str, float]]
"""Functions with their share of the samples: those that run themselves, not what they call."""


def take(spy: Path, load: Load, row: Row, system: System, folder: Path) -> dict[str, Profile]:
    """Runs the row once more, with py-spy beside it. Profile by process."""
    command = load.command(row, system, 0, _SECONDS + 2)
    client = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        files = {name: folder / f"{_plain(f'{row.name} {name}')}.txt" for name in system.python}
        spies = [
            subprocess.Popen(_spy(spy, pid, files[name]), stderr=subprocess.DEVNULL)
            for name, pid in system.python.items()
        ]
        for one in spies:
            one.wait(_SECONDS + 30)
    finally:
        client.terminate()
        client.wait()
    return {
        name: hottest(file.read_text().splitlines())
        for name, file in files.items()
        if file.exists()
    }


def _spy(spy: Path, pid: int, file: Path) -> list[str]:
    command = ["taskset", "-c", str(OTHER), str(spy), "record", "--pid", str(pid)]
    command += ["--duration", str(_SECONDS), "--rate", str(_RATE)]
    return [*command, "--format", "raw", "--output", str(file)]


def hottest(lines: Iterable[str], most: int = 8) -> Profile:
    """The functions that ran most, of stacks as py-spy writes them: `outer;inner count`. Threads
    that wait for work count as running for py-spy, so their stacks are left out."""
    found: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        function = _without_line(stack.rpartition(";")[2])
        if count.isdigit() and function not in _WAITING:
            found[function] += int(count)
    total = found.total() or 1
    return [(name, count / total) for name, count in found.most_common(most)]


def _without_line(frame: str) -> str:
    return re.sub(r":\d+\)$", ")", frame)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
