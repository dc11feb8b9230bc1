"""Coding agents and a server in a network namespace that has nothing but its own loopback."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.agents.actor import ENGINE
from tests.e2e.agents.scene import ROOT, Scene, ServerInside
from tests.e2e.agents.terminal import Terminal
from tests.e2e.clients.snippets import MODEL, PORT
from tests.e2e.model import MARKERS, THINKS, write_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AGENTS = Path(os.environ.get("PDSERVE_AGENTS", ROOT / ".venv" / "agents")) / "node_modules"
"""Where `.ci/agents.sh` has put the packages of `.ci/agents/package.json`."""
PROGRAMS = {
    "claude": "@anthropic-ai/claude-code-linux-*/claude",
    "codex": "@openai/codex-linux-*/vendor/*/bin/codex",
}


def unable(why: str) -> None:
    """Skips, or fails where the agents are required."""
    if os.environ.get("PDSERVE_REQUIRE_AGENTS", "") not in ("", "0"):
        pytest.fail(f"PDSERVE_REQUIRE_AGENTS is set, and {why}", pytrace=False)
    pytest.skip(why)


def program(name: str) -> Path:
    """The agent's own binary."""
    found = sorted(AGENTS.glob(PROGRAMS[name]))
    if not found:
        unable(f"{name} is not installed: see .ci/agents.sh")
    return found[0]


@pytest.fixture(scope="session")
def namespace() -> Iterator[tuple[str, ...]]:
    """What runs a command inside: the agents reach the server and nothing else."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        unable("network namespaces need root and the command ip (iproute2)")
    name = f"pdagents{os.getpid() % 10000}{random.randrange(10, 100)}"
    inside = ("ip", "netns", "exec", name)
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        unable(f"no network namespaces here: {made.stderr.strip()}")
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template knows of tools, written as Hermes' and Qwen's models write them."""
    return write_model(tmp_path_factory.mktemp("m") / "actor", template=THINKS, markers=MARKERS)


@dataclass(frozen=True)
class Stage(Scene):
    """A running server whose model follows a script, and a folder for an agent."""

    work: Path

    def agent(self, *command: str, **environ: str) -> subprocess.Popen[str]:
        """An agent at work in the folder. Its exit status is the caller's business."""
        return self.start(command, self.work, environ)

    def terminal(self, *command: str, **environ: str) -> Terminal:
        """An agent that is used in a terminal."""
        home = {"HOME": str(self.work)}
        return Terminal([*self.inside, *command], self.work, home | environ)


@pytest.fixture
def stage(
    namespace: tuple[str, ...], checkpoint: Path, tmp_path: Path
) -> Iterator[Callable[..., Stage]]:
    """Call it with the script, the context's length, and what a step takes at least."""
    with contextlib.ExitStack() as stack:

        def begin(script: list[dict[str, str]], context: int, step_ms: int = 0) -> Stage:
            file = tmp_path / "script.json"
            file.write_text(json.dumps(script))
            flags = ("--engine", ENGINE, "--engine-option", f"script={file}", "--aggregated")
            names = ("--served-model-name", MODEL, "--max-model-len", str(context))
            more = ("--engine-option", f"step_ms={step_ms}", "--port", str(PORT))
            server = stack.enter_context(ServerInside(namespace, checkpoint, *flags, *names, *more))
            server.wait_for_line("ready: ")
            work = tmp_path / "work"
            work.mkdir()
            return Stage(server, namespace, work)

        yield begin
