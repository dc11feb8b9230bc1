"""Tools of `/v1/responses` that are no plain functions, and what becomes of their calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from pdserve.errors import InvalidRequest
from pdserve.frontend.api.adapters.responses_tools import (
    MAX_DESCRIPTIONS,
    MAX_FUNCTIONS,
    Toolset,
    custom_input,
    toolset_of,
)
from pdserve.protocols.responses_api import RESPONSES
from tests.frontend.reasoning_frontend import PLAIN, answering, prompt

if TYPE_CHECKING:
    from tests.frontend.support import Client

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 500}
COMMAND: Any = {"type": "function", "name": "exec_command", "parameters": {"type": "object"}}
AGENTS: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [
        {"type": "function", "name": "spawn", "parameters": {"type": "object"}},
        {"type": "custom", "name": "tell"},
    ],
}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SEARCH: Any = {"type": "web_search", "external_web_access": False}


def calling(name: str, arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


async def ask(client: Client, **fields: Any) -> Any:
    status, _, answer = await client.post(PATH, ASKED | fields)
    assert status == 200, answer
    return answer


async def refused(client: Client, **fields: Any) -> Any:
    status, _, answer = await client.post(PATH, ASKED | fields)
    assert status == 400, answer
    return answer["error"]


async def test_what_a_server_would_run_is_left_out_logged_once_and_counted(caplog):
    tools = [COMMAND, AGENTS, SEARCH, {"type": "mcp", "server_label": "x"}]
    async with answering(PLAIN) as client:
        for _ in range(2):
            answer = await ask(client, tools=tools)
        counted = client.service.metrics.tools_left_out
        assert counted.labels("web_search").value == counted.labels("mcp").value == 2
    assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace"]
    assert prompt(client).startswith("[exec_command agents__spawn agents__tell ]")
    lines = [each.message for each in caplog.records if "leaving out a tool" in each.message]
    assert len(lines) == 2
    assert "web_search" in lines[0]


async def test_versions_of_hosted_types_are_counted_as_one():
    async with answering(PLAIN) as client:
        await ask(client, tools=[{"type": "web_search_preview_2025_03_11"}])
        assert client.service.metrics.tools_left_out.labels("web_search").value == 1


async def test_what_insists_on_a_hosted_tool_is_refused():
    async with answering(PLAIN) as client:
        error = await refused(client, tools=[SEARCH], tool_choice={"type": "web_search"})
        assert error["param"] == "tool_choice.type"
        assert "web_search" in error["message"]
        error = await refused(client, tools=[SEARCH], tool_choice="required")
        assert error["param"] == "tool_choice"
        assert "would run" in error["message"]
    async with answering(PLAIN, strict_api=True) as client:
        error = await refused(client, tools=[{"type": "web_search"}])
        assert error["param"] == "tools[0].type"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_namespaces_tool_has_its_own_name_and_the_namespace(stream: bool):
    text = calling("agents__spawn", {"task": "look"})
    async with answering(text) as client:
        (item,) = await output(client, stream, tools=[COMMAND, AGENTS, SEARCH])
    assert (item.type, item.name, item.namespace) == ("function_call", "spawn", "agents")
    assert json.loads(item.arguments) == {"task": "look"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_is_called_with_a_text(stream: bool):
    text = calling("apply_patch", {"input": 'line\n"two"'})
    async with answering(text) as client:
        (item,) = await output(client, stream, tools=[COMMAND, PATCH])
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", 'line\n"two"')
    assert item.call_id.startswith("call_")


async def output(client: Client, stream: bool, **fields: Any) -> Any:
    """The items of an answer, by the official client; of a stream those that were done."""
    async with openai.AsyncOpenAI(
        base_url=f"{client.url}/v1", api_key="unused", max_retries=0
    ) as api:
        if not stream:
            return (await api.responses.create(**ASKED, **fields)).output
        events = [
            event async for event in await api.responses.create(**ASKED, **fields, stream=True)
        ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [each.to_dict() for each in done] == [
        each.to_dict() for each in events[-1].response.output
    ]
    return done


async def test_the_text_of_a_custom_call_comes_as_events():
    async with answering(calling("agents__tell", {"input": "go"})) as client:
        events = [
            json.loads(e.data) for e in await client.events(PATH, ASKED | {"tools": [AGENTS]})
        ]
    told = [e for e in events if e["type"].startswith("response.custom_tool_call_input")]
    assert [(e["type"].rpartition(".")[2], e.get("delta") or e.get("input")) for e in told] == [
        ("delta", "go"),
        ("done", "go"),
    ]
    begun = next(e["item"] for e in events if e["type"] == "response.output_item.added")
    assert begun["type"] == "custom_tool_call"
    assert (begun["name"], begun["namespace"], begun["input"]) == ("tell", "agents", "")


@pytest.mark.parametrize("arguments", [{"text": "x"}, {"input": 5}])
async def test_arguments_that_are_no_text_are_told_as_the_model_wrote_them(arguments: Any):
    async with answering(calling("apply_patch", arguments)) as client:
        (item,) = await output(client, False, tools=[PATCH])
    assert json.loads(item.input) == arguments


async def test_a_custom_tools_grammar_is_shown_and_counted():
    async with answering(PLAIN) as client:
        await ask(client, tools=[PATCH])
        assert client.service.metrics.tools_left_out.labels("custom.format").value == 1


async def test_earlier_calls_of_such_tools_are_told_as_the_model_made_them():
    items = [
        {"role": "user", "content": "hello"},
        {
            "type": "function_call",
            "call_id": "c1",
            "namespace": "agents",
            "name": "spawn",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "patched"},
    ]
    async with answering(PLAIN) as client:
        await ask(client, input=items)
    said = prompt(client)
    assert "c1=agents__spawn{}" in said
    assert 'c2=apply_patch{"input": "a \\"b\\""}' in said
    assert "tool(c2):patched" in said


@pytest.mark.parametrize(
    ("choice", "seen"),
    [
        ({"mode": "auto", "tools": [{"type": "function", "name": "exec_command"}]}, "exec_command"),
        ({"mode": "auto", "tools": [{"type": "custom", "name": "tell"}]}, "agents__tell"),
        (
            {"mode": "auto", "tools": [{"type": "namespace", "name": "agents"}, SEARCH]},
            "agents__spawn agents__tell",
        ),
    ],
)
async def test_allowed_tools_are_the_only_ones(choice: Any, seen: str):
    async with answering(PLAIN) as client:
        choice = {"type": "allowed_tools"} | choice
        answer = await ask(client, tools=[COMMAND, AGENTS, SEARCH], tool_choice=choice)
    assert prompt(client).startswith(f"[{seen} ]")
    assert answer["tool_choice"]["type"] == "allowed_tools"


@pytest.mark.parametrize("name", ["agents__spawn", "spawn"])
async def test_a_namespaces_tool_can_be_chosen_by_either_name(name: str):
    async with answering(calling("agents__spawn", {})) as client:
        choice = {"type": "function", "name": name}
        await ask(client, tools=[COMMAND, AGENTS], tool_choice=choice)
        assert "agents__spawn" in client.backend.requests[-1].sampling.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [AGENTS, AGENTS]}, "tools[1].tools[0].name"),
        ({"tools": [SEARCH, COMMAND, COMMAND]}, "tools[2].name"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [AGENTS], "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice.name"),
        (
            {
                "tools": [AGENTS],
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "name": "x"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
    ],
)
async def test_a_refusal_names_the_tool_where_it_stands(fields: Any, param: str):
    async with answering(PLAIN) as client:
        assert (await refused(client, **fields))["param"] == param


async def test_more_tools_than_a_chat_may_have_are_taken():
    tools = [COMMAND | {"name": f"tool{index}"} for index in range(300)]
    async with answering(PLAIN) as client:
        await ask(client, tools=tools)
    assert "tool299" in prompt(client)


def toolset(tools: list[Any], choice: Any = None) -> Toolset:
    body = json.dumps(ASKED | {"tools": tools, "tool_choice": choice}).encode()
    return toolset_of(RESPONSES.decode(body).request, strict=False)


def test_all_functions_and_their_descriptions_are_bounded():
    """A namespace's description stands for each of its tools: a body of megabytes would come to
    terabytes."""
    with pytest.raises(InvalidRequest, match="send fewer"):
        toolset([COMMAND | {"name": f"f{n}"} for n in range(MAX_FUNCTIONS + 1)])
    members = [PATCH | {"name": f"f{n}", "description": ""} for n in range(100)]
    tools = [AGENTS | {"description": "x" * (MAX_DESCRIPTIONS // 50), "tools": members}]
    with pytest.raises(InvalidRequest, match="characters of descriptions"):
        toolset(tools)


def test_each_allowed_tool_is_looked_up_once():
    """By any of its names: quadratic work would not end before the test's time is over."""
    members = [{"type": "function", "name": f"f{n}"} for n in range(MAX_FUNCTIONS)]
    tools = [AGENTS | {"tools": members}]
    allowed = [{"type": "function", "name": "f7"}, {"type": "namespace", "name": "agents"}] * 16_000
    found = toolset(tools, {"type": "allowed_tools", "tools": allowed})
    assert len(found.functions) == MAX_FUNCTIONS


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "ls"}', "ls"),
        ('"print(1)"', "print(1)"),
        ('{"other": 1}', '{"other": 1}'),
        ("[1]", "[1]"),
        ('{"input": "l', '{"input": "l'),
    ],
)
def test_the_text_of_a_custom_tool(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text
