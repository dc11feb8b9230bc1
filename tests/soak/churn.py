"""The process whose nodes come and go (`members.py`), and those who ask meanwhile."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tests.e2e.server import PATIENCE
from tests.soak.members import MODEL

if TYPE_CHECKING:
    from tests.chaos.cluster import Node

ROOT = Path(__file__).parents[2]
PAUSE = 0.05
"""Seconds between two requests: workers that come and go leave gaps, which are not what counts."""


class Churn:
    """Use with `with`."""

    MODEL: ClassVar = MODEL

    def __init__(self, join: str, keys: Path, seed: int, *flags: str) -> None:
        where = ("--join", join, "--keys", str(keys), "--seed", str(seed))
        self._command = [sys.executable, "-m", "tests.soak.members", *where, *flags]

    def __enter__(self) -> Churn:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True
        )
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if exception[0] is not None:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def come_and_go(self, count: int) -> dict[str, Any]:
        """So many nodes; what became of them and of their requests, since the beginning."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process whose nodes come and go has ended"
        report = json.loads(line)
        assert not report["complaints"], report["complaints"][:5]
        counts: dict[str, Any] = report["counts"]
        return counts


class Asking:
    """A client of one frontend that asks for a model whose workers come and go. Use with `with`."""

    def __init__(self, frontend: Node, model: str) -> None:
        self.statuses: Counter[int] = Counter()
        self._frontend = frontend
        self._body = json.dumps({"model": model, "prompt": [3, 4, 5], "max_tokens": 8}).encode()
        self._go = threading.Event()
        self._over = False
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over = True
        self._go.set()
        self._thread.join()

    def pause(self) -> None:
        """No request is under way when this returns."""
        self._go.clear()
        assert self._idle.wait(PATIENCE)

    def resume(self) -> None:
        self._idle.clear()
        self._go.set()

    def _run(self) -> None:
        while not self._over:
            if not self._go.is_set():
                self._idle.set()
                self._go.wait()
                continue
            self.statuses[self._ask()] += 1
            time.sleep(PAUSE)

    def _ask(self) -> int:
        url = f"{self._frontend.url}/v1/completions"
        request = urllib.request.Request(url, self._body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
