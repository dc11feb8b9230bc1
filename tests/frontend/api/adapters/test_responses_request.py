"""`/v1/responses` over a scripted model, by OpenAI's own client and by hand."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from pdserve.errors import EngineError
from pdserve.frontend.api.adapters import responses_request
from pdserve.frontend.api.adapters.responses_request import chat_request
from pdserve.frontend.api.adapters.responses_tools import toolset_of
from pdserve.protocols.responses_api import RESPONSES
from tests.frontend.reasoning_frontend import (
    CALLING,
    CITIES,
    PLAIN,
    SAID,
    THOUGHT,
    answering,
    prompt,
)
from tests.frontend.support import frontend, tokens
from tests.support.fake_backend import Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.frontend.support import Client

PATH = "/v1/responses"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
ASKED: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 500}


@contextlib.asynccontextmanager
async def official(client: Client) -> AsyncIterator[Any]:
    """Its fields are looked up as they come: they are of very many types."""
    async with openai.AsyncOpenAI(
        base_url=f"{client.url}/v1", api_key="unused", max_retries=0
    ) as api:
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
    return answer["error"]


# ---------------------------------------------------------------------- answers


async def test_the_official_client_reads_an_answer():
    async with answering(PLAIN) as client, official(client) as api:
        answer = await api.responses.create(
            **ASKED, metadata={"a": "b"}, temperature=0.5, instructions="Be kind.", store=True
        )
    assert answer.output_text == PLAIN
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.model, answer.error) == ("completed", "tiny", None)
    assert (answer.metadata, answer.temperature, answer.top_p) == ({"a": "b"}, 0.5, 1.0)
    assert (answer.instructions, answer.tool_choice, answer.tools) == ("Be kind.", "auto", [])
    assert answer.usage.output_tokens == len(tokens(PLAIN))
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.to_dict()["store"] is False
    assert prompt(client) == "system():Be kind.|user():hello|assistant:"


async def test_instructions_without_text_are_none():
    async with answering(PLAIN) as client:
        await ask(client, instructions="")
    assert prompt(client) == "user():hello|assistant:"


@pytest.mark.parametrize("burst", [1, 7])
async def test_a_stream_adds_up_to_the_whole_answer(burst):
    fields = ASKED | {"tools": [WEATHER]}
    async with answering(CALLING, burst) as client, official(client) as api:
        whole = await api.responses.create(**fields)
        async with api.responses.stream(**fields) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    kinds = [item.type for item in whole.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == THOUGHT
    assert whole.output_text == SAID
    calls = whole.output[2:]
    assert tuple(json.loads(call.arguments) for call in calls) == CITIES
    assert {call.name for call in calls} == {"get_weather"}
    assert len({call.call_id for call in calls}) == 2
    assert bare(streamed) == bare(whole)
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for kind, text in (
        ("response.reasoning_text.delta", THOUGHT),
        ("response.output_text.delta", SAID),
        ("response.function_call_arguments.delta", "".join(call.arguments for call in calls)),
    ):
        assert "".join(event.delta for event in events if event.type == kind) == text


def bare(answer: Any) -> Any:
    """Without what differs from answer to answer."""
    found = answer.to_dict()
    for name in ("id", "created_at", "completed_at"):
        del found[name]
    for item in found["output"]:
        del item["id"]
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return found


async def test_the_events_of_a_stream_come_in_order():
    async with answering(f"<think>{THOUGHT}</think>{SAID}", burst=1000) as client:
        events = await client.events(PATH, ASKED)
    data = [json.loads(event.data) for event in events]
    assert [event.event for event in events] == [each["type"] for each in data]
    names = [each["type"].removeprefix("response.") for each in data]
    assert [name for at, name in enumerate(names) if name != names[at - 1]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    items = [each["item"] for each in data if each["type"] == "response.output_item.done"]
    assert data[-1]["response"]["output"] == items


async def test_an_answer_that_is_cut_off_is_incomplete():
    async with answering(PLAIN) as client, official(client) as api:
        whole = await api.responses.create(**ASKED | {"max_output_tokens": 4})
        events = await client.events(PATH, ASKED | {"max_output_tokens": 4})
    last = json.loads(events[-1].data)
    assert whole.status == last["response"]["status"] == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[0].status == "incomplete"
    assert events[-1].event == "response.incomplete"
    assert last["response"]["output"][0]["content"][0]["text"] == whole.output_text


async def test_an_answer_that_says_nothing_is_an_empty_message():
    async with frontend(Script()) as client, official(client) as api:
        whole = await api.responses.create(**ASKED)
        async with api.responses.stream(**ASKED) as stream:
            streamed = await stream.get_final_response()
    assert whole.output_text == streamed.output_text == ""
    assert [item.type for item in whole.output] == [item.type for item in streamed.output]


async def test_logprobs_are_those_of_what_is_said():
    async with answering(f"<think>{THOUGHT}</think>{SAID}") as client, official(client) as api:
        fields = ASKED | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        whole = await api.responses.create(**fields)
        async with api.responses.stream(**fields) as stream:
            streamed = await stream.get_final_response()
    logprobs = whole.output[1].content[0].logprobs
    assert "".join(entry.token for entry in logprobs).strip() == SAID
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    assert streamed.output[1].content[0].logprobs == logprobs


async def test_logprobs_that_a_stream_tells_again_at_its_end_are_bounded():
    fields = ASKED | {"top_logprobs": 20, "max_output_tokens": 400}
    async with frontend(Script(tokens=tokens("word ")), max_answer=100_000) as client:
        events = await client.events(PATH, fields)
        assert events[-1].event == "response.failed"
        assert "bytes" in json.loads(events[-2].data)["message"]
        assert client.service._generations.gathered.size == 0
        plain = await client.events(PATH, ASKED | {"max_output_tokens": 400})
        assert plain[-1].event == "response.incomplete"


# ---------------------------------------------------------------------- what the model is given


async def test_items_become_the_turns_of_a_conversation():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "two"}],
        },
        {"role": "assistant", "content": "Well."},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "and?"},
    ]
    async with answering(PLAIN) as client:
        await ask(client, input=items)
    assert prompt(client) == (
        "developer():Be brief.|user():hi|"
        'assistant():<think>Hm.</think>Looking.c1=f{"a": 1}c2=g{}|'
        "tool(c1):one|tool(c2):two|assistant():Well.|assistant():So.|user():and?|assistant:"
    )


async def test_an_answer_can_be_sent_again_as_it_is():
    async with answering(CALLING) as client, official(client) as api:
        first = await api.responses.create(**ASKED, tools=[WEATHER])
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
            for item in first.output
            if item.type == "function_call"
        ]
        items = [{"role": "user", "content": "hello"}, *first.output, *results]
        await api.responses.create(model="tiny", input=items, tools=[WEATHER])
    given = prompt(client)
    assert f"<think>{THOUGHT}</think>{SAID}" in given
    assert given.count("=get_weather{") == given.count(":rain|") == 2


async def test_sampling_comes_through():
    async with answering(PLAIN) as client:
        await ask(client, temperature=0.5, top_p=0.25, top_k=7, seed=11, stop=["x"])
        sampling = client.backend.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.seed, sampling.max_tokens) == (11, 500)


async def test_wishes_for_the_cache_come_through():
    async with answering(PLAIN) as client:
        await ask(client, cache_ttl=60, cache_scope="shared")
        request = client.backend.requests[-1]
        assert (request.cache_ttl, request.cache_scope) == (60.0, "shared")
        await ask(client, prompt_cache_retention="24h")
        assert client.backend.requests[-1].cache_ttl == 86400.0


async def test_one_call_at_a_time_can_be_asked_for():
    async with answering(CALLING) as client:
        answer = await ask(client, tools=[WEATHER], parallel_tool_calls=False)
        none = await ask(client, tools=[WEATHER], tool_choice="none")
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    assert answer["parallel_tool_calls"] is False
    assert [item["type"] for item in none["output"]] == ["reasoning", "message"]
    assert none["tool_choice"] == "none"


async def test_tokens_are_counted_as_an_answer_reports_them():
    async with answering(PLAIN) as client, official(client) as api:
        counted = await api.responses.input_tokens.count(model="tiny", input="hello")
        assert client.backend.requests == []
        answer = await api.responses.create(**ASKED)
    assert counted.input_tokens == answer.usage.input_tokens


# ---------------------------------------------------------------------- refusals and errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call_output"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"include": ["the.moon"]}, "include[0]"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"text": {"verbosity": "some"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
)
async def test_a_refusal_names_the_field_in_its_own_words(fields, param):
    async with answering(PLAIN) as client:
        error = await refused(client, **fields)
    assert error["param"] == param
    assert f"'{param.partition('[')[0]}" in error["message"]


@pytest.mark.parametrize("path", ["resp_1", "resp_1/cancel", "resp_1/input_items"])
async def test_nothing_is_stored(path):
    async with answering(PLAIN) as client:
        status, _, body = await client.get(f"{PATH}/{path}")
        assert status == 404
        assert "not stored" in json.loads(body)["error"]["message"]
        async with official(client) as api:
            with pytest.raises(openai.NotFoundError):
                await api.responses.delete("resp_1")
            with pytest.raises(openai.NotFoundError):
                await api.responses.cancel("resp_1")


async def test_a_stream_that_fails_says_so():
    script = Script(tokens=tokens(PLAIN), fail=EngineError("it broke"), fail_after=4)
    async with frontend(script) as client:
        events = await client.events(PATH, ASKED)
        async with official(client) as api:
            with pytest.raises(RuntimeError, match="completed"):
                async with api.responses.stream(**ASKED) as stream:
                    await stream.get_final_response()
    error, failed = (json.loads(event.data) for event in events[-2:])
    assert [event.event for event in events[-2:]] == ["error", "response.failed"]
    assert error["code"] == "engine_error"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert PLAIN.startswith(failed["response"]["output"][0]["content"][0]["text"])


async def test_a_stream_that_fails_before_its_first_token_has_a_beginning_too():
    script = Script(silent_after=0)
    async with frontend(script, header_wait=0.05, request_timeout=0.5) as client:
        events = await client.events(PATH, ASKED)
    assert [event.event for event in events] == [
        *("response.created", "response.in_progress", "error", "response.failed")
    ]


async def test_strangers_are_reported_and_strictly_refused():
    async with answering(PLAIN, strict_api=True) as client, official(client) as api:
        error = await refused(client, instruction="x")
        first = await api.responses.create(**ASKED)
        items: Any = [*first.output, {"role": "user", "content": "and?"}]
        await api.responses.create(model="tiny", input=items, metadata={"a": "b"}, user="u")
    assert "'instructions'" in error["message"]


# ---------------------------------------------------------------------- a context that runs over


async def test_more_output_than_fits_is_cut_and_incomplete():
    async with answering("word " * 50, max_model_len=60) as client:
        answer = await ask(client, max_output_tokens=32_000)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["total_tokens"] == 60
    async with answering(PLAIN, max_model_len=60, strict_api=True) as client:
        error = await refused(client, max_output_tokens=60)
    assert error["message"].startswith("This model's maximum context length is 60 tokens.")
    assert error["param"] == "max_output_tokens"


async def test_a_prompt_that_does_not_fit_is_a_400_or_a_stream_that_says_so():
    """Codex shortens the conversation at the event, and gives up at the status."""
    async with answering(PLAIN, max_model_len=60) as client:
        error = await refused(client, input="hello " * 99)
        events = await client.events(PATH, ASKED | {"input": "hello " * 99})
        counted = await client.post(f"{PATH}/input_tokens", ASKED | {"input": "hello " * 99})
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 60 tokens. However,")
    data = [json.loads(event.data) for event in events]
    assert [event.event for event in events] == [
        *("response.created", "response.in_progress", "error", "response.failed")
    ]
    assert [each["sequence_number"] for each in data] == [0, 1, 2, 3]
    failed = data[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"] == {"code": "context_length_exceeded", "message": error["message"]}
    assert counted[0] == 400


async def test_the_official_client_reads_such_a_stream():
    async with answering(PLAIN, max_model_len=60) as client, official(client) as api:
        stream = await api.responses.create(model="tiny", input="hello " * 99, stream=True)
        *_, last = [event async for event in stream]
    assert last.type == "response.failed"
    assert last.response.error.code == "context_length_exceeded"


def test_neighbouring_items_of_one_turn_are_joined_once(monkeypatch):
    """One by one, each join would copy all before: quadratic."""
    joins = []
    end = responses_request._Turn.end

    def counted(turn):
        joins.append(turn)
        end(turn)

    monkeypatch.setattr(responses_request._Turn, "end", counted)
    texts = [f"t{number}" for number in range(1000)]
    items = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": t}]} for t in texts]
    items += [
        {"type": "function_call", "name": "f", "call_id": t, "arguments": "{}"} for t in texts
    ]
    request = RESPONSES.decode(json.dumps({"model": "m", "input": items}).encode()).request
    (turn,) = chat_request(request, toolset_of(request, strict=False)).messages
    assert turn.reasoning == turn.reasoning_content == "\n".join(texts)
    assert [call.id for call in turn.tool_calls or ()] == texts
    assert len(joins) == 1
