"""OpenCode and Aider, unchanged, against a real server, connected as docs/clients.md says.

Each goes through a loop (of a tool, or of an edit whose check fails), meets a context that is full,
and is interrupted in the middle of an answer. A run that draws one of them plays one of its scenes,
because they take seconds to start; without a time budget all are played.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.agents.conftest import AGENTS, unable
from tests.e2e.agents.scene import Scene, finished
from tests.e2e.clients.conftest import ANSWER, ENVIRONMENTS
from tests.e2e.clients.draw import scene_of
from tests.e2e.clients.snippets import environ, snippet

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ALONE = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "AIDER_ANALYTICS": "false",
    "AIDER_CHECK_UPDATE": "false",
    "AIDER_SHOW_RELEASE_NOTES": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""There is no network to ask for updates."""
CHECK = "grep -q second hello.txt || { echo NOT-YET; exit 1; }"


# ---------------------------------------------------------------------- OpenCode


def opencode(scene: Scene, work: Path, prompt: str) -> subprocess.Popen[str]:
    """OpenCode at work on a prompt."""
    found = sorted(AGENTS.glob("opencode-linux-*/bin/opencode"))
    if not found:
        unable("opencode is not installed: see .ci/agents.sh")
    (work / "opencode.json").write_text(snippet("OpenCode", "json"))
    return scene.start([str(found[-1]), "run", "--format", "json", prompt], work, ALONE)


def events(running: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What OpenCode told until its end."""
    said = finished(running)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert found, said
    return found


def opencode_runs_a_command(scene: Scene, work: Path) -> None:
    told = events(opencode(scene, work, "RUN-IT, please"))
    (used,) = [event["part"] for event in told if event["type"] == "tool_use"]
    assert (used["tool"], used["state"]["status"]) == ("bash", "completed")
    assert (work / "proof").read_text() == "told\n"
    assert texts(told)[-1] == ANSWER


def opencode_sums_up_when_the_context_is_full(scene: Scene, work: Path) -> None:
    told = events(opencode(scene, work, "FILL-IT, please"))
    (error,) = [event["error"] for event in told if event["type"] == "error"]
    assert error["name"] == "ContextOverflowError"
    assert any(
        "compaction_continue" in event["part"].get("metadata", {})
        for event in told[-8:]
        if "part" in event
    )
    assert texts(told)[-1] == "Done after the summary."


def opencode_is_interrupted(scene: Scene, work: Path) -> None:
    before = scene.cancelled
    scene.interrupt_in_the_answer(opencode(scene, work, "STORY, please"))
    # It asks for a title at the same time, which may be cut off as well.
    scene.wait_until_free(before + 1)


def texts(told: list[dict[str, Any]]) -> list[str]:
    return [event["part"]["text"] for event in told if event["type"] == "text"]


OPENCODE = {
    "a command is run": opencode_runs_a_command,
    "the context is full": opencode_sums_up_when_the_context_is_full,
    "it is interrupted": opencode_is_interrupted,
}


@pytest.mark.parametrize("what", scene_of("OpenCode", OPENCODE))
def test_opencode(scene: Scene, tmp_path: Path, what: str) -> None:
    OPENCODE[what](scene, tmp_path)


# ---------------------------------------------------------------------- Aider


def aider(scene: Scene, work: Path, message: str, *flags: str) -> subprocess.Popen[str]:
    """Aider at work on a message."""
    program = ENVIRONMENTS / "aider" / "bin" / "aider"
    if not program.exists():
        unable("aider is not installed: see .ci/agents.sh")
    (work / "hello.txt").write_text("zero\n")
    usual = ("--no-git", "--yes-always", "--edit-format", "whole", "--no-show-model-warnings")
    command = [str(program), *usual, *flags, "--message", message, "hello.txt"]
    return scene.start(command, work, ALONE | environ("Aider"))


def aider_edits_until_the_check_passes(scene: Scene, work: Path) -> None:
    running = aider(scene, work, "EDIT-IT, please", "--auto-test", "--test-cmd", CHECK)
    said = finished(running)
    assert said.count("Applied edit to hello.txt") == 2, said
    assert (work / "hello.txt").read_text() == "first\nsecond\n"


def aider_knows_that_a_context_is_full(scene: Scene, work: Path) -> None:
    (work / "long.txt").write_text("much " * 30_000)
    running = aider(scene, work, "EDIT-IT, please", "--read", "long.txt")
    said = finished(running)
    assert "has hit a token limit" in said, said
    assert (work / "hello.txt").read_text() == "zero\n"


def aider_is_interrupted(scene: Scene, work: Path) -> None:
    before = scene.cancelled
    scene.interrupt_in_the_answer(aider(scene, work, "STORY, please"))
    scene.wait_until_free(before + 1)


AIDER = {
    "a check passes": aider_edits_until_the_check_passes,
    "the context is full": aider_knows_that_a_context_is_full,
    "it is interrupted": aider_is_interrupted,
}


@pytest.mark.parametrize("what", scene_of("Aider", AIDER))
def test_aider(scene: Scene, tmp_path: Path, what: str) -> None:
    AIDER[what](scene, tmp_path)
