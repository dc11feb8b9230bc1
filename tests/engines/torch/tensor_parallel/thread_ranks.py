"""Ranks as threads of the test's process: all of a rank but the process, without its start."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

from pdserve_engines.torch.tensor_parallel.rank import run
from pdserve_engines.torch.tensor_parallel.rank_link import RankLink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class RankThread:
    """Has what `RankProcesses` uses of a `Popen`."""

    def __init__(self, arguments: Sequence[str], pass_fds: Sequence[int]) -> None:
        assert arguments[1:3] == ["-m", "pdserve_engines.torch.tensor_parallel.rank"]
        self.pid = 0
        self._status: int | None = None
        self._link = RankLink(socket.socket(fileno=os.dup(pass_fds[0])))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._status = run(self._link)

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self._status

    def wait(self, timeout: float = 20.0) -> int | None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("rank", timeout)
        return self._status

    def kill(self) -> None:
        """Nothing: its link is closed, and its group gives up."""


@contextmanager
def ranks_as_threads() -> Iterator[None]:
    """Models that are loaded in this context have threads as ranks."""
    with mock.patch.object(subprocess, "Popen", RankThread):
        yield
