"""Servers of pdserve as child processes, for measurements: started, waited for, asked, ended."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message

ROOT = Path(__file__).parents[2]
READY = 120.0
"""Seconds in which a server has to answer."""
END = 20.0
"""Seconds in which a process has to end after SIGINT; then it is killed."""
PAUSE = 0.3
"""Seconds between two questions whether a server is ready."""
OWN_TIMES = ("ttft_ms", "queue_ms", "prefill_ms")
"""What an answer's usage tells of its times."""
LOG_LINES = 25
"""Last lines of each log that an error shows."""


class Server:
    """Processes of pdserve that end together, with their logs."""

    def __init__(self, folder: Path) -> None:
        """`folder`: an empty one for logs and the cluster's key."""
        self.folder = folder
        self.port = free_port()
        self._children: list[subprocess.Popen[bytes]] = []
        key = folder / "key"
        key.write_text(secrets.token_hex(32) + "\n")
        key.chmod(0o600)
        self._environment = {"PDSERVE_CLUSTER_KEY_FILE": str(key)} | search_path(folder / "site")

    @property
    def url(self) -> str:
        """Returns the API's address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, name: str, *flags: str) -> None:
        """Starts one process; its log is `NAME.log`."""
        environment = os.environ | self._environment
        command = [sys.executable, "-m", "pdserve", *flags]
        with (self.folder / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(command, stderr=log, stdout=log, env=environment)
        self._children.append(child)

    def wait(self, *, remote: bool = False) -> None:
        """Returns when a completion is answered; `remote`: and was prefilled by another worker,
        which the decode worker may meet later than its first request. Raises `TimeoutError` with
        the ends of the logs."""
        deadline = time.monotonic() + READY
        number = 0
        while time.monotonic() < deadline:
            if any(child.poll() is not None for child in self._children):
                break
            number += 1
            with contextlib.suppress(OSError):
                _, prefill = self.complete(f"{number}: are you there? " * 16, 2)
                if not remote or prefill.startswith("remote"):
                    return
            time.sleep(PAUSE)
        raise TimeoutError(self.logs())

    def complete(self, prompt: str, tokens: int) -> tuple[str, str]:
        """Returns the text of a greedy completion, and how its prompt was prefilled. Raises
        `OSError`."""
        answer, headers = self._ask(prompt, tokens)
        return answer["choices"][0]["text"], headers.get("x-pdserve-prefill", "?")

    def own_times(self, prompt: list[int], tokens: int) -> dict[str, float]:
        """Returns the times that the server itself measured of a completion, in milliseconds:
        `ttft_ms`, `queue_ms`, `prefill_ms`. Raises `OSError`."""
        usage = self._ask(prompt, tokens)[0]["usage"]["pdserve"]
        return {name: usage[name] for name in OWN_TIMES if usage.get(name) is not None}

    def _ask(self, prompt: str | list[int], tokens: int) -> tuple[dict[str, Any], Message]:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer), answer.headers

    def logs(self) -> str:
        """Returns the last lines of each process's log."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(text.splitlines()[-LOG_LINES:])
            for path, text in self._texts()
        )

    def whole_logs(self) -> str:
        """Returns all logs."""
        return "\n".join(
            f"--- {self.folder.name}/{path.name}\n{text}" for path, text in self._texts()
        )

    def _texts(self) -> Iterator[tuple[Path, str]]:
        for path in sorted(self.folder.glob("*.log")):
            yield path, path.read_text(errors="replace")

    def stop(self) -> None:
        """Ends all processes."""
        for child in self._children:
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
        for child in self._children:
            try:
                child.wait(END)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(END)


def search_path(site: Path) -> dict[str, str]:
    """Returns by which environment variable servers find this checkout; empty if pdserve is
    installed. `site` then gets the names of engines and policies, which an installation knows."""
    if entry_points(group="pdserve.engines"):
        return {}
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines: list[str] = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    info = site / "pdserve-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pdserve\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    places = [str(site), str(ROOT), str(ROOT / "engines"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, places))}


def free_port() -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def metric(port: int, name: str, **labels: str) -> float:
    """Returns a counter of the process with this metrics port, summed over all series that have the
    labels. Raises `OSError`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return total(answer.read().decode(), name, **labels)


def total(page: str, name: str, **labels: str) -> float:
    """Returns the sum of a counter's series on a page of metrics."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith(f"{name}{{") and all(each in line for each in wanted)
    )


@contextlib.contextmanager
def served(folder: Path, name: str, logs: list[str]) -> Iterator[Server]:
    """Yields a server that ends with the block; then appends its logs to `logs`."""
    own = folder / name
    own.mkdir()
    server = Server(own)
    try:
        yield server
    finally:
        server.stop()
        logs.append(server.whole_logs())
