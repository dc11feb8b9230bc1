"""Tells the node that a long step of vLLM on CPUs makes progress.

A core that shows no progress for `--stall-timeout` is killed as stalled. vLLM says nothing within a
step, and on CPUs a step over a large prompt can take longer than that. A thread looks at the worker
processes meanwhile: as long as they use processor time, the step makes progress. A stopped or
blocked worker uses none. On GPUs nothing is watched, since a worker that waits for a hung GPU is
busy, too.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds

__all__ = ["LONGEST", "StepWatch", "children_cpu_time"]

_INTERVAL: Seconds = 1.0
_BUSY = 0.05
"""Share of a core that the workers use at least while they compute."""
LONGEST: Seconds = 600.0
"""A step that takes longer has stalled, however busy its workers are."""


def children_cpu_time(pid: int | None = None) -> Seconds:
    """Processor time that the direct children of a process (by default this one) have used. 0 where
    the system does not tell."""
    own = os.getpid() if pid is None else pid
    ticks = 0
    for children in Path(f"/proc/{own}/task").glob("*/children"):
        for child in _read(children).split():
            fields = _read(Path(f"/proc/{child}/stat")).rpartition(")")[2].split()
            if len(fields) > 12:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has just ended
        return ""


class StepWatch:
    """Watches the steps of one engine from a thread of its own, until `stop`."""

    def __init__(
        self,
        alive: Callable[[], None],
        cpu_time: Callable[[], Seconds] = children_cpu_time,
        *,
        interval: Seconds = _INTERVAL,
        now: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """`alive` tells the node of progress; it is called from the thread."""
        self._alive = alive
        self._cpu_time = cpu_time
        self._interval = interval
        self._now = now
        self._begun: Seconds | None = None
        """When the present step began; None: there is none."""
        self._used: Seconds | None = None
        """The workers' processor time at the last look within a step."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-step-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def begin(self) -> None:
        """A step begins."""
        self._begun = self._now()

    def end(self) -> None:
        """The step has ended."""
        self._begun = None

    def look(self) -> None:
        """One look: report progress if the workers have computed since the last look."""
        begun = self._begun
        if begun is None or self._now() - begun > LONGEST:
            self._used = None
            return
        used, before = self._cpu_time(), self._used
        self._used = used
        if before is not None and used - before >= _BUSY * self._interval:
            self._alive()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self.look()
