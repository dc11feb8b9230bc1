"""Keeps what an agent knows of its workers on disk, for the agent that comes after it.

One file per change, replaced as a whole. The directory belongs to one agent at a time.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import ConfigError
from pdserve.ids import Seconds

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RecordStore", "WorkerRecord"]


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that was wanted. Times are of the machine's monotonic clock, in seconds; they
    compare only within one `boot`."""

    change: str
    kind: str
    mode: str
    slot: int
    """Index within the kind's group."""
    node: str
    """The worker's node name."""
    boot: str
    """Which run of the machine it was started in."""
    pid: int = 0
    """0: not known to have been started."""
    begun: int = 0
    """When the process started, in clock ticks since the machine did."""
    joined: bool = False
    """True once its card was seen."""
    draining: bool = False
    """True if its card said so last, or it was told to end."""
    kill_at: Seconds | None = None
    """When it is killed; None: it is not to end."""
    killed: bool = False
    ended: Seconds | None = None
    """When it was found to be gone; None: it runs, or is about to."""
    failed: bool = False
    reason: str = ""
    """Why it has ended, in words."""
    told: bool = False
    """True once it was told to end; `kill_at` is on disk before that."""


class RecordStore:
    """The files of one agent. `open` before anything else."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock: int | None = None

    def open(self) -> None:
        """Makes the directory and takes it for this process. Errors: `ConfigError`."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"agent-dir: {self.directory} cannot be used: {error.strerror}; name another "
                "directory"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise ConfigError(
                f"agent-dir: {self.directory} is in use by another agent, process {holder}: a host "
                "needs one agent; a second one needs an --agent-dir of its own"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._lock = lock

    def close(self) -> None:
        """Lets another agent have the directory. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def name(self, prefix: str) -> str:
        """The agent's name, the same in every life: planners ask it again for what they asked
        before. Errors: `ConfigError`."""
        path = self.directory / "name"
        try:
            with suppress(FileNotFoundError):
                if kept := path.read_text().strip():
                    return kept
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = f"{prefix}-{secrets.token_hex(3)}"
            _replace(path, made.encode())
        except OSError as error:
            raise ConfigError(f"agent-dir: {path} cannot be used: {error.strerror}") from None
        return made

    def load(self) -> tuple[list[WorkerRecord], list[Path]]:
        """All records, and the files that cannot be read."""
        found, unreadable = [], []
        for path in sorted(self.directory.glob("*.json")):
            try:
                found.append(_decode(path.read_bytes()))
            except (OSError, msgspec.DecodeError):
                unreadable.append(path)
        return found, unreadable

    def save(self, record: WorkerRecord) -> None:
        """Errors: `OSError`; the file then has its earlier content."""
        _replace(self.directory / f"{record.change}.json", msgspec.json.encode(record))

    def forget(self, change: str) -> None:
        """Removes a worker's record, logs and exit status."""
        record = self.directory / f"{change}.json"
        for path in (record, self.exit_file(change), *self.logs(change)):
            with suppress(OSError):
                path.unlink()

    def exit_file(self, change: str) -> Path:
        """The file in which a worker that ends by itself leaves its exit status."""
        return self.directory / f"{change}.exit"

    def exit_status(self, change: str) -> int | None:
        """The status that a worker has left; None: it runs, or was killed, or crashed."""
        with suppress(OSError, ValueError):
            return int(self.exit_file(change).read_text())
        return None

    def log(self, change: str) -> Path:
        """The file that a worker writes to."""
        return self.directory / f"{change}.log"

    def logs(self, change: str) -> tuple[Path, Path]:
        """A worker's log, and the older part of it."""
        return self.log(change), self.directory / f"{change}.log.1"


_decode: Final = msgspec.json.Decoder(WorkerRecord).decode


def _replace(path: Path, data: bytes) -> None:
    # A killed agent leaves the old file or the new one. A machine that loses power loses its
    # workers too, so nothing is flushed to the disk.
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(data)
    fresh.replace(path)
