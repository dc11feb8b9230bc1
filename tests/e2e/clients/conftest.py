"""One server for all clients, in a network namespace, where it has the address of
docs/clients.md."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.agents.actor import ENGINE
from tests.e2e.agents.conftest import AGENTS, checkpoint, namespace, unable
from tests.e2e.agents.scene import ROOT, Scene, ServerInside, kill
from tests.e2e.clients.snippets import MODEL, PORT
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["checkpoint", "namespace", "play"]

ENVIRONMENTS = Path(os.environ.get("PDSERVE_CLIENTS", ROOT / ".venv" / "clients"))
"""Where `.ci/agents.sh` makes an environment of Python for each list of `.ci/agents`."""
PROGRAMS = Path(__file__).parent / "programs"
CONTEXT = 32_000
ANSWER = "The tool has answered."
SUMMARY = "THE-SUMMARY"


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
    with ServerInside(namespace, checkpoint, *flags, *pace, *names) as server:
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
        late = threading.Timer(PATIENCE, kill, [playing])
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
        kill(playing)
        playing.communicate()
        raise


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
