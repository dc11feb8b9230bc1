"""Tells the node that a long step of vLLM on CPUs makes progress.

A core that shows no progress for `--stall-timeout` is killed as stalled. vLLM says nothing within a
step, and on CPUs a step over a large prompt can take longer than that. A thread looks at the worker
processes meanwhile: as long as they use processor time, the step makes progress. So do the
compilers that they start, as for the first request that wants logprobs, and wait for. A stopped or
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
    from collections.abc import Callable, Iterator

    from pdserve.ids import Seconds

__all__ = ["LONGEST", "StepWatch", "children_cpu_time"]

_INTERVAL: Seconds = 1.0
_BUSY = 0.05
"""Share of a core that the workers use at least while they compute."""
LONGEST: Seconds = 600.0
"""A step that takes longer has stalled, however busy its workers are."""


def children_cpu_time(pid: int | None = None) -> Seconds:
    """Processor time that the children of a process (by default this one) and all that they have
    started have used. 0 where the system does not tell."""
    own = os.getpid() if pid is None else pid
    ticks = sum(map(_ticks, _children(own, set())))
    return ticks / os.sysconf("SC_CLK_TCK")


def _children(pid: int, seen: set[int]) -> Iterator[int]:
    """The children, theirs, and so on, each once."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(children).split()):
            if child not in seen:
                seen.add(child)
                yield child
                yield from _children(child, seen)


def _ticks(pid: int) -> int:
    """What a process has used, and those of its children that have ended."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


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
