"""Ollama's generation and vectors over a scripted model: requests, answers, streams and errors."""

from __future__ import annotations

import base64
import json
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import EngineError
from pdserve.frontend.api.adapters.ollama_request import _Unanswered, chat_request
from pdserve.protocols.completion_requests import ImageUrl
from pdserve.protocols.ollama.requests import OLLAMA_CHAT
from tests.frontend.images.test_prompt import CAT
from tests.frontend.images.test_prompt import model as seeing_model
from tests.frontend.preprocess.test_infill import QWEN, raw_with
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
from tests.frontend.support import MODEL, card, frontend, tokens, until
from tests.support.fake_backend import Script

if TYPE_CHECKING:
    from pdserve.messages.request import GenerateRequest
    from pdserve.protocols.completion_requests import ChatRequest
    from tests.frontend.support import Client

CHAT = "/api/chat"
GENERATE = "/api/generate"
HELLO = {"role": "user", "content": "hello"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED: dict[str, Any] = {"model": "tiny", "messages": [HELLO]}


async def ask(client: Client, path: str = CHAT, **fields: Any) -> Any:
    """The whole answer to a request that must succeed."""
    first = ASKED if path == CHAT else {"model": "tiny", "prompt": "hello"}
    status, _, answer = await client.post(path, first | {"stream": False} | fields)
    assert status == 200, answer
    return answer


async def lines(client: Client, path: str = CHAT, **fields: Any) -> list[Any]:
    """The objects of a stream, which is what comes without being asked for."""
    first = ASKED if path == CHAT else {"model": "tiny", "prompt": "hello"}
    async with client.http.post(client.url + path, json=first | fields) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "application/x-ndjson"
        return [json.loads(line) for line in (await answer.read()).splitlines()]


async def refused(client: Client, path: str = CHAT, **fields: Any) -> str:
    """The error of a request that must be refused."""
    first = ASKED if path == CHAT else {"model": "tiny", "prompt": "hello"}
    status, _, answer = await client.post(path, first | fields)
    assert (status, set(answer)) == (400, {"error"}), answer
    error: str = answer["error"]
    return error


def sampling(client: Client) -> Any:
    return client.backend.requests[-1].sampling


def translated_chat(body: dict[str, Any]) -> ChatRequest:
    """The chat that a body becomes."""
    model: Any = SimpleNamespace(reasoning=None)
    return chat_request(OLLAMA_CHAT.decode(json.dumps(body).encode()).request, model)


# ---------------------------------------------------------------------- answers


async def test_a_chat_is_answered_with_thinking_text_and_calls():
    async with answering(CALLING) as client:
        answer = await ask(client, tools=[WEATHER])
    message = answer["message"]
    assert (message["role"], message["content"]) == ("assistant", SAID)
    assert message["thinking"] == THOUGHT
    called = [call["function"] for call in message["tool_calls"]]
    assert [(each["index"], each["arguments"]) for each in called] == list(enumerate(CITIES))
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("tiny", True, "stop")
    assert answer["eval_count"] == len(tokens(CALLING))


@pytest.mark.parametrize("burst", [1, 7])
async def test_a_stream_adds_up_to_the_whole_answer(burst):
    async with answering(CALLING, burst) as client:
        whole = await ask(client, tools=[WEATHER])
        *parts, last = await lines(client, tools=[WEATHER])
    messages = [part["message"] for part in parts]
    assert "".join([each["content"] for each in messages]) == SAID
    assert "".join([each.get("thinking", "") for each in messages]) == THOUGHT
    calls = [call["function"] for each in messages for call in each.get("tool_calls", ())]
    assert calls == [call["function"] for call in whole["message"]["tool_calls"]]
    assert not any(part["done"] for part in parts)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["eval_count"] == whole["eval_count"]


async def test_a_call_is_sent_before_the_next_one_is_complete():
    async with answering(CALLING) as client:
        parts = await lines(client, tools=[WEATHER])
    sizes = [len(part["message"].get("tool_calls", ())) for part in parts]
    assert [size for size in sizes if size] == [1, 1]


async def test_a_prompt_is_answered_and_streamed():
    async with answering(THINKING) as client:
        answer = await ask(client, GENERATE, system="be brief")
        assert prompt(client) == "system():be brief|user():hello|assistant:"
        assert (answer["response"], answer["thinking"]) == (SAID, THOUGHT)
        *parts, last = await lines(client, GENERATE)
    assert "".join([part["response"] for part in parts]) == SAID
    assert last["done"]
    assert "message" not in last


async def test_a_raw_prompt_is_all_that_the_model_sees():
    async with answering(THINKING, strict_api=True) as client:
        answer = await ask(client, GENERATE, raw=True)
        assert prompt(client) == "hello"
        assert answer["response"] == THINKING
        assert sampling(client).max_tokens == 4096 - answer["prompt_eval_count"]
        assert "'system'" in await refused(client, GENERATE, raw=True, system="x")


async def test_logprobs_come_in_ollamas_form():
    async with answering(PLAIN) as client:
        whole = await ask(client, logprobs=True, top_logprobs=2)
        streamed = await lines(client, logprobs=True, top_logprobs=2)
        raw = await ask(client, GENERATE, raw=True, logprobs=True)
    told = [entry for line in streamed for entry in line.get("logprobs", ())]
    assert told == whole["logprobs"]
    assert [entry["token"] for entry in whole["logprobs"]] == [
        entry["token"] for entry in raw["logprobs"]
    ]
    assert len(whole["logprobs"][0]["top_logprobs"]) == 2
    assert raw["logprobs"][0]["top_logprobs"] == []


async def test_times_add_up_and_are_those_of_the_request(monkeypatch):
    # The script says nothing of placement; only the whole time is known then.
    async with answering(PLAIN) as client:
        answer = await ask(client)
    assert answer["total_duration"] > 0
    assert "prompt_eval_duration" not in answer


async def test_an_answer_that_is_cut_says_so():
    async with answering(PLAIN) as client:
        answer = await ask(client, options={"num_predict": 2})
        assert (answer["done_reason"], answer["eval_count"]) == ("length", 2)
        # As many as fit, whatever was asked for, as with Ollama.
        await ask(client, options={"num_predict": 10**6})
        assert sampling(client).max_tokens < 4096


# ---------------------------------------------------------------------- requests


async def test_wishes_for_the_cache_come_through():
    async with answering(PLAIN) as client:
        await ask(client, cache_ttl=60, cache_scope="shared")
        request = client.backend.requests[-1]
        assert (request.cache_ttl, request.cache_scope) == (60.0, "shared")


async def test_options_have_the_names_of_a_chat():
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 11,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "num_ctx": 4,
        "num_gpu": 1,
        "mirostat": 0,
        "typical_p": 1.0,
        "num_predict": 3,
    }
    async with answering(PLAIN) as client:
        await ask(client, options=given)
        asked = sampling(client)
        assert (asked.temperature, asked.top_p, asked.top_k) == (0.5, 0.25, 7)
        assert (asked.min_p, asked.seed, asked.max_tokens) == (0.125, 11, 3)
        assert (asked.repetition_penalty, asked.presence_penalty) == (1.5, 0.5)
        assert asked.frequency_penalty == -0.5
        await ask(client, options=given | {"repeat_last_n": 0, "num_predict": -1, "seed": -1})
        asked = sampling(client)
        assert (asked.repetition_penalty, asked.presence_penalty) == (1.0, 0.0)
        assert asked.frequency_penalty == 0
        assert asked.max_tokens > 3000
        assert asked.seed != 11


async def test_a_stop_string_ends_the_answer():
    async with answering(PLAIN) as client:
        answer = await ask(client, options={"stop": ["there"]})
    assert answer["message"]["content"] == "Hello "
    assert answer["done_reason"] == "stop"


@pytest.mark.parametrize("option", ["mirostat", "tfs_z", "typical_p"])
async def test_other_samplers_are_refused_by_name(option):
    async with answering(PLAIN) as client:
        assert f"'options.{option}'" in await refused(client, options={option: 0.5})


async def test_unknown_options_are_named_where_the_api_is_strict():
    async with answering(PLAIN, strict_api=True) as client:
        assert "'options.num_predit'" in await refused(client, options={"num_predit": 3})
    async with answering(PLAIN) as client:
        await ask(client, options={"num_predit": 3})


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "template", "{{ .Prompt }}"),
        (CHAT, "tool_choice", "required"),
        (CHAT, "max_tokens", 5),
        (GENERATE, "template", "x"),
        (GENERATE, "context", [1, 2]),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(path, field, value):
    async with answering(PLAIN) as client:
        assert f"'{field}'" in await refused(client, path, **{field: value})


async def test_images_are_refused_where_they_stand():
    seen = [HELLO, HELLO | {"images": ["aGVsbG8="]}]
    async with answering(PLAIN) as client:
        said = await refused(client, messages=seen)
        assert "'messages[1].images[0]': the model 'tiny' takes no images" in said
        assert "'images[0]'" in await refused(client, GENERATE, images=["aGVsbG8="])
        assert "'images'" in await refused(client, GENERATE, images=["aGVsbG8="], raw=True)


def test_images_stand_before_their_text():
    images = ["AAAA", "data:image/png;base64,BBBB"]
    chat = translated_chat({"messages": [HELLO | {"images": images}]})
    parts = chat.messages[0].content
    assert isinstance(parts, list)
    urls = [part.image_url.url for part in parts[:2] if isinstance(part.image_url, ImageUrl)]
    assert urls == ["data:;base64,AAAA", "data:image/png;base64,BBBB"]
    assert (parts[2].type, parts[2].text) == ("text", "hello")


async def test_a_model_that_sees_gets_the_images():
    script = Script(tokens=tokens("A cat."), repeat=False)
    picture = base64.b64encode(CAT).decode()
    async with frontend(script, {MODEL: seeing_model()}) as client:
        answer = await ask(client, messages=[HELLO | {"images": [picture]}])
        assert answer["message"]["content"] == "A cat."
        (request,) = client.backend.requests
        assert len(request.images) == 1
        answer = await ask(client, GENERATE, images=[picture])
        assert answer["response"] == "A cat."
        _, _, shown = await client.post("/api/show", {"model": MODEL})
    assert "vision" in shown["capabilities"]
    assert "insert" not in shown["capabilities"]


async def test_a_suffix_is_that_of_a_completion():
    raw = raw_with(QWEN)
    able = card(tokenizer_json=raw.to_str().encode(), vocab_size=raw.get_vocab_size())
    end = raw.token_to_id(QWEN[0])
    assert end is not None
    words = [*raw.encode(" quick brown").ids, end]
    async with frontend(Script(tokens=words), {MODEL: able}) as client:
        answer = await ask(client, GENERATE, prompt="the", suffix=" fox")
        assert (answer["response"], answer["done_reason"]) == (" quick brown", "stop")
        _, _, shown = await client.post("/api/show", {"model": MODEL})
        assert "insert" in shown["capabilities"]
    async with answering(PLAIN) as client:
        assert "'suffix'" in await refused(client, GENERATE, suffix="x")
        assert "'system'" in await refused(client, GENERATE, suffix="x", system="y")


async def test_errors_of_a_chat_name_ollamas_fields():
    async with answering(PLAIN) as client:
        assert "'options.temperature'" in await refused(client, options={"temperature": 3})
        assert "'format'" in await refused(client, format={"type": "strange"})
        assert "'format'" in await refused(client, format="xml")
        assert "'think'" in await refused(client, think="loud")
        assert "'messages[0].role'" in await refused(client, messages=[{"role": "x"}])


async def test_a_format_becomes_a_grammar():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with answering('{"a": 1}') as client:
        await ask(client, format=schema)
        assert "integer" in sampling(client).grammar
        await ask(client, format="json")
        assert sampling(client).grammar
        await ask(client, GENERATE, format="")
        assert not sampling(client).grammar


async def test_thinking_is_switched_by_the_template():
    async with answering(THINKING) as client:
        for think, mark in ((True, "!"), ("high", "!"), (False, "?"), (None, "")):
            answer = await ask(client, think=think)
            assert prompt(client).endswith(f"assistant:{mark}")
            assert ("thinking" in answer["message"]) == (think is not False)
            assert answer["message"]["content"] == SAID


async def test_what_a_model_cannot_is_said_in_ollamas_words():
    async with frontend() as client:
        assert "does not support thinking" in await refused(client, think=True)
        assert "does not support tools" in await refused(client, tools=[WEATHER])
        await ask(client, think=False, options={"num_predict": 1})


async def test_results_find_their_calls():
    def called(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"x": 1}}, **more}

    turns = [
        HELLO,
        {"role": "assistant", "tool_calls": [called("f"), called("g"), called("f", id="own")]},
        {"role": "tool", "content": "1", "tool_name": "g"},
        {"role": "tool", "content": "2", "tool_name": "f"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4", "tool_name": "f"},
        {"role": "tool", "content": "5", "tool_call_id": "told"},
    ]
    chat = translated_chat({"messages": turns})
    ids = [message.tool_call_id for message in chat.messages[2:]]
    assert ids == ["call_1", "call_0", "own", None, "told"]
    assert chat.messages[1].tool_calls is not None
    assert chat.messages[1].tool_calls[0].function.arguments == '{"x":1}'


async def test_the_conversation_reaches_the_template():
    turns = [
        HELLO,
        {"role": "assistant", "thinking": "hm", "tool_calls": [
            {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
        ]},
        {"role": "tool", "content": "sunny", "tool_name": "get_weather"},
    ]  # fmt: skip
    async with answering(PLAIN) as client:
        await ask(client, messages=turns, tools=[WEATHER])
        seen = prompt(client)
    assert 'assistant():<think>hm</think>call_0=get_weather{"city": "Rome"}|' in seen
    assert "tool(call_0):sunny|assistant:" in seen


async def test_the_last_turn_of_the_assistant_goes_on():
    async with answering(PLAIN) as client:
        await ask(client, messages=[HELLO, {"role": "assistant", "content": "Well"}])
        assert prompt(client).endswith("assistant():Well")


async def test_a_tag_is_no_part_of_a_name():
    async with answering(PLAIN) as client:
        answer = await ask(client, model="tiny:latest")
        assert answer["model"] == "tiny:latest"
        status, _, answer = await client.post(CHAT, ASKED | {"model": "tiny:7b"})
    assert (status, "is not served here" in answer["error"]) == (404, True)


# ---------------------------------------------------------------------- no prompt, no answer


async def test_without_a_prompt_a_model_is_said_to_be_loaded():
    async with answering(PLAIN) as client:
        answer = await ask(client, messages=[])
        assert (answer["done_reason"], answer["message"]["content"]) == ("load", "")
        (line,) = await lines(client, GENERATE, prompt="")
        assert (line["done_reason"], line["response"], line["done"]) == ("load", "", True)
        assert client.backend.requests == []
        status, _, _ = await client.post(CHAT, {"model": "other"})
        assert status == 404


async def test_no_client_unloads_a_model():
    async with answering(PLAIN) as client:
        assert "'keep_alive'" in await refused(client, GENERATE, prompt="", keep_alive=0)
        await ask(client, keep_alive=0)
        await ask(client, keep_alive="5m")


async def test_a_prompt_that_is_too_long_is_refused_in_ollamas_words():
    long = [{"role": "user", "content": "x " * 200}]
    async with answering(PLAIN, max_model_len=64) as client:
        said = await refused(client, messages=long)
        assert said.startswith("prompt too long; exceeded max context length by ")
        assert "'messages'" in said
        said = await refused(client, GENERATE, prompt="x " * 200)
        assert said.startswith("prompt too long; exceeded max context length by ")
        assert "'prompt'" in said


async def test_a_stream_that_fails_ends_with_its_error():
    script = Script(tokens=tokens("la "), fail=EngineError("it broke"), fail_after=3)
    async with frontend(script) as client:
        *parts, last = await lines(client)
    assert parts
    assert last == {"error": "it broke"}


async def test_a_stream_that_waits_is_kept_alive_by_empty_lines():
    async with frontend(Script(tokens=tokens("la"), hold_open=0.5), header_wait=0.1) as client:
        parts = await lines(client, options={"num_predict": 1})
    assert parts[0]["message"]["content"] == ""
    assert [part["done"] for part in parts[:-1]] == [False] * (len(parts) - 1)
    assert len(parts) > 3


async def test_a_client_that_hangs_up_ends_its_request():
    async with frontend(Script(tokens=tokens("la "), interval=0.001)) as client:
        async with client.http.post(client.url + CHAT, json=ASKED) as answer:
            await answer.content.readline()
            answer.close()
        await until(lambda: client.service.active_requests == 0)
        assert client.backend.streams[-1].cancelled


# ---------------------------------------------------------------------- vectors


def _vector(request: GenerateRequest) -> bytes:
    return struct.pack("<2f", 3.0, 4.0 * len(request.prompt))


def embedding(**config: Any) -> Any:
    able = card(pooling="last", embedding_size=2, features=("embeddings",), max_model_len=8)
    return frontend(Script(vector=_vector), {MODEL: able}, **config)


async def test_texts_become_vectors_of_length_1():
    async with embedding() as client:
        _, _, answer = await client.post("/api/embed", {"input": ["a", "a"], "model": "tiny"})
        assert len(answer["embeddings"]) == 2
        for vector in answer["embeddings"]:
            assert vector == pytest.approx([0.6, 0.8])
        assert (answer["model"], answer["prompt_eval_count"]) == ("tiny", 2)
        _, _, answer = await client.post("/api/embed", {"input": []})
        assert answer["embeddings"] == []


async def test_inputs_are_cut_unless_that_is_not_wanted():
    async with embedding() as client:
        status, _, answer = await client.post("/api/embed", {"input": "x" * 50})
        assert (status, answer["prompt_eval_count"]) == (200, 8)
        status, _, answer = await client.post("/api/embed", {"input": "x" * 50, "truncate": False})
        assert (status, "'input'" in answer["error"]) == (400, True)


async def test_the_older_form_has_one_vector_as_it_is():
    async with embedding() as client:
        _, _, answer = await client.post("/api/embeddings", {"prompt": "a"})
        assert answer == {"embedding": [3.0, 4.0]}
        _, _, answer = await client.post("/api/embeddings", {"prompt": ""})
        assert answer == {"embedding": []}


async def test_a_model_without_vectors_says_so():
    async with frontend() as client:
        status, _, answer = await client.post("/api/embed", {"input": "a"})
    assert (status, "makes no vectors" in answer["error"]) == (400, True)


def test_many_calls_are_matched_in_time_that_grows_with_their_number():
    """Of each call the name is looked at once, though none is that of a result."""
    count = 10_000
    looked = 0

    class Name(str):
        def __eq__(self, other: object) -> bool:
            nonlocal looked
            looked += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    unanswered = _Unanswered()
    for number in range(count):
        unanswered.add(Name(f"f{number}"), f"call_{number}")
    found = [unanswered.take("other") for _ in range(count)]
    assert found == [f"call_{number}" for number in range(count)]
    assert unanswered.take("f0") is None
    assert looked < 3 * count
