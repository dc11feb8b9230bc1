"""Keeps the cluster's hash secret in the directory of a worker's disk tier, for the next start.

Nothing is written before the tier is open: a start that fails leaves no secret behind. Files are
written in a thread: the event loop must not wait for a disk that hangs. What cannot be kept is
logged; the worker serves without it, but does not find its blocks after a restart.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from pdserve.kv.tiers.disk.secret_file import keep_secret, stored_secrets

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.ids import Seconds

__all__ = ["SecretKeeper"]

_log = logging.getLogger(__name__)


class SecretKeeper:
    """The secrets beside one worker's disk tier."""

    def __init__(self, root: Path, wall: Callable[[], Seconds]) -> None:
        """`wall`: Unix time."""
        self._root = root
        self._wall = wall
        self._lock = threading.Lock()
        self._wanted: tuple[bytes, int] | None = None
        self._writing = False
        self._opened = False

    def kept(self) -> tuple[bytes, int] | None:
        """The secret that was in use last, and its birth; None: there is none."""
        stored = stored_secrets(self._root)
        return (stored[0].secret, stored[0].birth) if stored else None

    def keep(self, secret: bytes, birth: int) -> None:
        """Keep a secret soon, once the tier is open. Of several, the last one counts."""
        with self._lock:
            self._wanted = secret, birth
        self._begin()

    def opened(self) -> None:
        """The tier is open: secrets are written from now on."""
        self._opened = True
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self._writing or self._wanted is None or not self._opened:
                return
            self._writing = True
        # A daemon: it must not keep the process alive while the disk hangs.
        threading.Thread(target=self._write, name="pdserve-secret", daemon=True).start()

    def _write(self) -> None:
        while (wanted := self._take()) is not None:
            secret, birth = wanted
            try:
                keep_secret(self._root, secret, birth, self._wall())
            except OSError as error:
                if any(stored.secret == secret for stored in stored_secrets(self._root)):
                    continue  # only its time is old
                _log.warning(
                    "the hash secret cannot be kept in %s (%s): the KV on this disk will not be "
                    "found after a restart of the cluster",
                    *(self._root, error.strerror),
                )

    def _take(self) -> tuple[bytes, int] | None:
        """The next one to write; None: the thread ends."""
        with self._lock:
            wanted, self._wanted = self._wanted, None
            self._writing = wanted is not None
            return wanted
