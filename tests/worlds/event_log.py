"""Records the events of a world in order: as text to read, and as one hash to compare runs by."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds

__all__ = ["EventLog"]


class EventLog:
    """Lines of `time host what`."""

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        """Number of events by their first word."""
        self.on_line: Callable[[str], None] | None = None
        self._clock = clock
        self._hash = blake2b(digest_size=16)

    def note(self, host: str, kind: str, words: str = "") -> None:
        """Something happened at `host`."""
        line = f"{self._clock():11.6f} {host:8} {kind} {words}".rstrip()
        self.lines.append(line)
        self.counts[kind] += 1
        self._hash.update(line.encode() + b"\n")
        if self.on_line is not None:
            self.on_line(line)

    @property
    def digest(self) -> str:
        """The digest of all events so far."""
        return self._hash.hexdigest()
