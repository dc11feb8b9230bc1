"""One real pdserve process on a port of its own, its log, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.support.metrics_page import find

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 60.0
"""Seconds for anything that a busy machine may delay; what is waited for comes much sooner."""


class Server:
    """Starts with `with`; afterwards it has ended, by SIGTERM unless the test ended it."""

    def __init__(self, model: Path | None, *flags: str, **environ: str) -> None:
        self.model = model
        self.host = "127.0.0.1"
        """Where it is reached."""
        named = [] if model is None else ["--model", str(model)]
        self._command = [sys.executable, "-m", "pdserve", "--port", "0", *named, *flags]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
        keep = {"PDSERVE_PURE": os.environ["PDSERVE_PURE"]} if "PDSERVE_PURE" in os.environ else {}
        self.environ = clean | {"PDSERVE_CONFIG": "none"} | keep | environ
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._children: list[psutil.Process] = []

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Server:
        self.process = subprocess.Popen(
            self._command, env=self.environ, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._remember_children()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._reader.join(PATIENCE)
            assert self.process.stderr is not None
            self.process.stderr.close()
        assert not self.left_behind(), f"left behind: {self.left_behind()}"

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit status."""
        self._remember_children()
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    # ------------------------------------------------------------------ looking

    @property
    def port(self) -> int:
        match = self.wait_for_line(r"listening on .*port (\d+)")
        return int(match[1])

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def wait_for_line(self, pattern: str, timeout: float = PATIENCE) -> re.Match[str]:
        """The first log line that matches, already there or to come."""

        def find() -> re.Match[str] | None:
            return next((m for line in self.lines if (m := re.search(pattern, line))), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or self._ended, timeout)
            if match := find():
                return match
        raise AssertionError(f"no line matches {pattern!r} in:\n" + "\n".join(self.lines))

    def core(self) -> psutil.Process:
        """The engine core's process."""
        (core,) = (
            child
            for child in psutil.Process(self.process.pid).children()
            if "pdserve.engine_core.child" in child.cmdline()
        )
        return core

    def get(self, path: str, port: int | None = None) -> tuple[int, Any]:
        """Status and decoded body."""
        url = f"http://{self.host}:{port or self.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                return answer.status, _decode(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _decode(error.read())

    def post(self, path: str, body: object) -> Any:
        """The decoded answer to a request that must succeed."""
        data = json.dumps(body).encode()
        with urllib.request.urlopen(self.url + path, data=data, timeout=PATIENCE) as answer:
            return _decode(answer.read())

    def metric(self, name: str) -> float:
        """The sum of the samples of `/metrics` with this name and these labels."""
        status, page = self.get("/metrics")
        assert status == 200, page
        value = find(page, name)
        assert value is not None, f"no {name}"
        return value

    def starved(self) -> float:
        """Seconds that its main thread could have run and got no core: the machine's doing."""
        said = Path(f"/proc/{self.process.pid}/schedstat")
        return int(said.read_text().split()[1]) / 1e9 if said.exists() else 0.0

    def wait_healthy(self) -> None:
        """Until `/health` is good."""
        end = time.monotonic() + PATIENCE
        while self.get("/health")[0] != 200:
            assert time.monotonic() < end, self.get("/health")
            time.sleep(0.02)

    def wait_for_metric(self, name: str, value: float, timeout: float = PATIENCE) -> None:
        """Until the metric has this value: scrapes are the only way to see it."""
        deadline = time.monotonic() + timeout
        while (found := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}"

    def left_behind(self) -> list[str]:
        """Children that outlived the server."""
        _, alive = psutil.wait_procs(self._children, timeout=PATIENCE)
        return [f"{child.pid} {child.name()}" for child in alive]

    # ------------------------------------------------------------------ inside

    def _remember_children(self) -> None:
        if self.process.poll() is None:
            self._children = psutil.Process(self.process.pid).children(recursive=True)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.decode(errors="replace").rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@contextlib.contextmanager
def serving(model: Path | None, *flags: str, **environ: str) -> Iterator[Server]:
    """A server that is ready."""
    with Server(model, *flags, **environ) as server:
        server.wait_for_line(r"ready: ")
        yield server


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()
