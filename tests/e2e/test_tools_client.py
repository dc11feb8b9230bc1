"""Calls of tools and reasoning, by the official client against real processes.

The model is a random one: that it calls anything is the grammar's doing. Servers compute prompts
where they decode, or elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.openai_client import client_of
from tests.e2e.server import PATIENCE, Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

ASK = [{"role": "user", "content": "What is the weather like?"}]
FLAGS = ("--served-model-name", "tiny", "--threads", "1")
MODES = {"aggregated": ("--aggregated",), "disaggregated": ("--disagg", "always")}
EXAMPLE = Path(__file__).parents[2] / "examples" / "tools.py"


def tool(name: str, key: str, *values: object) -> Any:
    """A strict function of one argument, whose value is among these."""
    schema = {
        "type": "object",
        "properties": {key: {"enum": list(values)}},
        "required": [key],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}


WEATHER = tool("weather", "city", "Rome", "Oslo")
CLOCK = tool("clock", "zone", 0, 1, 2)
TOOLS = [WEATHER, CLOCK]
ALLOWED: dict[str, tuple[str, set[object]]] = {
    "weather": ("city", {"Rome", "Oslo"}),
    "clock": ("zone", {0, 1, 2}),
}


@pytest.fixture(scope="module", params=MODES)
def server(request: pytest.FixtureRequest, tool_model: Path) -> Iterator[Server]:
    with serving(tool_model, *FLAGS, *MODES[request.param]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server.url) as client:
        yield client


def fields(**more: Any) -> dict[str, Any]:
    """A question. A random model would think, and call, for ever: it thinks a few tokens, if it
    does, and calls once."""
    return {
        "model": "tiny",
        "messages": ASK,
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 3,
        "extra_body": {"thinking_token_budget": 4},
    } | more


def check_call(name: str, arguments: str) -> None:
    """It is one that the tools allow."""
    key, values = ALLOWED[name]
    given = json.loads(arguments)
    assert list(given) == [key]
    assert given[key] in values


@pytest.mark.parametrize("choice", ["required", "clock"])
def test_a_call_that_has_to_be_made_is_made(client: Any, choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}}
    wanted = choice if choice == "required" else named
    answer = client.chat.completions.create(**fields(tool_choice=wanted, n=2))
    for one in answer.choices:
        assert one.finish_reason == "tool_calls"
        assert one.message.content is None
        for call in one.message.tool_calls:
            check_call(call.function.name, call.function.arguments)
            assert choice in ("required", call.function.name)
            assert call.type == "function"
            assert call.id


def test_a_stream_tells_the_same_calls(client: Any) -> None:
    asked = fields(tool_choice="required")
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion()
    expected, found = whole.choices[0], answer.choices[0]
    assert found.finish_reason == expected.finish_reason == "tool_calls"
    assert found.message.content is None
    assert [_plain(call) for call in found.message.tool_calls] == [
        _plain(call) for call in expected.message.tool_calls
    ]
    assert "tool_calls.function.arguments.done" in kinds


def _plain(call: Any) -> tuple[str, str]:
    return call.function.name, call.function.arguments


def test_several_calls_are_made_where_they_may_be(client: Any) -> None:
    asked = fields(tool_choice="required", parallel_tool_calls=True, n=6, max_tokens=120)
    choices = client.chat.completions.create(**asked).choices
    assert any(len(choice.message.tool_calls) > 1 for choice in choices)
    for choice in choices:
        assert choice.finish_reason in ("tool_calls", "length")
        *whole, last = choice.message.tool_calls
        for call in whole if choice.finish_reason == "length" else [*whole, last]:
            check_call(call.function.name, call.function.arguments)


def test_a_result_is_sent_back(client: Any) -> None:
    first = client.chat.completions.create(**fields(tool_choice="required"))
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls
    ]
    messages = [*ASK, message.model_dump(exclude_none=True), *results]
    second = client.chat.completions.create(**fields(messages=messages, max_tokens=8))
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_without_a_choice_the_model_says_what_it_likes(client: Any) -> None:
    answer = client.chat.completions.create(**fields(tool_choice="none", max_tokens=12))
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_reasoning_is_told_apart(client: Any) -> None:
    asked = fields(max_tokens=12, extra_body={"chat_template_kwargs": {"thinks": True}})
    answer = client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.message.reasoning == choice.message.reasoning_content
    assert choice.message.reasoning
    assert choice.message.content == ""
    assert answer.usage.completion_tokens_details.reasoning_tokens == 12
    told = [
        chunk.choices[0].delta.reasoning or ""
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices
    ]
    assert "".join(told) == choice.message.reasoning


def test_reasoning_ends_at_its_budget_and_a_call_follows(client: Any) -> None:
    extra = {"chat_template_kwargs": {"thinks": True}, "thinking_token_budget": 9}
    asked = fields(tool_choice="required", extra_body=extra)
    answer = client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        check_call(call.function.name, call.function.arguments)
    assert choice.message.reasoning
    assert 9 <= answer.usage.completion_tokens_details.reasoning_tokens <= 12


def test_a_tool_that_is_not_there_is_refused_by_name(client: Any) -> None:
    named = {"type": "function", "function": {"name": "radio"}}
    with pytest.raises(openai.BadRequestError, match="not among") as refused:
        client.chat.completions.create(**fields(tool_choice=named))
    assert refused.value.param == "tool_choice.function.name"


@pytest.mark.parametrize("server", ["disaggregated"], indirect=True)
def test_the_example_runs(server: Server) -> None:
    flags = ("--first", "required", "--thoughts", "4", "--max-tokens", "100")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--url", server.url, *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("temperature(city=")
