"""Runs a child process that can be killed, for work with unknown time and memory.

The child has limits on address space and processor time, no open files but its socket, and nothing
of the parent's environment. Jobs and answers are frames of bytes; their content belongs to the
caller. The first part of the file is the parent's, the second the child's.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Bytes, Seconds

__all__ = ["KillableProcess", "limit_cpu_time", "receive_jobs", "send_answer"]

_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
_LENGTH = struct.Struct("<I")
_MAX_FRAME: Bytes = 256 * 2**20


class KillableProcess:
    """The parent's end of one child."""

    def __init__(self, module: str, memory: Bytes) -> None:
        """Start `python -m module`; its `receive_jobs` limits it to `memory` bytes.

        Errors: `OSError`.
        """
        self._deadline: Seconds = 0.0
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(memory)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_environment(),
                cwd="/",
                # In its own session the child gets no Ctrl-C from the terminal; the parent ends it.
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def wait_ready(self, seconds: Seconds) -> None:
        """Wait for the child's first frame. Errors as for `ask`."""
        self._receive(time.monotonic() + seconds)

    def ended(self) -> bool:
        """Return True if the process has ended."""
        return self._process.poll() is not None

    def was_killed(self) -> bool:
        """Return True if another process killed the child, so that its job may not be to blame.
        Call it after reading from the child has ended."""
        try:
            return -self._process.wait(1.0) in (signal.SIGKILL, signal.SIGTERM)
        except subprocess.TimeoutExpired:
            return False

    def end(self) -> None:
        """Kill the process; pending reads end. Any thread may call."""
        self._process.kill()

    def close(self) -> None:
        """Kill and reap the process, and close its socket."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def ask(self, frame: bytes, seconds: Seconds) -> bytes:
        """Send a job and return its answer. Errors: `TimeoutError`, `OSError`, `EOFError`; then
        `close`."""
        self.post(frame, seconds)
        return self.answer()

    def post(self, frame: bytes, seconds: Seconds) -> None:
        """Send a job whose `answer` must arrive within `seconds`. Errors as for `ask`."""
        self._deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def answers_within(self, seconds: Seconds) -> bool:
        """Wait up to `seconds`; True if the answer began to arrive or the process ended."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def answer(self) -> bytes:
        """Return the answer to the posted job. Errors as for `ask`."""
        return self._receive(self._deadline)

    def _receive(self, deadline: Seconds) -> bytes:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > _MAX_FRAME:
            raise EOFError("a frame of impossible length")
        return self._exactly(length, deadline)

    def _exactly(self, count: int, deadline: Seconds) -> bytes:
        data = bytearray()
        while len(data) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            more = self._socket.recv(min(count - len(data), 2**20))
            if not more:
                raise EOFError("the process ended")
            data += more
        return bytes(data)


def _environment() -> dict[str, str]:
    """Return the variables that find the interpreter's modules and libraries, no secrets."""
    paths = [os.path.abspath(path) for path in sys.path]
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "LC_ALL": "C.UTF-8"}


# -------------------------------------------------------------------- the child


def receive_jobs() -> Iterator[tuple[socket.socket, bytes]]:
    """Limit this process, then yield each job with the socket for its answer, until the parent
    closes the socket."""
    with socket.socket(fileno=os.dup(0)) as parent:
        _confine(int(sys.argv[1]))
        # An empty answer tells the parent that this process is ready.
        send_answer(parent, b"")
        stream = parent.makefile("rb")
        while header := stream.read(_LENGTH.size):
            yield parent, stream.read(_LENGTH.unpack(header)[0])


def _confine(memory: Bytes) -> None:
    """No core files, no writing of files, no processes, bounded memory."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_AS: memory,
    }
    for kind, most in limits.items():
        with contextlib.suppress(ValueError, OSError):
            # macOS does not limit address space.
            resource.setrlimit(kind, (most, most))


def limit_cpu_time(seconds: Seconds) -> None:
    """Limit processor time, so that a child ends even if its parent was killed during a job."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    # The limit is in whole seconds.
    most = math.ceil(used.ru_utime + used.ru_stime + seconds)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


def send_answer(parent: socket.socket, data: bytes) -> None:
    parent.sendall(_LENGTH.pack(len(data)) + data)
