"""A process of our own that can be killed: for work whose time and memory nobody can vouch for.

It has a limit on its address space and on its processor time, no open files but its socket, and
nothing of the parent's environment. Jobs and answers are frames of bytes; what is in them is its
user's business. The first part is the parent's, the second the child's.
"""

from __future__ import annotations

import contextlib
import os
import resource
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

__all__ = ["Child", "allow_processor_time", "jobs", "send"]

_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
_LENGTH = struct.Struct("<I")
_MAX_FRAME: Bytes = 256 * 2**20


class Child:
    """The parent's end of one child."""

    def __init__(self, module: str, memory: Bytes) -> None:
        """`module`: is run as a program with `memory`, which its `jobs` limits it to.

        Errors: `OSError`.
        """
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(memory)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_environment(),
                cwd="/",
                start_new_session=True,  # a Ctrl-C at the terminal is the parent's business
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def wait_ready(self, seconds: Seconds) -> None:
        """Wait for its first frame. Errors as of `ask`."""
        self._receive(time.monotonic() + seconds)

    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def was_killed(self) -> bool:
        """Somebody else has ended it, who need not have had a reason in what it did. To be asked
        once reading from it has ended."""
        try:
            return -self._process.wait(1.0) in (signal.SIGKILL, signal.SIGTERM)
        except subprocess.TimeoutExpired:
            return False

    def end(self) -> None:
        """Kill the process. Any thread may; reading from it ends."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and collect everything."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def ask(self, frame: bytes, seconds: Seconds) -> bytes:
        """One job, one answer. Errors: `TimeoutError`, `OSError`, `EOFError`; then `close` it."""
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        return self._receive(deadline)

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
    """Enough to find the same interpreter's modules and libraries, and none of the secrets."""
    paths = [os.path.abspath(path) for path in sys.path]
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "LC_ALL": "C.UTF-8"}


# -------------------------------------------------------------------- the child


def jobs() -> Iterator[tuple[socket.socket, bytes]]:
    """Confine this process, then give each job with the socket that its answer goes to, until the
    other end closes it."""
    with socket.socket(fileno=os.dup(0)) as parent:
        _confine(int(sys.argv[1]))
        send(parent, b"")  # ready
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
        with contextlib.suppress(ValueError, OSError):  # macOS does not limit address space
            resource.setrlimit(kind, (most, most))


def allow_processor_time(seconds: Seconds) -> None:
    """A child whose parent was killed in the middle of a job ends as well."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + seconds) + 2
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


def send(parent: socket.socket, data: bytes) -> None:
    parent.sendall(_LENGTH.pack(len(data)) + data)
