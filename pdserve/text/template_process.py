"""Renders a template nobody vouches for, in a process that can be killed.

`sandbox.py` ends what a template does with its own loops and calls; no check inside one interpreter
ends a single built-in operation that takes for ever (comparing two lists that hold each other's
copies forty levels deep) or takes all memory. A child process does: it has a limit on its address
space and on its processor time, no open files but its socket, and is killed when the answer is not
there in time. The next template gets a fresh child; one that behaved is kept for the next.

The module is both ends: `TemplateProcess` in the parent, `main` in the child, msgpack in frames
between them. It knows nothing of threads or event loops; `pool.py` owns one and gives it a thread.
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
import threading
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import Draining, InvalidRequest, Unavailable
from pdserve.text.chat_template import ChatTemplate
from pdserve.text.sandbox import TemplateLimits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.text.chat_messages import Message

FOREIGN_LIMITS = TemplateLimits(
    source_chars=128 * 1024, output_chars=8 * 2**20, work_chars=32 * 2**20, seconds=2.0
)
"""What a request's own template may use."""
MEMORY: Bytes = 768 * 2**20
"""Address space of the child; Python itself maps about a fifth of it."""
STARTUP: Seconds = 20.0
"""Time a child has to start, on a busy machine; it takes a fifth of a second."""
_GRACE: Seconds = 0.5
"""Past the meter's own time limit before the child is killed, so that its own words are heard."""
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
_LENGTH = struct.Struct("<I")
_MAX_FRAME: Bytes = 256 * 2**20


class _Job(msgspec.Struct, array_like=True):
    source: str
    special_tokens: dict[str, str]
    limits: tuple[int, int, int, int, float]
    messages: list[dict[str, Any]]
    options: dict[str, Any]


class _Outcome(msgspec.Struct, array_like=True):
    text: str | None
    error: str = ""
    param: str | None = None


class TemplateProcess:
    """At most one child, started when first needed. Any thread may call; they take turns."""

    def __init__(self, limits: TemplateLimits = FOREIGN_LIMITS, memory: Bytes = MEMORY) -> None:
        self._limits = limits
        self._memory = memory
        self._turn = threading.Lock()
        self._child: _Child | None = None
        self._closed = False
        self.killed = 0
        """Children that had to be killed."""

    def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Sequence[Message],
        options: Mapping[str, Any],
    ) -> str:
        """`ChatTemplate(source, special_tokens).render(messages, **options)`, whatever it does.

        Takes the limits' `seconds`, half a second and perhaps a start at most, once it is its turn.
        Errors: `InvalidRequest` for anything the template does, `Draining` after `close`,
        `Unavailable` when no child can be started.
        """
        limits = self._limits
        job = _Job(
            source,
            dict(special_tokens),
            (
                limits.source_chars,
                limits.output_chars,
                limits.work_chars,
                limits.steps,
                limits.seconds,
            ),
            [dict(message) for message in messages],
            dict(options),
        )
        try:
            frame = msgspec.msgpack.encode(job)
        except (TypeError, ValueError, OverflowError, RecursionError):
            raise InvalidRequest("messages and options must be JSON", param="messages") from None
        with self._turn:
            outcome = self._ask(frame)
        if outcome.text is None:
            raise InvalidRequest(outcome.error, param=outcome.param)
        return outcome.text

    def close(self) -> None:
        """Kill the child and collect it; a rendering in progress fails. Idempotent."""
        self._closed = True
        child = self._child
        if child is not None:
            child.end()  # whose turn it is sees the end of its stream now
        with self._turn:
            self._drop()

    def _ask(self, frame: bytes) -> _Outcome:
        child = self._ready_child()
        try:
            reply = child.ask(frame, self._limits.seconds + _GRACE)
            return msgspec.msgpack.decode(reply, type=_Outcome)
        except TimeoutError:
            reason = f"takes over {self._limits.seconds:g} s"
        except (OSError, EOFError, msgspec.MsgspecError):
            reason = "ended its process, by using too much memory or time"
        except BaseException:  # nobody will read the answer, so the next job must not find it
            self._drop()
            raise
        self._drop()
        self._refuse_when_closed()
        self.killed += 1
        return _Outcome(None, f"the chat template {reason}", "chat_template")

    def _ready_child(self) -> _Child:
        if self._child is not None and self._child.ended():  # by someone else, while idle
            self._drop()
        self._refuse_when_closed()
        if self._child is None:
            try:
                self._child = _Child(self._memory)
                self._refuse_when_closed()  # `close` may have looked before there was a child
                self._child.wait_ready(STARTUP)
            except (OSError, EOFError) as error:
                self._drop()
                self._refuse_when_closed()
                raise Unavailable(f"no process for the chat template: {error}") from None
        return self._child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise Draining("chat templates are no longer rendered: shutting down")


class _Child:
    """The parent's end of one child."""

    def __init__(self, memory: Bytes) -> None:
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(memory)],
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


def main() -> None:
    """Answer jobs from standard input, a socket, until the other end closes it."""
    with socket.socket(fileno=os.dup(0)) as parent:
        _confine(int(sys.argv[1]))
        _send(parent, b"")  # ready
        stream = parent.makefile("rb")
        while header := stream.read(_LENGTH.size):
            frame = stream.read(_LENGTH.unpack(header)[0])
            job = msgspec.msgpack.decode(frame, type=_Job)
            _allow_processor_time(job.limits[-1])
            _send(parent, msgspec.msgpack.encode(_outcome(job)))


def _outcome(job: _Job) -> _Outcome:
    try:
        return _Outcome(_rendered(job))
    except InvalidRequest as error:
        return _Outcome(None, error.message, error.param)
    except MemoryError:
        return _Outcome(None, "the chat template uses too much memory", "chat_template")


def _rendered(job: _Job) -> str:
    template = _compiled(job.source, tuple(job.special_tokens.items()), job.limits)
    return template.render(job.messages, **job.options)


@lru_cache(maxsize=8)
def _compiled(
    source: str, special_tokens: tuple[tuple[str, str], ...], limits: tuple[Any, ...]
) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens), limits=TemplateLimits(*limits))


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


def _allow_processor_time(seconds: Seconds) -> None:
    """A child whose parent was killed in the middle of a job ends as well."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + seconds) + 2
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


def _send(parent: socket.socket, data: bytes) -> None:
    parent.sendall(_LENGTH.pack(len(data)) + data)


if __name__ == "__main__":
    main()
