"""One node as a process that a storm kills and starts again, under one name and at one address.

Its log is a file, on a disk that may be full, so what matters here never depends on a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.chaos.storm import client

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.storm.schedule import Part

ROOT = Path(__file__).parents[3]
POLL = 0.1
PROBE = 2.0
"""Seconds for an answer to a probe; a machine may be busy."""
READY = 180.0
"""Seconds for a node to become ready."""
LEAVE = 100.0
"""Seconds for a node to leave after SIGTERM: more than its own `--drain-timeout`."""
DRAIN = "75s"


class Node:
    """One process of the cluster, over all its lives: starts, waits, probes, reads its log."""

    def __init__(
        self,
        name: str,
        part: Part,
        host: str,
        http: int,
        probes: int,
        flags: Sequence[str],
        *,
        log: Path,
        home: Path,
        prefix: tuple[str, ...] = (),
    ) -> None:
        """`host`, `http` and `probes` say where it is reached."""
        self.name = name
        self.part: Part = part
        self.host, self.http, self.probes = host, http, probes
        self.log = log
        self.lives = 0
        self.process: subprocess.Popen[bytes] | None = None
        role = "worker" if part == "prefill" else part
        self._command = [
            *prefix, sys.executable, "-m", "pdserve", "--role", role, "--node-name", name,
            "--host", host, "--port", str(http), "--metrics-port", str(probes),
            "--log-format", "json", "--drain-timeout", DRAIN, *flags,
        ]  # fmt: skip
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
        own = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}
        self._environ = clean | own | {"PDSERVE_CONFIG": "none"}

    # ------------------------------------------------------------------ life

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Begin a life."""
        assert not self.alive
        self.lives += 1
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environ, stdout=subprocess.DEVNULL, stderr=log
            )

    async def wait_ready(self, patience: float = READY) -> None:
        """Waits until the node says that it is ready. Raises `TimeoutError`, with the reason."""
        end = time.monotonic() + patience
        said = "nothing"
        while time.monotonic() < end:
            assert self.process is not None
            if (status := self.process.poll()) is not None:
                raise RuntimeError(f"{self.name} ended with {status}:\n{self.last_words()}")
            with contextlib.suppress(OSError):
                status, body = await client.get(self.host, self.probes, "/health", PROBE)
                if status == 200:
                    return
                said = body.decode()
            await asyncio.sleep(POLL)
        raise TimeoutError(f"{self.name} is not ready: {said}\n{self.last_words()}")

    def kill(self) -> None:
        """Sends SIGKILL to the node; its engine ends with it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def leave(self) -> int:
        """SIGTERM, and its exit status. Raises `TimeoutError`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + LEAVE
        while (status := self.process.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name} does not leave:\n{self.last_words()}")
            await asyncio.sleep(POLL)
        return status

    # ------------------------------------------------------------------ its processes

    def engine(self) -> psutil.Process | None:
        """The engine core, if it has one now."""
        assert self.process is not None
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                if "pdserve.engine_core.child" in child.cmdline():
                    return child
        return None

    def processes(self) -> list[psutil.Process]:
        """Node and engine."""
        assert self.process is not None
        with contextlib.suppress(psutil.Error):
            me = psutil.Process(self.process.pid)
            return [me, *me.children(recursive=True)]
        return []

    def descriptors(self) -> int:
        """Open files and sockets of all its processes."""
        return sum(process.num_fds() for process in self.processes())

    def threads(self) -> int:
        """Number of threads of the node without its engine, whose threads depend on what it has
        loaded."""
        return self.processes()[0].num_threads()

    # ------------------------------------------------------------------ looking

    async def page(self) -> str:
        """Its metrics. Raises `OSError`."""
        _, body = await client.get(self.host, self.probes, "/metrics", 10 * PROBE)
        return body.decode()

    def last_words(self, count: int = 15) -> str:
        """The end of its log."""
        return f"the last of {self.name}'s log:\n" + "\n".join(self.lines()[-count:])

    def lines(self) -> list[str]:
        """Its log over all lives; of each line the words."""
        return [_words(line) for line in self.log.read_text(errors="replace").splitlines()]

    def tracebacks(self) -> list[str]:
        """Log lines with a traceback, which is always unexpected. Paths begin at the checkout."""
        text = self.log.read_text(errors="replace").replace(f"{ROOT}/", "")
        return [f"{self.name}: {line[:3000]}" for line in text.splitlines() if "Traceback" in line]


def _words(line: str) -> str:
    try:
        record: dict[str, Any] = json.loads(line)
        when = re.sub(r".*T|\+.*", "", record["time"])
        more = f" [{record['request_id']}]" if record.get("request_id") else ""
        return f"{when} {record['level']}: {record['message']}{more}"
    except (ValueError, KeyError, TypeError):
        return line
