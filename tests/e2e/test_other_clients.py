"""Anthropic's official client, and OpenAI's for responses, against real processes.

The model is a random one: that it calls anything is the grammar's doing. Servers compute prompts
where they decode, or elsewhere, and want an API key.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

from tests.e2e.openai_client import client_of
from tests.e2e.server import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = "sk-other-clients"
FLAGS = ("--served-model-name", "tiny", "--threads", "1")
MODES = {"aggregated": ("--aggregated",), "disaggregated": ("--disagg", "always")}
ASK = "What is the weather like?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CITIES = ({"city": "Rome"}, {"city": "Oslo"})
LITTLE = 4
"""Tokens of thinking, if it thinks: a random model would go on for ever."""
THINKS = {"chat_template_kwargs": {"thinks": True}}


@pytest.fixture(scope="module", params=MODES)
def server(
    request: pytest.FixtureRequest, tool_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'[[key]]\ntenant = "tests"\nkey = "{KEY}"\n')
    keys.chmod(0o600)
    flags = (*FLAGS, "--api-keys-file", str(keys), *MODES[request.param])
    with serving(tool_model, *flags) as server:
        yield server


def claude(server: Server, key: str = KEY) -> Any:
    return anthropic.Anthropic(
        base_url=server.url, api_key=key, max_retries=0, default_headers={"Connection": "close"}
    )


def gpt(server: Server, key: str = KEY) -> Any:
    return client_of(server.url, key)


def only(parts: Any, kind: str) -> Any:
    """The one part of this type."""
    (found,) = (part for part in parts if part.type == kind)
    return found


# ---------------------------------------------------------------------- /v1/messages


CLAUDE_TOOL: Any = {"name": "weather", "strict": True, "input_schema": SCHEMA}


def message(**more: Any) -> dict[str, Any]:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": ASK}]}
    extra = {"seed": 3, "temperature": 1.0} | more.pop("extra_body", {})
    little = {"type": "enabled", "budget_tokens": LITTLE}
    return fields | {"max_tokens": 12, "thinking": little, "extra_body": extra} | more


def test_a_streamed_message_adds_up_to_the_whole(server: Server) -> None:
    with claude(server) as api:
        whole = api.messages.create(**message())
        with api.messages.stream(**message()) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
    assert only(whole.content, "text").text == only(streamed.content, "text").text == text
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 12


def test_tokens_are_counted_as_a_message_reports_them(server: Server) -> None:
    fields = {"system": "Be kind.", "tools": [CLAUDE_TOOL]}
    with claude(server) as api:
        asked = message(**fields)
        del asked["max_tokens"]
        counted = api.messages.count_tokens(**asked)
        usage = api.messages.create(**message(**fields)).usage
    assert counted.input_tokens == prompt_tokens(usage)


def test_thinking_is_told_apart(server: Server) -> None:
    asked = message(extra_body=THINKS, thinking={"type": "adaptive"})
    with claude(server) as api:
        whole = api.messages.create(**asked)
        with api.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    (block,) = whole.content
    assert block.type == "thinking"
    assert block.thinking == streamed.content[0].thinking != ""
    assert block.signature == streamed.content[0].signature
    assert whole.usage.output_tokens_details.thinking_tokens == 12


def test_a_tool_that_has_to_be_used_is_used_and_answered(server: Server) -> None:
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    asked = message(tools=[CLAUDE_TOOL], tool_choice=choice, max_tokens=200)
    with claude(server) as api:
        whole = api.messages.create(**asked)
        with api.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        call = only(whole.content, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "fine"}
        turns = [
            *asked["messages"],
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result]},
        ]
        last = api.messages.create(**message(messages=turns, tools=[CLAUDE_TOOL]))
    assert (call.type, call.name) == ("tool_use", "weather")
    assert call.input in CITIES
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert only(streamed.content, "tool_use").input == call.input
    assert prompt_tokens(last.usage) > prompt_tokens(whole.usage)


def test_a_message_can_have_a_form(server: Server) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    with claude(server) as api:
        answer = api.messages.create(**message(output_config=config, max_tokens=200))
    assert json.loads(only(answer.content, "text").text) in CITIES


def test_errors_raise_anthropics_exceptions(server: Server) -> None:
    with claude(server) as api:
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            api.messages.create(**message(model="claude"))
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* tokens > "):
            api.messages.create(**message(system="word " * 20_000))
    with claude(server, "sk-unknown") as api, pytest.raises(anthropic.AuthenticationError):
        api.messages.create(**message())


def prompt_tokens(usage: Any) -> int:
    cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    return int(usage.input_tokens + cached)


# ---------------------------------------------------------------------- /v1/responses


GPT_TOOL: Any = {"type": "function", "name": "weather", "strict": True, "parameters": SCHEMA}


def response(**more: Any) -> dict[str, Any]:
    extra = {"seed": 3, "thinking_token_budget": LITTLE} | more.pop("extra_body", {})
    fields = {"model": "tiny", "input": ASK, "max_output_tokens": 12, "temperature": 1.0}
    return fields | {"extra_body": extra} | more


def test_a_streamed_response_adds_up_to_the_whole(server: Server) -> None:
    with gpt(server) as api:
        whole = api.responses.create(**response())
        with api.responses.create(**response(), stream=True) as stream:
            events = list(stream)
    told = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert whole.output_text == told != ""
    assert (whole.status, events[-1].type) == ("incomplete", "response.incomplete")
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage.output_tokens == whole.usage.output_tokens == 12


def test_reasoning_is_told_apart(server: Server) -> None:
    with gpt(server) as api:
        answer = api.responses.create(
            **response(extra_body=THINKS | {"thinking_token_budget": None})
        )
    (item,) = answer.output
    assert item.type == "reasoning"
    assert item.content[0].text
    assert answer.usage.output_tokens_details.reasoning_tokens == 12


def test_a_function_that_has_to_be_called_is_called_and_answered(server: Server) -> None:
    choice = {"type": "function", "name": "weather"}
    asked = response(
        tools=[GPT_TOOL], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200
    )
    with gpt(server) as api:
        whole = api.responses.create(**asked)
        with api.responses.stream(**asked) as stream:
            streamed = stream.get_final_response()
        call = only(whole.output, "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
        items = [{"role": "user", "content": ASK}, *whole.output, result]
        last = api.responses.create(**response(input=items, tools=[GPT_TOOL]))
    assert (call.type, call.name) == ("function_call", "weather")
    again = only(streamed.output, "function_call")
    assert again.arguments == call.arguments
    assert again.parsed_arguments in CITIES
    assert last.usage.input_tokens > whole.usage.input_tokens


def test_a_response_can_have_a_form(server: Server) -> None:
    form = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
    with gpt(server) as api:
        asked = response(text={"format": form}, max_output_tokens=200)
        answer = api.responses.create(**asked)
    assert json.loads(answer.output_text) in CITIES


def test_errors_raise_openais_exceptions(server: Server) -> None:
    with gpt(server) as api:
        with pytest.raises(openai.NotFoundError, match="not served here"):
            api.responses.create(**response(model="gpt"))
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            api.responses.create(**response(previous_response_id="resp_1"))
        with pytest.raises(openai.NotFoundError, match="not stored"):
            api.responses.retrieve("resp_1")
    with gpt(server, "sk-unknown") as api, pytest.raises(openai.AuthenticationError):
        api.responses.create(**response())
