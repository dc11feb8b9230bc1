"""A host without processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.agent.processes import Started
from pdserve.agent.workers import WorkerCommand

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from pdserve.agent.records import WorkerRecord


def command(record: WorkerRecord, devices: str) -> WorkerCommand:
    return WorkerCommand(("worker", f"--change={record.change}"), {"DEVICES": devices})


class FakeProcesses:
    """Processes are numbers; each runs until the test ends it."""

    def __init__(self, boot: str = "boot-1") -> None:
        self.boot = boot
        self.words: dict[Started, tuple[str, ...]] = {}
        self.environs: list[Mapping[str, str]] = []
        self.alive: set[Started] = set()
        self.engines: set[Started] = set()
        self.looks = 0
        self.statuses: dict[Started, int] = {}
        self.signals: list[tuple[str, int]] = []
        self.fails: OSError | None = None

    def boot_id(self) -> str:
        return self.boot

    def launch(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Started:
        if self.fails is not None:
            raise self.fails
        started = Started(100 + len(self.words), 7)
        log.write_text("ready to serve\n")
        self.words[started] = tuple(command)
        self.environs.append(environ)
        self.alive.add(started)
        return started

    def find(self, argument: str) -> Started | None:
        return next((one for one in self.alive if argument in self.words[one]), None)

    def runs(self, process: Started) -> bool:
        return process in self.alive

    def status(self, process: Started) -> int | None:
        return self.statuses.get(process)

    def terminate(self, process: Started) -> None:
        self.signals.append(("TERM", process.pid))

    def kill(self, process: Started) -> None:
        self.signals.append(("KILL", process.pid))
        self.alive.discard(process)
        self.engines.discard(process)

    def left_running(self, ended: Collection[Started]) -> set[Started]:
        self.looks += 1
        return self.engines & set(ended)

    def end(self, pid: int, status: int | None = 0) -> None:
        (process,) = [one for one in self.alive if one.pid == pid]
        self.alive.remove(process)
        if status is not None:
            self.statuses[process] = status
