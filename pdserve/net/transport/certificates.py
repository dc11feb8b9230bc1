"""Reloads TLS certificates that are renewed while the node runs.

The files are checked before each new connection and read again when they have changed, so that
every process of a node follows without a signal. Open connections keep their certificates. Files
that do not match each other, as in the middle of a renewal, change nothing: the old certificates
stay in force, and an error is logged.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.net.transport.tls import Tls

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Certificates"]

_log = logging.getLogger(__name__)

_State = tuple[tuple[int, int, int], ...]
"""For each file: inode, size, and time of the last write."""


class Certificates:
    """Supplies TLS contexts from certificate files, and reads the files again when they change."""

    def __init__(self, cert: Path, key: Path, ca: Path | None = None) -> None:
        """Errors: `ConfigError`, which names the file."""
        self._paths = (cert, key, ca)
        self._state = self._look()
        self._tls = Tls.load(cert, key, ca)

    def current(self) -> Tls:
        """The contexts for new connections."""
        state = self._look()
        if state != self._state:
            try:
                self.reload()
            except ConfigError as error:
                _log.error("the old certificates stay in force: %s", error.message)
            else:
                _log.info("certificates were read again")
        return self._tls

    def reload(self) -> bool:
        """Reads the files again; True if the node's own certificate or key has changed. Errors:
        `ConfigError`; the old ones stay in force."""
        # Before the load: a file that is written during the load then counts as changed.
        self._state = self._look()
        fresh = Tls.load(*self._paths)
        changed, self._tls = fresh.fingerprint != self._tls.fingerprint, fresh
        return changed

    def _look(self) -> _State:
        return tuple(map(_state_of, filter(None, self._paths)))


def _state_of(path: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)
