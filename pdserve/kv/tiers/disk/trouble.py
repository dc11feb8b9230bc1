"""Decides whether the disk tier may write, after errors. Pure: the caller passes the time.

A full disk pauses writing for 30 seconds, twice as long each time, 10 minutes at most. Three other
errors within a minute stop writing for 10 minutes: the tier then only reads. A write that succeeds
after a pause ends the trouble.
"""

from __future__ import annotations

import errno as codes
import os
from collections import deque
from typing import TYPE_CHECKING, Final

from pdserve.backoff import backoff_delay

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["CORRUPT", "DiskTrouble"]

CORRUPT: Final = -1
"""Stands for an errno: what was read is not what was written."""

_FULL: Final = frozenset({codes.ENOSPC, codes.EDQUOT, codes.EFBIG})
_BARRED: Final = frozenset({codes.EROFS, codes.EACCES, codes.EPERM, codes.ENOENT, codes.ESTALE})
"""Errors that say writing is not possible at all now."""

_GONE: Final = " (its directory is gone: make it again, and restart the worker)"
_REMEDIES: Final = {
    **dict.fromkeys(_FULL, " (make room, or name a smaller size)"),
    **dict.fromkeys((codes.ENOENT, codes.ESTALE), _GONE),
}

_FIRST_PAUSE: Final[Seconds] = 30.0
_LONGEST_PAUSE: Final[Seconds] = 600.0
_BUDGET: Final = 3
"""Errors within `_WINDOW` after which the tier only reads."""
_WINDOW: Final[Seconds] = 60.0


def is_full(errno: int) -> bool:
    """True if the error says that there is no room."""
    return errno in _FULL


def is_barred(errno: int) -> bool:
    """True if the error says that writing is not possible now, and nothing of the data."""
    return errno in _BARRED


class DiskTrouble:
    """The recent errors of one directory."""

    def __init__(self) -> None:
        self._recent: deque[Seconds] = deque(maxlen=_BUDGET)
        self._pauses = 0
        self._since: Seconds = 0.0
        self._until: Seconds = 0.0
        self._text = ""
        self.by_errno: dict[int, int] = {}
        """Errors since the start, by errno."""

    def failed(self, errno: int, now: Seconds) -> None:
        """An operation failed."""
        self.by_errno[errno] = self.by_errno.get(errno, 0) + 1
        if errno in _FULL or errno in _BARRED:
            self._pause(errno, now)
            return
        self._recent.append(now)
        if len(self._recent) == _BUDGET and now - self._recent[0] <= _WINDOW:
            self._recent.clear()
            self._since, self._until = now, max(self._until, now + _LONGEST_PAUSE)
            self._text = f"{_BUDGET} errors within {_WINDOW:.0f} s, the last: {_named(errno)}"

    def wrote(self, now: Seconds) -> None:
        """A write succeeded; one that began before the pause proves nothing."""
        if now >= self._until:
            self._pauses, self._text = 0, ""

    def may_write(self, now: Seconds) -> bool:
        """True if writing may be tried."""
        return now >= self._until

    def text(self, now: Seconds) -> str:
        """What is wrong, for the operator; empty: nothing. It counts no seconds down: each change
        is a line in the log."""
        if not self._text:
            return ""
        if now >= self._until:
            return f"{self._text}; the next write is a trial"
        return f"{self._text}; no writes for {self._until - self._since:.0f} s"

    def _pause(self, errno: int, now: Seconds) -> None:
        if now < self._until and self._text:
            return  # of the batches that were under way, each one fails
        self._since = now
        self._until = now + backoff_delay(_FIRST_PAUSE, _LONGEST_PAUSE, self._pauses)
        self._pauses += 1
        self._text = f"cannot write: {_named(errno)}{_REMEDIES.get(errno, '')}"


def _named(errno: int) -> str:
    return "a record does not match its checksum" if errno == CORRUPT else os.strerror(errno)
