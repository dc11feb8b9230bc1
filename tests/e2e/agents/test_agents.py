"""Coding agents that people use, unchanged, against a real server: Claude Code and Codex.

Each goes through a whole tool loop, and through a conversation that outgrows the model's context:
it must understand the error, and go on where it can. Each is interrupted in the middle of an
answer, which must free all that its request holds. The model is a script; frontend, templates,
parsers and streams are the product's.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.agents.conftest import Stage, program
from tests.e2e.agents.scene import finished
from tests.e2e.agents.terminal import ESCAPE, Terminal
from tests.e2e.clients.snippets import environ, snippet

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SUMMARY = "THE-SUMMARY"
PLENTY = 120_000
"""Tokens: more than an agent's prompts, at about two bytes a token, and its answers."""
FIRST = {"claude": 60_000, "codex": 20_000}
"""Enough for an agent's first prompt and not for the output of `LONG` besides."""
LONG = "seq 1 5000"
IDLE = "Nothing to do."
PROMPT = "PLEASE use the tool"
STORY = "la " * 10_000
"""An answer of some twenty seconds, at `STEP_MS`."""
STEP_MS = 2


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def script(tool: str) -> list[dict[str, str]]:
    """Call the tool; sum up when asked; say what was seen."""
    return [
        {"if": SUMMARY, "say": "Done after the summary."},
        {"if": "TEXT ONLY|detailed summary|CHECKPOINT COMPACTION", "say": f"{SUMMARY}: counted."},
        {"if": "<tool_response>", "say": "The tool has answered."},
        {"if": "PLEASE", "say": f"I use a tool.\n{tool}"},
        {"if": "STORY", "say": STORY},
        {"if": ".", "say": IDLE},
    ]


CLAUDE = environ("Claude Code") | {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "IS_SANDBOX": "1",
}


def start_claude(stage: Stage, prompt: str) -> subprocess.Popen[str]:
    return stage.agent(
        *(str(program("claude")), "-p", prompt),
        *("--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"),
        **CLAUDE,
    )


def configure_codex(stage: Stage, more: str = "") -> None:
    """Write the page's configuration without the context's length."""
    config = snippet("Codex", "toml")
    length = next(line for line in config.splitlines() if line.startswith("model_context_window"))
    (stage.work / "config.toml").write_text(config.replace(length, "") + more)


def start_codex(stage: Stage, prompt: str, *more: str) -> subprocess.Popen[str]:
    configure_codex(stage)
    retries = [f"model_providers.pdserve.{kind}_max_retries=0" for kind in ("request", "stream")]
    return stage.agent(
        *(str(program("codex")), "exec", "--json", "--skip-git-repo-check"),
        "--dangerously-bypass-approvals-and-sandbox",
        *(word for option in retries for word in ("-c", option)),
        *(*more, prompt),
        CODEX_HOME=str(stage.work),
        **environ("Codex"),
    )


def claude_terminal(stage: Stage) -> Terminal:
    """Claude Code, which was used before in this folder."""
    known = {str(stage.work): {"hasTrustDialogAccepted": True}}
    key = {"approved": [CLAUDE["ANTHROPIC_API_KEY"]], "rejected": []}
    settings = {"hasCompletedOnboarding": True, "theme": "dark", "projects": known}
    settings |= {"customApiKeyResponses": key}
    (stage.work / ".claude.json").write_text(json.dumps(settings))
    return stage.terminal(str(program("claude")), **CLAUDE)


def codex_terminal(stage: Stage) -> Terminal:
    """Codex, which was used before in this folder."""
    configure_codex(stage, f'\n[projects."{stage.work}"]\ntrust_level = "trusted"\n')
    return stage.terminal(str(program("codex")), CODEX_HOME=str(stage.work), **environ("Codex"))


def events(said: str) -> list[dict[str, Any]]:
    """An agent's own events."""
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def claude(stage: Stage) -> list[dict[str, Any]]:
    return events(finished(start_claude(stage, PROMPT)))


def codex(stage: Stage, *more: str) -> list[dict[str, Any]]:
    return events(finished(start_codex(stage, PROMPT, *more)))


def items(told: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Codex' completed items of a kind."""
    found = (one["item"] for one in told if one["type"] == "item.completed")
    return [item for item in found if item["type"] == kind]


def test_claude_code_calls_a_tool_and_reads_its_result(stage: Callable[..., Stage]) -> None:
    program("claude")
    acting = stage(script(call("Write", file_path="hello.txt", content="from the actor")), PLENTY)
    *_, result = claude(acting)
    assert (result["subtype"], result["result"]) == ("success", "The tool has answered.")
    assert (acting.work / "hello.txt").read_text() == "from the actor"
    assert result["num_turns"] == 2


def test_claude_code_sums_up_a_conversation_that_outgrew_the_context(
    stage: Callable[..., Stage],
) -> None:
    program("claude")
    told = claude(stage(script(call("Bash", command=LONG, description="x")), FIRST["claude"]))
    assert "compact_boundary" in [event.get("subtype") for event in told]
    assert told[-1]["result"] == "Done after the summary."


def test_claude_code_knows_a_first_prompt_that_is_too_long(stage: Callable[..., Stage]) -> None:
    program("claude")
    *_, result = claude(stage(script(""), FIRST["claude"] // 3))
    assert result["terminal_reason"] == "prompt_too_long"


def test_codex_runs_a_command_and_reads_its_output(stage: Callable[..., Stage]) -> None:
    program("codex")
    acting = stage(script(call("exec_command", cmd="echo from the actor > hello.txt")), PLENTY)
    told = codex(acting)
    assert told[-1]["type"] == "turn.completed", told
    assert items(told, "command_execution")[0]["exit_code"] == 0
    assert items(told, "agent_message")[-1]["text"] == "The tool has answered."
    assert (acting.work / "hello.txt").read_text() == "from the actor\n"


def test_codex_knows_that_a_context_is_full(stage: Callable[..., Stage]) -> None:
    program("codex")
    told = codex(stage(script(call("exec_command", cmd=LONG)), FIRST["codex"]))
    assert told[-1]["type"] == "turn.failed"
    assert "ran out of room in the model's context window" in told[-1]["error"]["message"]


def test_codex_sums_up_when_it_knows_the_context(stage: Callable[..., Stage]) -> None:
    program("codex")
    acting = stage(script(call("exec_command", cmd=LONG)), FIRST["codex"])
    told = codex(acting, "-c", f"model_context_window={FIRST['codex']}")
    assert told[-1]["type"] == "turn.completed", told
    assert items(told, "agent_message")[-1]["text"] == "Done after the summary."


@pytest.mark.parametrize(("name", "start"), [("claude", start_claude), ("codex", start_codex)])
def test_an_agent_that_is_interrupted_frees_its_request(
    stage: Callable[..., Stage], name: str, start: Callable[[Stage, str], subprocess.Popen[str]]
) -> None:
    program(name)
    acting = stage(script(""), PLENTY, STEP_MS)
    said = acting.interrupt_in_the_answer(start(acting, "STORY, please"))
    assert STORY not in said
    acting.wait_until_free(1)
    assert acting.tokens < len(STORY.split())
    assert acting.chat("anything") == IDLE


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "begin", "ready"),
    [("claude", claude_terminal, "❯"), ("codex", codex_terminal, "Ask Codex")],
)
def test_escape_in_a_terminal_frees_the_request_and_the_agent_goes_on(
    stage: Callable[..., Stage], name: str, begin: Callable[[Stage], Terminal], ready: str
) -> None:
    """The agent's process lives on: it has to hang up by itself. Codex asks for a title besides."""
    program(name)
    said = [
        {"if": "single-line task title", "say": "Tell a story"},
        {"if": "once more", "say": "Thereafter."},
    ]
    acting = stage([*said, *script("")], PLENTY, STEP_MS)
    with begin(acting) as terminal:
        terminal.wait_for(ready)
        terminal.enter("STORY, please")
        acting.wait_for_answer(lambda: terminal.runs)
        terminal.type(ESCAPE)
        terminal.wait_for("nterrupted")
        acting.wait_until_free(1)
        assert acting.tokens < len(STORY.split())
        terminal.enter("Tell it once more")
        terminal.wait_for("Thereafter")
