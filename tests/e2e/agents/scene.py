"""A server in a network namespace, the programs that talk to it there, and what its metrics say.

Only programs inside of the namespace reach the server, so its metrics are read by one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tests
from tests.e2e.clients.snippets import MODEL, PORT
from tests.e2e.server import PATIENCE, Server
from tests.support.metrics_page import find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(tests.__path__[0]).parent
_ASK = f"""
import sys, urllib.request as r
url = "http://127.0.0.1:{PORT}" + sys.argv[1]
request = r.Request(url, sys.stdin.buffer.read() or None, {{"Content-Type": "application/json"}})
sys.stdout.buffer.write(r.urlopen(request, timeout={PATIENCE}).read())
"""
_HELD = (
    *("pdserve_http_requests_in_flight", "pdserve_num_requests_running"),
    *("pdserve_num_requests_waiting", "pdserve_kv_blocks_used"),
)
"""Gauges that are 0 when no request holds anything, in the frontend or in the engine."""


class ServerInside(Server):
    """A server in the namespace."""

    def __init__(self, inside: tuple[str, ...], model: Path, *flags: str) -> None:
        super().__init__(model, *flags, PYTHONPATH=str(ROOT))
        self._command = [*inside, *self._command]


@dataclass(frozen=True)
class Scene:
    """The server, and where clients run."""

    server: Server
    inside: tuple[str, ...]

    def ask(self, path: str, body: object = None) -> str:
        """The body of an answer that must succeed."""
        command = [*self.inside, "python3", "-c", _ASK, path]
        data = "" if body is None else json.dumps(body)
        done = subprocess.run(
            command, input=data, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        return done.stdout

    def metrics(self) -> str:
        """The page of `/metrics`."""
        return self.ask("/metrics")

    @property
    def tokens(self) -> float:
        """Tokens generated so far."""
        return find(self.metrics(), "pdserve_generation_tokens_total") or 0.0

    @property
    def cancelled(self) -> float:
        """Requests that ended because their clients hung up."""
        return _cancelled(self.metrics())

    def wait_until_free(self, cancelled: float) -> None:
        """Until at least so many requests were cancelled, and no request holds anything: neither a
        place in the frontend, nor one in the engine's steps, nor blocks."""
        end = time.monotonic() + PATIENCE
        while True:
            now = self.metrics()
            held = {name: value for name in _HELD if (value := find(now, name)) != 0}
            if _cancelled(now) >= cancelled and not held:
                return
            assert time.monotonic() < end, f"{_cancelled(now)} cancelled, of {cancelled}; {held}"

    def wait_for_answer(self, runs: Callable[[], bool]) -> None:
        """Until the server is in the middle of an answer to a program, which `runs`."""
        end = time.monotonic() + PATIENCE
        begun = self.tokens
        while self.tokens < begun + 100:
            assert time.monotonic() < end, "there is no answer"
            assert runs(), "the program has ended"

    def chat(self, text: str) -> Any:
        """What the server answers to one message."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
        answer = json.loads(self.ask("/v1/chat/completions", body))
        return answer["choices"][0]["message"]["content"]

    def start(
        self,
        command: Iterable[str],
        work: Path,
        environ: dict[str, str],
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """A client's program, whose output is a pipe."""
        keep = {"PATH": os.environ["PATH"], "HOME": str(work), "TERM": "dumb"}
        return subprocess.Popen(
            [*self.inside, *command],
            env=keep | environ,
            cwd=work,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def interrupt_in_the_answer(self, running: subprocess.Popen[str]) -> str:
        """Interrupts a program, as Ctrl-C in a terminal does, when its answer has begun. Returns
        what it said."""
        try:
            self.wait_for_answer(lambda: running.poll() is None)
            os.killpg(running.pid, signal.SIGINT)
        finally:
            said = finished(running)
        return said


def finished(running: subprocess.Popen[str]) -> str:
    """What a program said until its end. One that does not end is killed."""
    try:
        said, _ = running.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        kill(running)
        said, _ = running.communicate()
        pytest.fail(f"it did not end, and said:\n{said}")
    return said


def kill(running: subprocess.Popen[Any]) -> None:
    """Ends a program that takes too long, which ends its output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)


def _cancelled(page: str) -> float:
    return find(page, 'pdserve_requests_total{outcome="cancelled"}') or 0.0
