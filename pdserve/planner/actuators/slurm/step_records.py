"""Keeps what was started as steps of an allocation, in files of a directory that all nodes share.

Slurm forgets a step when it ends, and has no comment for it. Each change has a record, the process
of its `srun`, the output of its worker, and the exit status of `srun` once it has ended. It runs no
command.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from pdserve.messages.planner import Instance
from pdserve.planner.actuators.base import KEEP_ENDED

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["BOOT_ID", "EndedStep", "Srun", "StepRecord", "StepRecords", "step_instance"]

BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
"""Names a machine, from its start to its end."""

_TAIL: Final = 2048
"""Bytes at the end of an output that are read for the reason of a failure."""
_LAUNCH: Final[Seconds] = 15.0
"""Longest from the record of a change to the process of its `srun`: that is started at once, within
5 s, unless the planner dies in between."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one change."""

    change: str
    kind: str
    ref: str = ""
    """Id of its step, once it was seen."""
    until: float | None = None
    """Unix second by which it must end; None: no stop was ordered."""
    told: bool = False
    """True: it got SIGTERM."""


class Srun(NamedTuple):
    """What is known of the process of an `srun`."""

    never: bool = False
    """True: it was not started, and will not be."""
    gone: bool = False
    """True: it has ended."""
    pid: int | None = None
    """Its process, which leads a session of its own; None: it is over, or runs on another host."""


class EndedStep(NamedTuple):
    """How the command of a step ended."""

    status: str
    """Its exit status, or why that is not known."""
    at: float
    words: str


class StepRecords:
    """The files of one directory. All calls read or write a disk, which may be slow."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def path(self, change: str, ending: str) -> Path:
        """The file of a change: `step`, `log` or `end`."""
        return self._directory / f"pdserve-{change}.{ending}"

    def create(self, record: StepRecord) -> bool:
        """Writes a new record; False: the change has one."""
        try:
            with self.path(record.change, "step").open("xb") as file:
                file.write(msgspec.json.encode(record))
        except FileExistsError:
            return False
        return True

    def write(self, record: StepRecord) -> None:
        """Replaces a record."""
        new = self.path(record.change, f"{os.getpid()}.new")
        new.write_bytes(msgspec.json.encode(record))
        new.replace(self.path(record.change, "step"))

    def read(self, change: str) -> StepRecord | None:
        """The record of a change; None: there is none that can be read."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self.path(change, "step").read_bytes(), type=StepRecord)
        return None

    def all(self) -> list[tuple[StepRecord, EndedStep | None]]:
        """All records, but those that ended long ago."""
        found = []
        for path in sorted(self._directory.glob("pdserve-*.step")):
            record = self.read(path.name.removeprefix("pdserve-").removesuffix(".step"))
            if record is not None:
                ended = self.ended(record.change)
                if ended is None or time.time() - ended.at < KEEP_ENDED:
                    found.append((record, ended))
        return found

    def ended(self, change: str) -> EndedStep | None:
        """How its command ended; None: it has not, as far as is known."""
        path = self.path(change, "end")
        try:
            return EndedStep(path.read_text().strip(), path.stat().st_mtime, self._words(change))
        except OSError:
            return None

    def end(self, change: str, status: str) -> None:
        """Says that a change has ended."""
        self.path(change, "end").write_text(status)

    def srun(self, change: str) -> Srun:
        """The process of its `srun`; on another host nothing is known of it."""
        try:
            boot, stat = self.path(change, "srun").read_text().split("\n", 1)
        except (OSError, ValueError):
            since = self.path(change, "step").stat().st_mtime
            return Srun(never=time.time() - since > _LAUNCH)
        if boot != Path(BOOT_ID).read_text().strip():
            return Srun()
        pid = int(stat.partition(" ")[0])
        try:
            now = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return Srun(gone=True)
        return Srun(pid=pid) if _begun(now) == _begun(stat) else Srun(gone=True)

    def _words(self, change: str) -> str:
        """The last line of its output."""
        with contextlib.suppress(OSError), self.path(change, "log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""


def _begun(stat: str) -> str:
    """When a process began, field 22 of its `stat` (proc(5)); its name may have brackets. A process
    that has ended and was not collected has none."""
    fields = stat.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else "ended"


def step_instance(record: StepRecord, ended: EndedStep | None, left: Seconds | None) -> Instance:
    """What the port tells. Args: `left` is the time until the allocation ends."""
    state, reason = "booting" if record.ref else "pending", ""
    if ended is not None:
        orderly = record.until is not None or ended.status == "0"
        state = "ended" if orderly else "failed"
        known = ended.status.isdecimal()
        words = f"exit status {ended.status}: {ended.words}" if known else ended.status
        reason = "" if orderly else words
    elif record.until is not None:
        state = "ending"
    elif not record.ref:
        reason = "srun waits for a step"
    return Instance(
        change=record.change,
        kind=record.kind,
        actuator="slurm",
        ref=record.ref,
        state=state,
        reason=reason,
        hard_end=left if ended is None else None,
    )
