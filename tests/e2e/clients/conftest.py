"""One server for all clients, in a network namespace, where it has the address of
docs/clients.md."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.agents.actor import ENGINE
from tests.e2e.agents.conftest import AGENTS, ROOT, _Inside, checkpoint, namespace, unable
from tests.e2e.clients.snippets import MODEL, PORT
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.server import Server

__all__ = ["checkpoint", "namespace", "play"]

ENVIRONMENTS = Path(os.environ.get("PDSERVE_CLIENTS", ROOT / ".venv" / "clients"))
"""Where `.ci/agents.sh` makes an environment of Python for each list of `.ci/agents`."""
PROGRAMS = Path(__file__).parent / "programs"
CONTEXT = 32_000
ANSWER = "The tool has answered."
SUMMARY = "THE-SUMMARY"
_READ_METRICS = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{PORT}/metrics').read().decode())"


def call(name: str, **arguments: str) -> str:
    """A tool call as Hermes' models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def edit(text: str) -> str:
    """A file as Aider's models write it."""
    return f"hello.txt\n```\n{text}\n```\n"


LONG_OUTPUT = "yes 'one two three four five six' | head -1500"
SCRIPT = [
    {"if": SUMMARY, "say": "Done after the summary."},
    {"if": "summary from the conversation", "say": f"{SUMMARY}: counted."},
    {"if": "<tool_response>", "say": ANSWER},
    {"if": "NOT-YET", "say": edit("first\nsecond")},
    {"if": "EDIT-IT", "say": edit("first")},
    {"if": "RUN-IT", "say": call("bash", command="echo told > proof", description="x")},
    {"if": "FILL-IT", "say": call("bash", command=LONG_OUTPUT, description="x")},
    {"if": "STORY", "say": "la " * 10_000},
    {"if": "WEATHER", "say": call("get_weather", city="Paris")},
    {"if": ".", "say": "Nothing to do."},
]
"""What the model says; the first expression that is found wins."""


@dataclass(frozen=True)
class Scene:
    """The server, and where clients run."""

    server: Server
    inside: tuple[str, ...]

    def metric(self, name: str) -> float:
        """A sample of `/metrics`, 0 if there is none yet. Only programs inside reach the server."""
        command = [*self.inside, "python3", "-c", _READ_METRICS]
        page = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        lines = (line.rpartition(" ") for line in page.stdout.splitlines())
        return next((float(value) for found, _, value in lines if found == name), 0.0)

    @property
    def tokens(self) -> float:
        """Tokens generated so far."""
        return self.metric("pdserve_generation_tokens_total")

    @property
    def cancelled(self) -> float:
        """Requests that ended because their clients hung up."""
        return self.metric('pdserve_requests_total{outcome="cancelled"}')

    def wait_until_free(self, cancelled: float) -> None:
        """Until at least so many requests were cancelled, and none is in flight."""
        end = time.monotonic() + PATIENCE
        while self.cancelled < cancelled or self.metric("pdserve_http_requests_in_flight"):
            assert time.monotonic() < end, f"{self.cancelled} cancelled, of {cancelled}"

    def start(
        self,
        command: list[str],
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


@pytest.fixture(scope="session")
def scene(
    namespace: tuple[str, ...], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """The server runs until the last client is done."""
    file = tmp_path_factory.mktemp("script") / "script.json"
    file.write_text(json.dumps(SCRIPT))
    flags = ("--engine", ENGINE, "--engine-option", f"script={file}", "--aggregated")
    pace = ("--engine-option", "step_ms=2")
    names = ("--served-model-name", MODEL, "--max-model-len", str(CONTEXT), "--port", str(PORT))
    with _Inside(namespace, checkpoint, *flags, *pace, *names) as server:
        server.wait_for_line("ready: ")
        yield Scene(server, namespace)


@pytest.fixture
def play(scene: Scene, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Plays a program's scenes, and checks that what it hung up on is freed while it still runs.
    Returns what it told."""

    def run(program: str, environment: str, connect: str) -> dict[str, Any]:
        command = _interpreter(environment, tmp_path)
        before = scene.cancelled
        for file in PROGRAMS.glob(f"*{Path(program).suffix}"):
            shutil.copy(file, tmp_path)
        (tmp_path / f"connect{Path(program).suffix}").write_text(connect)
        # Its caches are those of its environment: it is compiled once.
        playing = scene.start([*command, program], tmp_path, {}, subprocess.PIPE)
        told: dict[str, Any] = {}
        late = threading.Timer(PATIENCE, _kill, [playing])
        late.start()
        try:
            rest = _read(playing, told)
            assert "abort" in told, "".join(rest)
            scene.wait_until_free(before + 1)
        finally:
            late.cancel()
            late.join()
            _end(playing)
        return told

    return run


def _read(playing: subprocess.Popen[str], told: dict[str, Any]) -> list[str]:
    """Collects what a program tells, up to its last scene; returns its other lines."""
    assert playing.stdout is not None
    rest = []
    for line in playing.stdout:
        try:
            told.update(json.loads(line))
        except ValueError:
            rest.append(line)
        if "abort" in told:
            break
    return rest


def _end(playing: subprocess.Popen[str]) -> None:
    """Closes a program's input, which ends it."""
    try:
        playing.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        _kill(playing)
        playing.communicate()
        raise


def _kill(playing: subprocess.Popen[str]) -> None:
    """Ends a program that takes too long, which ends its output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(playing.pid, signal.SIGKILL)


def _interpreter(environment: str, work: Path) -> list[str]:
    """What runs a program; skips if it is not installed."""
    if environment == "node":
        if not (AGENTS / "ai").exists() or shutil.which("node") is None:
            unable("clients for JavaScript are not installed: see .ci/agents.sh")
        (work / "node_modules").symlink_to(AGENTS)
        return ["node"]
    python = ENVIRONMENTS / environment / "bin" / "python"
    if not python.exists():
        unable(f"the clients of .ci/agents/{environment}.txt are not installed: see .ci/agents.sh")
    return [str(python)]
