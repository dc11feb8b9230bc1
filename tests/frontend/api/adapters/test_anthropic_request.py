"""`/v1/messages` over a scripted model, by Anthropic's own client and by hand."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from pdserve.errors import EngineError, Overloaded
from pdserve.frontend.access.api_keys import parse_keys
from pdserve.frontend.preprocess.output_parsers import MAX_TOOLS
from tests.frontend.reasoning_frontend import (
    CALLING,
    CITIES,
    PLAIN,
    SAID,
    THINKING,
    THOUGHT,
    answering,
    prompt,
)
from tests.frontend.support import frontend, tokens
from tests.support.fake_backend import Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.frontend.support import Client

PATH = "/v1/messages"
HELLO = {"role": "user", "content": "hello"}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": [HELLO]}


@contextlib.asynccontextmanager
async def official(client: Client, **options: Any) -> AsyncIterator[Any]:
    """Its fields are looked up as they come: they are of very many types."""
    given: Any = {"api_key": "unused", "max_retries": 0} | options
    async with anthropic.AsyncAnthropic(base_url=client.url, **given) as api:
        yield api


async def ask(client: Client, **fields: Any) -> Any:
    """The answer to a request that must succeed."""
    status, _, answer = await client.post(PATH, ASKED | fields)
    assert status == 200, answer
    return answer


async def refused(client: Client, **fields: Any) -> Any:
    """The error of a request that must be refused."""
    status, _, answer = await client.post(PATH, ASKED | fields)
    assert status == 400, answer
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    return answer["error"]


# ---------------------------------------------------------------------- answers


async def test_the_official_client_reads_an_answer():
    async with answering(PLAIN) as client, official(client) as api:
        answer = await api.messages.create(**ASKED)
    assert [block.text for block in answer.content if block.type == "text"] == [PLAIN]
    assert answer.id.startswith("msg_")
    assert (answer.role, answer.model) == ("assistant", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == len(tokens(PLAIN))
    assert answer.usage.cache_read_input_tokens == 3


@pytest.mark.parametrize("burst", [1, 7])
async def test_a_stream_adds_up_to_the_whole_answer(burst):
    fields = ASKED | {"tools": [WEATHER]}
    async with answering(CALLING, burst) as client, official(client) as api:
        whole = await api.messages.create(**fields)
        async with api.messages.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[0].thinking == THOUGHT
    assert whole.content[1].text == SAID
    assert tuple(call.input for call in calls) == CITIES
    assert len({call.id for call in calls}) == 2
    assert whole.stop_reason == "tool_use"
    assert bare(streamed) == bare(whole)
    assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens


def bare(message: Any) -> Any:
    """Without what differs from answer to answer."""
    found = message.to_dict()
    del found["id"]
    found.pop("stop_details", None)
    for block in found["content"]:
        if block["type"] == "tool_use":
            del block["id"]
    return found


async def test_the_events_of_a_stream_come_in_order():
    async with answering(CALLING) as client:
        events = await client.events(PATH, ASKED | {"tools": [WEATHER]})
    data = [json.loads(event.data) for event in events]
    assert [event.event for event in events] == [each["type"] for each in data]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["usage"]["cache_read_input_tokens"] == 3
    opened = [each["index"] for each in data if each["type"] == "content_block_start"]
    closed = [each["index"] for each in data if each["type"] == "content_block_stop"]
    assert opened == closed == [0, 1, 2, 3]
    assert [each["type"] for each in data[-3:]] == [
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    signed = next(i for i, each in enumerate(data) if "signature" in each.get("delta", {}))
    assert data[signed + 1] == {"type": "content_block_stop", "index": 0}


async def test_what_stopped_the_answer_is_told():
    async with answering(PLAIN) as client:
        stopped = await ask(client, stop_sequences=["nothing", ", my"])
        cut = await ask(client, max_tokens=4)
        async with (
            official(client) as api,
            api.messages.stream(**ASKED, stop_sequences=[", my"]) as stream,
        ):
            streamed = await stream.get_final_message()
    assert stopped["content"] == [{"type": "text", "text": "Hello there"}]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ", my")
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", ", my")
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    assert cut["usage"]["output_tokens"] == 4


async def test_an_answer_that_says_nothing_is_empty():
    async with frontend(Script()) as client:
        whole = await ask(client)
        async with official(client) as api, api.messages.stream(**ASKED) as stream:
            streamed = await stream.get_final_message()
    assert whole["content"] == streamed.content == []
    assert whole["stop_reason"] == streamed.stop_reason == "end_turn"


async def test_a_call_that_is_cut_off_has_no_input():
    half = CALLING[: CALLING.index("Paris")]
    async with answering(half) as client:
        answer = await ask(client, max_tokens=len(tokens(half)), tools=[WEATHER])
    assert answer["content"][-1]["input"] == {}
    assert answer["stop_reason"] == "max_tokens"


# ---------------------------------------------------------------------- what the model is given


async def test_more_tools_than_a_chat_takes():
    tools = [WEATHER | {"name": f"f{number}"} for number in range(MAX_TOOLS + 1)]
    async with answering(PLAIN, max_model_len=1 << 16) as client:
        await ask(client, tools=tools[:MAX_TOOLS])
        assert f" f{MAX_TOOLS - 1} ]" in prompt(client)
        assert (await refused(client, tools=tools))["message"].endswith("send fewer")


async def test_a_conversation_with_tools_reaches_the_template():
    async with answering(PLAIN) as client, official(client) as api:
        first = await api.messages.create(**ASKED, tools=[WEATHER])
        assert prompt(client) == "[get_weather ]user():hello|assistant:"
        messages = [
            HELLO,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "t1", "name": "get_weather", "input": CITIES[0]},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                    {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {"role": "user", "content": "Please."},
        ]
        system = [{"type": "text", "text": "Be kind."}]
        await api.messages.create(
            model="tiny", max_tokens=9, messages=messages, system=system, tools=[WEATHER]
        )
    assert first.content[0].type == "text"
    assert prompt(client) == (
        "[get_weather ]system():Be kind.|user():hello|"
        'assistant():<think>Hm.</think>Looking.t1=get_weather{"city": "Paris"}|'
        "tool(t1):rain|user():And?\nPlease.|assistant:"
    )


async def test_an_answer_can_be_sent_again_as_it_is():
    async with answering(CALLING) as client, official(client) as api:
        first = await api.messages.create(**ASKED, tools=[WEATHER])
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
            for block in first.content
            if block.type == "tool_use"
        ]
        turns = [HELLO, {"role": "assistant", "content": first.content}]
        turns.append({"role": "user", "content": results})
        await api.messages.create(model="tiny", max_tokens=9, messages=turns, tools=[WEATHER])
    given = prompt(client)
    assert f"<think>{THOUGHT}</think>{SAID}" in given
    assert given.count("=get_weather{") == given.count(":rain|") == 2


async def test_a_last_turn_of_the_assistant_is_gone_on_with():
    async with answering(PLAIN) as client:
        await ask(client, messages=[HELLO, {"role": "assistant", "content": "Well, "}])
        assert prompt(client).rstrip() == "user():hello|assistant():Well,"
        error = await refused(
            client,
            messages=[
                HELLO,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                },
            ],
        )
    assert "tool_result" in error["message"]


@pytest.mark.parametrize(
    ("thinking", "mark", "budget"),
    [
        (None, "", None),
        ({"type": "enabled", "budget_tokens": 64}, "!", 64),
        ({"type": "adaptive"}, "!", None),
        ({"type": "disabled"}, "?", None),
    ],
)
async def test_thinking_is_asked_of_the_template(thinking, mark, budget):
    async with answering(THINKING) as client:
        answer = await ask(client, thinking=thinking)
        asked = client.backend.requests[-1].sampling.thinking
    assert prompt(client).endswith(f"assistant:{mark}")
    assert (asked and asked.budget) == budget
    shown = [block["type"] for block in answer["content"]]
    assert shown == (["text"] if mark == "?" else ["thinking", "text"])


@pytest.mark.parametrize(
    "thinking", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}]
)
async def test_thinking_that_is_not_wanted_is_not_shown(thinking):
    fields = ASKED | {"thinking": thinking, "tools": [WEATHER]}
    async with answering(CALLING) as client, official(client) as api:
        whole = await api.messages.create(**fields)
        async with api.messages.stream(**fields) as stream:
            streamed = await stream.get_final_message()
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert bare(streamed) == bare(whole)
    assert whole.usage.output_tokens_details.thinking_tokens > 0


async def test_agents_that_send_more_are_answered():
    async with answering(PLAIN) as client, official(client) as api:
        answer = await api.beta.messages.create(
            **ASKED,
            betas=["context-management-2025-06-27"],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
            metadata={"user_id": "u"},
            output_config={"effort": "high"},
        )
        edits = [{"type": "clear_tool_uses_20250919"}]
        error = await refused(client, context_management={"edits": edits})
    assert answer.content[0].text == PLAIN
    assert error["details"]["param"] == "context_management"


async def test_sampling_comes_through():
    async with answering(PLAIN) as client:
        await ask(client, temperature=0.5, top_p=0.25, top_k=7, seed=11, min_p=0.125)
        sampling = client.backend.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.seed, sampling.min_p, sampling.max_tokens) == (11, 0.125, 500)


async def test_one_call_at_a_time_can_be_asked_for():
    async with answering(CALLING) as client:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        answer = await ask(client, tools=[WEATHER], tool_choice=choice)
        none = await ask(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["stop_reason"] == "tool_use"
    assert [block["type"] for block in none["content"]] == ["thinking", "text"]


async def test_a_system_without_text_is_none():
    async with answering(PLAIN) as client:
        await ask(client)
        expected = prompt(client)
        await ask(client, system="")
        assert prompt(client) == expected
        await ask(client, system=[])
        assert prompt(client) == expected


# ---------------------------------------------------------------------- counting


async def test_tokens_are_counted_as_an_answer_reports_them():
    fields = {"messages": [HELLO], "tools": [WEATHER], "system": "Be kind.", "model": "tiny"}
    async with answering(PLAIN) as client, official(client) as api:
        counted = await api.messages.count_tokens(**fields)
        assert client.backend.requests == []
        answer = await api.messages.create(max_tokens=5, **fields)
        usage = answer.usage
        assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (32 - 3, 3)
        assert counted.input_tokens == 32 + usage.input_tokens
        assert counted.input_tokens == len(client.backend.requests[-1].prompt)
        status, _, whole = await client.post(f"{PATH}/count_tokens", ASKED | fields)
    assert (status, whole) == (200, {"input_tokens": counted.input_tokens})


# ---------------------------------------------------------------------- refusals and errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"system": [{"type": "document"}]}, "system[0].type"),
        ({"stop": ["x"]}, "stop"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER | {"name": "f\n"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_a_refusal_names_the_field_in_its_own_words(fields, param):
    async with answering(PLAIN) as client:
        error = await refused(client, **fields)
    assert error["details"]["param"] == param
    assert re.split(r"[.\[]", param)[0] in error["message"]


async def test_a_model_that_does_not_think_has_no_budget():
    async with frontend() as client:
        error = await refused(client, thinking={"type": "enabled", "budget_tokens": 64})
    assert error["details"]["param"] == "thinking.budget_tokens"
    assert "thinking_token_budget" not in error["message"]


async def test_errors_raise_the_clients_own_exceptions():
    async with answering(PLAIN) as client, official(client) as api:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await api.messages.create(**ASKED | {"model": "other"})
        with pytest.raises(anthropic.BadRequestError) as bad:
            await api.messages.create(**ASKED | {"max_tokens": -1})
    assert unknown.value.type == "not_found_error"
    assert unknown.value.error_code == "model_not_found"
    assert unknown.value.request_id == unknown.value.response.headers["x-request-id"]
    assert bad.value.type == "invalid_request_error"


async def test_a_key_may_come_by_either_header():
    keys = parse_keys(b'[[key]]\ntenant = "t"\nkey = "sk-12345678"\nmodels = ["tiny"]\n', "keys")
    async with answering(PLAIN) as client:
        client.service._api.keys = keys
        async with official(client, api_key="sk-12345678") as api:
            await api.messages.create(**ASKED)
        async with official(client, api_key=None, auth_token="sk-12345678") as api:
            await api.messages.create(**ASKED)
        async with official(client, api_key="sk-wrong-key") as api:
            with pytest.raises(anthropic.AuthenticationError) as wrong:
                await api.messages.create(**ASKED)
    assert wrong.value.type == "authentication_error"


async def test_an_overloaded_server_is_tried_again():
    scripts = [Script(refuse=Overloaded("full", retry_after=0.01)), Script(tokens=tokens(PLAIN))]
    async with (
        frontend(lambda request: scripts.pop(0)) as client,
        official(client, max_retries=1) as api,
    ):
        answer = await api.messages.create(**ASKED | {"max_tokens": 5})
    assert answer.usage.output_tokens == 5
    assert scripts == []


async def test_a_stream_that_fails_says_so():
    script = Script(tokens=tokens(PLAIN), fail=EngineError("it broke"), fail_after=4)
    async with frontend(script) as client:
        events = await client.events(PATH, ASKED)
        async with official(client) as api:
            with pytest.raises(anthropic.APIStatusError) as failed:
                async with api.messages.stream(**ASKED) as stream:
                    await stream.get_final_message()
    assert events[-1].event == "error"
    assert failed.value.type == "api_error"
    assert "it broke" in str(failed.value)


async def test_other_methods_and_paths_speak_the_same_words():
    async with answering(PLAIN) as client:
        wrong_method = json.loads((await client.get(PATH))[2])
        wrong_path = (await client.post(f"{PATH}/batches", {}))[2]
    assert wrong_method["error"]["type"] == "invalid_request_error"
    assert wrong_path["error"]["type"] == "not_found_error"


async def test_the_form_of_the_answer_is_refused_where_it_was_sent():
    wrong = {"type": "json_schema", "schema": {"properties": {"a": {"type": "nope"}}}}
    both = {"format": wrong, "effort": "low"}
    async with answering(PLAIN) as client:
        for fields, place in (
            ({"output_format": wrong}, "output_format.schema.properties.a"),
            ({"output_config": both}, "output_config.format.schema.properties.a"),
        ):
            error = await refused(client, **fields)
            assert error["details"]["param"] == place
            assert f"'{place}'" in error["message"]


async def test_strangers_are_reported_and_strictly_refused():
    fields = {"temprature": 1, "metadata": {"user_id": "u"}, "service_tier": "auto"}
    async with answering(PLAIN, strict_api=True) as client:
        error = await refused(client, **fields)
        await ask(client, metadata={"user_id": "u"}, service_tier="auto", cache_control={})
    assert "'temperature'" in error["message"]


# ---------------------------------------------------------------------- how long a prompt is kept


def marked(ttl: str | None = None) -> dict[str, Any]:
    control = {"type": "ephemeral"} | ({} if ttl is None else {"ttl": ttl})
    return {"type": "text", "text": "Be kind.", "cache_control": control}


CALL = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [marked("1h")]}
CALLED = [
    HELLO,
    {"role": "assistant", "content": [CALL]},
    {"role": "user", "content": [RESULT]},
]


@pytest.mark.parametrize(
    ("fields", "ttl"),
    [
        ({}, 0.0),
        ({"cache_control": {}}, 0.0),
        ({"cache_control": {"type": "ephemeral"}}, 300.0),
        ({"cache_control": {"type": "ephemeral", "ttl": 5}}, 300.0),
        ({"cache_control": {"type": "ephemeral", "ttl": ["1h"]}}, 300.0),
        ({"system": [marked()]}, 300.0),
        ({"system": [marked("1h")], "messages": [HELLO | {"content": [marked("5m")]}]}, 3600.0),
        ({"tools": [WEATHER | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, 3600.0),
        ({"messages": CALLED}, 3600.0),
        ({"system": [marked("1h")], "cache_ttl": 7}, 7.0),
        ({"system": [marked("1h")], "cache_scope": "never"}, 0.0),
    ],
)
async def test_the_longest_mark_keeps_the_prompt(fields: dict[str, Any], ttl: float):
    async with answering(PLAIN) as client:
        await ask(client, **fields)
        (request,) = client.backend.requests
    assert request.cache_ttl == ttl
    assert request.cache_scope == fields.get("cache_scope", "")


# ---------------------------------------------------------------------- a context that runs over


@pytest.mark.parametrize("stream", [False, True])
async def test_more_output_than_fits_is_cut_and_says_so(stream: bool):
    asked = ASKED | {"max_tokens": 32_000}
    async with answering("word " * 50, max_model_len=60) as client:
        if stream:
            events = [json.loads(event.data) for event in await client.events(PATH, asked)]
            last = next(event for event in events if event["type"] == "message_delta")
            reason, usage = last["delta"]["stop_reason"], last["usage"]
        else:
            answer = await ask(client, max_tokens=32_000)
            reason, usage = answer["stop_reason"], answer["usage"]
        used = sum(count for name, count in usage.items() if name.endswith("put_tokens"))
    assert (reason, used) == ("model_context_window_exceeded", 60)


async def test_an_end_that_was_asked_for_is_no_end_of_the_context():
    async with answering("word " * 50, max_model_len=60) as client:
        assert (await ask(client, max_tokens=5))["stop_reason"] == "max_tokens"
    async with answering("word") as client:
        assert (await ask(client, max_tokens=32_000))["stop_reason"] == "end_turn"


async def test_errors_of_the_context_are_worded_as_agents_look_for_them():
    long = [{"role": "user", "content": "hello " * 99}]
    async with answering(PLAIN, max_model_len=60) as client:
        error = await refused(client, messages=long)
        assert error["type"] == "invalid_request_error"
        assert error["details"]["error_code"] == "context_length_exceeded"
        found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert found
        assert int(found[1]) > int(found[2]) == 59
        very_long = [{"role": "user", "content": "hello " * 9999}]
        error = await refused(client, messages=very_long)
        assert error["message"].startswith("prompt is too long: ")
    async with answering(PLAIN, max_model_len=60, strict_api=True) as client:
        error = await refused(client, max_tokens=55)
    sentence = r"input length and `max_tokens` exceed context limit: (\d+) \+ 55 > 60"
    assert re.match(sentence, error["message"])
    assert error["details"]["param"] == "max_tokens"
