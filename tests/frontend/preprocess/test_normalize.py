"""Older and rarer forms of a chat are the usual one to everything behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frontend.reasoning_frontend import PLAIN, answering, prompt

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("a"), tool("b"), tool("c")]


async def ask(client: Any, status: int = 200, **fields: Any) -> Any:
    found, _, answer = await client.post(CHAT, ASKED | fields)
    assert found == status, answer
    return answer


def allowed(mode: str, *names: str) -> Any:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_a_refusal_is_what_the_assistant_said():
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Sing."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "Why?"},
    ]
    async with answering(PLAIN) as client:
        await ask(client, messages=turns)
        assert prompt(client) == "user():Sing.|assistant():No.|user():Why?|assistant:"
        turns[0]["content"] = turns[1]["content"]
        error = (await ask(client, 400, messages=turns))["error"]
        assert error["param"] == "messages[0].content[0].type"


async def test_calls_and_results_may_have_their_older_form():
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "4"},
    ]
    async with answering(PLAIN) as client:
        await ask(client, messages=turns)
        said = prompt(client)
        assert "=f{}" in said
        assert said.endswith("tool():4|assistant:")
        status, _, counted = await client.post("/tokenize", {"messages": turns})
    assert status == 200
    assert counted["count"] == len(client.backend.requests[-1].prompt)


@pytest.mark.parametrize(("mode", "enforced"), [("auto", False), ("required", True)])
async def test_allowed_tools_are_the_only_ones(mode: str, enforced: bool):
    async with answering(PLAIN) as client:
        await ask(client, tools=TOOLS, tool_choice=allowed(mode, "c", "a"))
        assert prompt(client).startswith("[a c ]")
        grammar = client.backend.requests[-1].sampling.grammar
    assert bool(grammar) == enforced


async def test_a_refusal_names_the_tool_where_it_was_sent():
    wrong = tool("c")
    wrong["function"]["parameters"] = {"$ref": "#/nowhere"}
    async with answering(PLAIN) as client:
        choice = allowed("required", "c")
        answer = await ask(client, 400, tools=[tool("a"), wrong], tool_choice=choice)
        assert answer["error"]["param"].startswith("tools[1].function.parameters")
        answer = await ask(client, 400, tools=TOOLS, tool_choice=allowed("auto", "a", "x"))
    assert answer["error"]["param"] == "tool_choice.allowed_tools.tools[1].function.name"


async def test_verbosity_is_a_hint_for_the_template():
    async with answering(PLAIN, chat_template="{{ verbosity }}") as client:
        await ask(client, verbosity="low")
        assert prompt(client) == "low"
        status, _, _ = await client.post(
            "/v1/responses", {"input": "x", "text": {"verbosity": "high"}}
        )
        assert status == 200
        assert prompt(client) == "high"


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
async def test_a_schema_needs_no_name(kind: str):
    schema = {"type": "object", "properties": {"tallness": {"type": "integer"}}}
    async with answering(PLAIN) as client:
        await ask(client, response_format={"type": kind, "schema": schema})
        assert "tallness" in json.dumps(client.backend.requests[-1].sampling.grammar)
        answer = await ask(client, 400, response_format={"type": "text", "schema": schema})
        assert answer["error"]["param"] == "response_format.schema"
