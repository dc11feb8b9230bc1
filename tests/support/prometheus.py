"""Debian's Prometheus and promtool: found, or the test is skipped; in CI it fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_PATIENCE = 60.0
"""Seconds for anything that a busy machine may delay."""


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    path = shutil.which(name)
    if path is not None:
        return path
    if os.environ.get("PDSERVE_REQUIRE_PROMETHEUS", "") not in ("", "0"):
        pytest.fail(f"PDSERVE_REQUIRE_PROMETHEUS is set, and there is no {name}", pytrace=False)
    pytest.skip(f"no {name} here: apt-get install prometheus")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs promtool; its exit status says whether it is content."""
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


class Prometheus:
    """A Prometheus of Debian on a port of its own; starts with `with`."""

    def __init__(self, config: Path, port: int) -> None:
        self._config = config
        self.url = f"http://127.0.0.1:{port}"
        self.log = config.with_name("prometheus.log")
        address = f"--web.listen-address=127.0.0.1:{port}"
        self._command = [program("prometheus"), *self.flags(config), address]

    @staticmethod
    def flags(config: Path) -> list[str]:
        """Where its files are: all beside the configuration."""
        return [f"--config.file={config}", f"--storage.tsdb.path={config.with_name('data')}"]

    def __enter__(self) -> Prometheus:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        end = time.monotonic() + _PATIENCE
        while not self._ready():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(_PATIENCE)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=_PATIENCE) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str, **query: str) -> Any:
        """The `data` of an answer of its API."""
        text = urllib.parse.urlencode(query)
        try:
            address = f"{self.url}/api/v1/{path}?{text}"
            with urllib.request.urlopen(address, timeout=_PATIENCE) as body:
                return json.load(body)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{query}: {error.read().decode()}") from None

    def values(self, expr: str) -> list[float]:
        """Of the vector that the expression is now."""
        found = self.get("query", query=expr)
        if found["resultType"] == "scalar":
            return [float(found["result"][1])]
        return [float(one["value"][1]) for one in found["result"]]

    def wait_for(self, expr: str) -> list[float]:
        """Until the expression has a value, which scrapes bring."""
        end = time.monotonic() + _PATIENCE
        while not (found := self.values(expr)):
            assert time.monotonic() < end, f"{expr} stays empty"
            time.sleep(0.1)
        return found
