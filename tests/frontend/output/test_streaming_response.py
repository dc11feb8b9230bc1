"""Streams as clients see them: what each chunk holds, and what holds over all of them."""

import asyncio
import json

import pytest

from pdserve.errors import EngineDied, EngineError, Overloaded
from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.output.streaming_response import StreamingResponseBuilder
from pdserve.frontend.plan import Prompt, RequestPlan
from pdserve.messages.request import Finish, GenerateRequest, SamplingParams, TokenDelta
from pdserve.observe.metrics import Metrics
from pdserve.token_ids import token_ids
from tests.frontend.http.test_sse_response import Connection, wire
from tests.frontend.support import HELLO, TOKENIZER, card, frontend, text_of, tokens
from tests.support.fake_backend import Script

TEXT = "The quick 👍🏽 naïve 你好 fox"
IDS = tokens(TEXT)
CHAT = "/v1/chat/completions"


def choices(chunks, index=0):
    found = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice for choice in found if choice["index"] == index]


def content(choice):
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


def flat(lists):
    return [item for part in lists for item in part or ()]


async def test_every_token_that_shows_text_is_one_chunk():
    async with frontend(Script(tokens=[*IDS, 1])) as client:
        chunks = await client.chunks()
    detokenizer = TOKENIZER.detokenizer()
    shown = [text for text in map(detokenizer.feed, IDS) if text]
    assert [content(choice) for choice in choices(chunks)][1:-1] == shown
    assert choices(chunks)[-1]["delta"] == {}
    assert all("�" not in content(choice) for choice in choices(chunks))


@pytest.mark.parametrize("burst", [1, 2, 5, 100])
async def test_tokens_that_come_together_are_still_told_apart(burst):
    async with frontend(Script(tokens=[*IDS, 1], burst=burst)) as client:
        chunks = await client.chunks()
    assert text_of(chunks) == TEXT
    detokenizer = TOKENIZER.detokenizer()
    shown = [text for text in map(detokenizer.feed, IDS) if text]
    assert [text for text in map(content, choices(chunks)) if text] == shown


async def test_choices_of_one_prompt_are_interleaved():
    async with frontend(Script(tokens=tokens("abcdef"))) as client:
        chunks = await client.chunks(n=3, max_tokens=6)
    order = [choice["index"] for chunk in chunks[3:] for choice in chunk["choices"]]
    assert order[:6] == [0, 1, 2, 0, 1, 2]
    assert [text_of(chunks, index) for index in range(3)] == [text_of(chunks)] * 3
    assert [choices(chunks, index)[0]["delta"]["role"] for index in range(3)] == ["assistant"] * 3
    assert [choices(chunks, index)[-1]["finish_reason"] for index in range(3)] == ["length"] * 3


async def test_a_stop_string_ends_the_stream_and_the_engines_work():
    script = Script(tokens=tokens("one two three "), repeat=True)
    async with frontend(script) as client:
        chunks = await client.chunks(
            stop=["wo th", "zzz"], max_tokens=4000, stream_options={"include_usage": True}
        )
        (stream,) = client.backend.streams
        assert stream.cancelled
    assert text_of(chunks) == "one t"
    last = choices(chunks)[-1]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "wo th")
    used = chunks[-1]["usage"]["completion_tokens"]
    assert "wo th" in TOKENIZER.decode(tokens("one two three ")[:used])
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_stop_string_ends_only_its_own_choice():
    # The second choice of a prompt gets the same tokens; both end, the stream is freed once.
    async with frontend(Script(tokens=tokens("one two three "))) as client:
        chunks = await client.chunks(n=2, stop="two", max_tokens=100)
    assert {text_of(chunks, index) for index in (0, 1)} == {"one "}


async def test_a_stop_token_is_told_by_its_id():
    async with frontend(Script(tokens=[*IDS[:3], 2])) as client:
        chunks = await client.chunks(stop_token_ids=[2])
    assert (choices(chunks)[-1]["finish_reason"], choices(chunks)[-1]["stop_reason"]) == ("stop", 2)


@pytest.mark.parametrize("stops", [[], ["zzzz"], ["好 fo"]])
async def test_logprobs_tell_every_token_once_in_order(stops):
    async with frontend(Script(tokens=[*IDS, 1])) as client:
        chunks = await client.chunks(
            logprobs=True, top_logprobs=2, stop=stops, stream_options={"include_usage": True}
        )
    entries = [e for c in choices(chunks) if c["logprobs"] for e in c["logprobs"]["content"]]
    assert len(entries) == chunks[-1]["usage"]["completion_tokens"]
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined.startswith(text_of(chunks).encode())
    if stops != ["好 fo"]:
        assert joined == TEXT.encode() + TOKENIZER.token_bytes(1)
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)


@pytest.mark.parametrize("echo", [True, False])
async def test_a_streamed_completion_is_the_whole_one(echo):
    fields = {"echo": echo, "logprobs": 2, "max_tokens": 9, "return_token_ids": True}
    async with frontend(Script(tokens=IDS, cached_tokens=1)) as client:
        whole = await client.complete(prompt=["ab", "cd"], n=2, **fields)
        chunks = await client.chunks(
            "/v1/completions",
            prompt=["ab", "cd"],
            n=2,
            stream_options={"include_usage": True},
            **fields,
        )
    assert chunks[-1]["usage"] == whole["usage"]
    for expected in whole["choices"]:
        parts = choices(chunks, expected["index"])
        assert "".join(part["text"] for part in parts) == expected["text"]
        told = [part["logprobs"] for part in parts if part["logprobs"]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert flat(part[name] for part in told) == expected["logprobs"][name]
        assert flat(part.get("token_ids") for part in parts) == expected["token_ids"]
        told_once = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
        assert told_once == [expected["prompt_token_ids"]]
        assert parts[-1]["finish_reason"] == expected["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_may_be_told_on_every_chunk(path: str):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with frontend(Script(tokens=tokens("abcd"))) as client:
        chunks = await client.chunks(path, max_tokens=4, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    begun = [0] if "chat" in path else []
    assert counts == [*begun, 1, 2, 3, 4, 4]
    assert chunks[-1]["choices"] == []


async def test_usage_that_is_not_wanted_is_on_no_chunk():
    options = {"include_usage": False, "continuous_usage_stats": True}
    async with frontend(Script(tokens=tokens("abcd"))) as client:
        chunks = await client.chunks(max_tokens=4, stream_options=options)
    assert not any("usage" in chunk for chunk in chunks)


async def test_token_ids_are_told_with_the_chunks():
    async with frontend(Script(tokens=[*IDS, 1])) as client:
        chunks = await client.chunks(return_token_ids=True)
        whole = await client.chat(return_token_ids=True)
    told = flat(choice.get("token_ids") for choice in choices(chunks))
    assert told == [*IDS, 1] == whole["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


async def test_scoring_a_prompt_makes_no_text():
    async with frontend(Script(tokens=IDS)) as client:
        whole = await client.complete(prompt="hello", max_tokens=0, echo=True, logprobs=1)
        chunks = await client.chunks(
            "/v1/completions", prompt="hello", max_tokens=0, echo=True, logprobs=1
        )
    assert whole["choices"][0]["text"] == text_of(chunks) == "hello"
    assert whole["usage"]["completion_tokens"] == 0
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == len(tokens("hello"))


async def test_special_tokens_are_shown_when_asked_for():
    async with frontend(Script(tokens=[2, *tokens("a"), 1])) as client:
        assert text_of(await client.chunks()) == "a"
        assert text_of(await client.chunks(skip_special_tokens=False)) == "<|im_end|>a</s>"


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"stop": "zz"}])
async def test_an_error_in_mid_stream_is_the_last_event(fields):
    script = Script(tokens=IDS, fail=EngineDied("the engine died"), fail_after=3)
    async with frontend(script) as client:
        events = await client.events(CHAT, HELLO | fields)
    error = json.loads(events[-1].data)["error"]
    assert error["message"] == "the engine died"
    assert error["code"] == "engine_died"
    assert not any(event.done for event in events)
    assert text_of([json.loads(event.data) for event in events[:-1]]) == TOKENIZER.decode(IDS[:3])


async def test_an_error_before_the_first_token_has_its_own_status():
    async with frontend(Script(fail=EngineError("broken"))) as client:
        status, _, answer = await client.post(CHAT, HELLO | {"stream": True})
        assert (status, answer["error"]["code"]) == (500, "engine_error")
        client.backend.script = Script(fail=Overloaded("queue full"))
        status, headers, _ = await client.post(CHAT, HELLO | {"stream": True})
        assert (status, headers["Retry-After"]) == (429, "1")


@pytest.mark.parametrize("reason", ["error", "abort"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_the_engine_gives_up_is_an_error(reason, stream):
    async with frontend(Script(tokens=IDS, end=reason)) as client:
        status, _, answer = await client.post(CHAT, HELLO | {"stream": stream})
    assert (status, answer["error"]["message"]) == (500, "scripted end")


async def test_one_failing_prompt_fails_the_request_and_frees_the_others():
    def script(request):
        if request.prompt_index == 1:
            return Script(refuse=Overloaded("full"), hold_open=0.01)
        return Script(tokens=IDS, interval=0.001)

    async with frontend(script) as client:
        status, _, _ = await client.post(
            "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4000}
        )
        assert status == 429
        events = await client.events("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4000})
        assert json.loads(events[-1].data)["error"]["message"] == "full"
        assert client.backend.idle


async def test_the_end_of_a_stream_leaves_in_one_write_with_its_last_token():
    prompt, sampling = token_ids([5]), SamplingParams(max_tokens=9)
    plan = RequestPlan(
        chat=True,
        model=PreparedModel.from_card(card()),
        model_name="tiny",
        answer_id="chatcmpl-r",
        created=1,
        prompts=[Prompt(prompt)],
        requests=[GenerateRequest(request_id="r", model="tiny", prompt=prompt, sampling=sampling)],
        n=1,
        stream=True,
    )
    connection = Connection()
    stream = wire(connection, limit=1000)
    answer = StreamingResponseBuilder(
        plan, Metrics().of_model("tiny"), 0.0, iter(range(1, 9)).__next__, stream
    )
    (sink,) = answer.sinks
    sink.on_delta(TokenDelta(0, 0, tokens("a")))
    await asyncio.sleep(0)
    assert len(connection.writes) == 1
    sink.on_delta(TokenDelta(0, 0, tokens("b"), Finish(reason="length")))
    assert answer.finished.done()
    answer.finish()
    answer.abort(EngineError("came too late"))
    await stream.reply()
    await asyncio.sleep(0)
    _, last = connection.writes
    assert last.count(b'"length"') == 1
    assert last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert last.count(b"[DONE]") == 1
