"""Calls of tools as clients see them: what a request may say, what messages and streams carry."""

import json
import random
import re
from typing import Any, cast

import msgspec
import pytest

from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.output.response_memory import ResponseMemory
from pdserve.frontend.output.streaming_response import streaming_response_builder
from pdserve.frontend.plan import Prompt, RequestPlan
from pdserve.frontend.preprocess.output_parsers import with_output_parser
from pdserve.messages.request import SamplingParams, TokenDelta
from pdserve.observe.metrics import Metrics
from pdserve.protocols.completion_requests import ChatRequest
from pdserve.protocols.completion_responses import ChatChunk, ChatCompletion
from pdserve.protocols.sse import SseDecoder
from pdserve.token_ids import token_ids
from tests.frontend.fake_cluster import request, world
from tests.frontend.reasoning_model import (
    CLOCK,
    END,
    TOKENIZER,
    WEATHER,
    call,
    card,
    message_of,
    tokens,
    without_ids,
)
from tests.frontend.support import HELLO, MODEL, frontend
from tests.net.world import virtually
from tests.support.fake_backend import Script

CHAT = "/v1/chat/completions"
TOOLS = [WEATHER, CLOCK]
PARIS = call("weather", city='Pa"ris\\ 你好')
NOON = call("clock", zone="UTC", at={"hour": 12, "of": [1, {"a": "}{"}]})


def serving(text, *, cuts=None, changes=(), **script):
    """A frontend whose model writes `text`."""
    made = Script(tokens=[*tokens(text, cuts), END], repeat=False, **script)
    return frontend(made, models={MODEL: card(**dict(changes))})


def functions(message):
    """(name, arguments) of each call."""
    calls = message.get("tool_calls", ())
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


ANSWERS: dict[str, Any] = {
    "a call alone": (PARIS, None, [("weather", {"city": 'Pa"ris\\ 你好'})]),
    "text and a call": (
        f"Let me look. {PARIS}",
        "Let me look.",
        [("weather", {"city": 'Pa"ris\\ 你好'})],
    ),
    "two calls": (
        f"{PARIS}\n{NOON}",
        None,
        [
            ("weather", {"city": 'Pa"ris\\ 你好'}),
            ("clock", {"zone": "UTC", "at": {"hour": 12, "of": [1, {"a": "}{"}]}}),
        ],
    ),
    "no call": ("It is < 5 °C & fine.", "It is < 5 °C & fine.", []),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_has_content_and_calls(name):
    text, content, calls = ANSWERS[name]
    async with serving(text) as client:
        (choice,) = (await client.chat(tools=TOOLS))["choices"]
    message = choice["message"]
    assert (message["content"], functions(message)) == (content, calls)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert choice["stop_reason"] is None
    assert ("tool_calls" in message) == bool(calls)
    for each in message.get("tool_calls", ()):
        assert re.fullmatch("call_[0-9a-f]{24}", each["id"])
        assert each["type"] == "function"


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_adds_up_to_the_whole_answer_wherever_tokens_end(name):
    text, _, calls = ANSWERS[name]
    for seed in range(4):
        cuts = random.Random(seed)
        async with serving(text, cuts=cuts, burst=1 + seed % 3) as client:
            whole = await client.chat(tools=TOOLS)
            chunks = await client.chunks(tools=TOOLS, stream_options={"include_usage": True})
        (choice,) = whole["choices"]
        assert without_ids(message_of(chunks)) == without_ids(choice["message"])
        assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert chunks[-1]["usage"] == whole["usage"]
        begun = [
            part
            for chunk in chunks
            for one in chunk["choices"]
            for part in one["delta"].get("tool_calls", ())
            if "id" in part
        ]
        assert [part["function"]["name"] for part in begun] == [name for name, _ in calls]


async def test_ids_that_the_model_needs_again_are_its_own():
    """Kimi's templates show the model its ids, and an id has the name of the tool."""
    calls = "".join(
        f'<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{"city": "Rome"}}<|tool_call_end|>'
        for id in ("functions.weather:0", "functions.weather:1", "functions.weather:1")
    )
    text = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
    async with serving(text, changes={"tool_parser": "kimi_k2"}) as client:
        whole = message_of(await client.chunks(tools=TOOLS))
        (choice,) = (await client.chat(tools=TOOLS))["choices"]
    for message in (whole, choice["message"]):
        first, second, third = (each["id"] for each in message["tool_calls"])
        assert (first, second) == ("functions.weather:0", "functions.weather:1")
        assert re.fullmatch("call_[0-9a-f]{24}", third), "the same id a second time is no id"


async def test_arguments_come_while_they_are_written():
    async with serving(PARIS) as client:
        chunks = await client.chunks(tools=TOOLS)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert len(parts) > 5
    assert all(list(part) == ["index", "function"] for part in parts[1:])
    assert without_ids(deltas[0]) == {"role": "assistant", "content": None}


async def test_what_is_sent_decodes_as_the_records_that_describe_it():
    async with serving(f"<think>\nso\n</think>\nWell. {PARIS}{NOON}") as client:
        _, _, whole = await client.post(CHAT, HELLO | {"tools": TOOLS})
        events = await client.events(CHAT, HELLO | {"tools": TOOLS})
    answer = msgspec.convert(whole, ChatCompletion)
    _, second = list(answer.choices[0].message.tool_calls or [])
    assert second.function.name == "clock"
    chunks = [msgspec.json.decode(event.data, type=ChatChunk) for event in events[:-1]]
    told = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.reasoning or "" for delta in told) == "so"
    assert [part.id is not None for delta in told for part in delta.tool_calls or ()].count(
        True
    ) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_has_its_own_calls(stream):
    async with serving(f"{PARIS}{NOON}") as client:
        if stream:
            chunks = await client.chunks(tools=TOOLS, n=3)
            messages = [message_of(chunks, index) for index in range(3)]
        else:
            answer = await client.chat(tools=TOOLS, n=3)
            messages = [choice["message"] for choice in answer["choices"]]
    assert [len(functions(message)) for message in messages] == [2, 2, 2]
    assert len({each["id"] for message in messages for each in message["tool_calls"]}) == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_runs_out_of_tokens_says_so(stream):
    text = f"{PARIS}{NOON}"
    limit = len(tokens(text)) - 12
    async with serving(text) as client:
        if stream:
            chunks = await client.chunks(tools=TOOLS, max_tokens=limit)
            message, reason = message_of(chunks), chunks[-1]["choices"][0]["finish_reason"]
        else:
            (choice,) = (await client.chat(tools=TOOLS, max_tokens=limit))["choices"]
            message, reason = choice["message"], choice["finish_reason"]
    assert reason == "length"
    first, second = message["tool_calls"]
    assert json.loads(first["function"]["arguments"])
    with pytest.raises(json.JSONDecodeError):
        json.loads(second["function"]["arguments"])


async def test_a_call_that_is_not_whole_is_none():
    async with serving('<tool_call>\n{"name": "weather", "arguments": {"city": "Par') as client:
        (choice,) = (await client.chat(tools=TOOLS))["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Par'


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_a_time_ends_at_the_second(stream):
    async with serving(f"Well. {PARIS}{NOON} and so on") as client:
        fields = {"tools": TOOLS, "parallel_tool_calls": False}
        if stream:
            chunks = await client.chunks(**fields)
            message, reason = message_of(chunks), chunks[-1]["choices"][0]["finish_reason"]
        else:
            (choice,) = (await client.chat(**fields))["choices"]
            message, reason = choice["message"], choice["finish_reason"]
        assert client.backend.streams[0].cancelled
    assert message["content"] == "Well."
    assert [name for name, _ in functions(message)] == ["weather"]
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    "extra",
    [{"stop": ["zzz"]}, {"logprobs": True}, {"return_token_ids": True}, {"stream_interval": 7}],
)
async def test_what_else_is_asked_for_changes_no_call(extra):
    fields = {"tools": TOOLS, "stream_options": {"continuous_usage_stats": True}} | extra
    async with serving(f"Well. {PARIS}{NOON}") as client:
        whole = await client.chat(tools=TOOLS, **extra)
        chunks = await client.chunks(**fields)
    (choice,) = whole["choices"]
    assert len(functions(choice["message"])) == 2
    assert without_ids(message_of(chunks)) == without_ids(choice["message"])
    count = whole["usage"]["completion_tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == count
    if "logprobs" in extra:
        told = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
        assert sum(len(one["content"]) for one in told) == count
        assert len(choice["logprobs"]["content"]) == count
    if "return_token_ids" in extra:
        ids = [id for chunk in chunks for c in chunk["choices"] for id in c.get("token_ids", ())]
        assert ids == choice["token_ids"]
        assert len(ids) == count


async def test_a_stop_string_is_looked_for_in_the_text_as_the_model_writes_it():
    async with serving(f"{PARIS}{NOON}") as client:
        (choice,) = (await client.chat(tools=TOOLS, stop="</tool_call>"))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "</tool_call>")
    assert [name for name, _ in functions(choice["message"])] == ["weather"]


class Told:
    """Stands for a stream's wire: keeps the chunks."""

    paused, started, ended, held = False, True, False, 0

    def __init__(self) -> None:
        self.chunks: list[Any] = []

    def on_resume(self, callback: Any) -> None:
        """A client that is never behind."""

    def hold(self, size: int) -> None:
        self.held += size

    def write(self, events: bytes) -> None:
        decoded = SseDecoder().feed(events)
        self.chunks += [json.loads(event.data) for event in decoded if not event.done]

    def write_parts(self, head: bytes, text: bytes, tail: bytes) -> None:
        self.write(head + text + tail)

    def end(self, events: bytes) -> None:
        self.ended = True
        self.write(events)


def planned(ids: list[int]) -> RequestPlan:
    """The plan of a stream that calls tools."""
    chat = msgspec.convert(HELLO | {"tools": TOOLS}, ChatRequest)
    plain = RequestPlan(
        chat=True,
        model=PreparedModel.from_card(card()),
        model_name=MODEL,
        answer_id="chatcmpl-1",
        created=1,
        prompts=[Prompt(token_ids([7, 8, 9]))],
        requests=[request(sampling=SamplingParams(max_tokens=len(ids)))],
        n=1,
        include_usage=True,
    )
    return with_output_parser(plain, chat, tuple(chat.tools or ()))


NO_BOUND = ResponseMemory(1 << 20, 1 << 20)
THOUGHT = f"<think>\nso\n</think>\nWell. {PARIS}{NOON}"


async def test_a_slow_client_gets_what_waited_in_one_chunk() -> None:
    ids, wire = tokens(THOUGHT), Told()
    answer = streaming_response_builder(
        planned(ids), Metrics().of_model("m"), 0.0, lambda: 0.0, cast("Any", wire), NO_BOUND
    )
    (choice,) = answer.choices
    wire.paused = True
    for token in ids:
        choice.on_delta(TokenDelta(0, 0, [token]), 0.0)
    assert wire.held >= len(THOUGHT) - 80
    assert not wire.chunks
    wire.paused = False
    answer._flush()
    (chunk,) = wire.chunks
    assert wire.held == 0
    delta = chunk["choices"][0]["delta"]
    assert list(delta) == ["content", "reasoning", "reasoning_content", "tool_calls"]
    assert [one["function"]["name"] for one in delta["tool_calls"]] == ["weather", "clock"]
    assert functions(message_of(wire.chunks)) == ANSWERS["two calls"][2]
    answer.finished.cancel()


@virtually
async def test_calls_go_on_at_another_worker() -> None:
    ids = tokens(THOUGHT)
    plan = planned(ids)
    async with world() as w:
        await w.router("r")
        first, second = await w.worker("a"), await w.worker("b")
        await w.ready()
        wire = Told()
        answer = streaming_response_builder(
            plan,
            w.backend.metrics.of_model("m"),
            0.0,
            w.nodes.loop.time,
            cast("Any", wire),
            NO_BOUND,
        )
        (sink,) = answer.sinks
        sink.opened(await w.backend.open(plan.requests[0], sink, on_placed=sink.on_placed))
        begun = len(ids) // 2  # in the middle of a call's arguments
        first.say(*ids[:begun])
        await w.nodes.until(lambda: answer.completion_tokens > begun - 20)
        await w.nodes.crash("a")
        await w.nodes.until(lambda: bool(second.running), 60.0)
        second.say(*ids[begun:], end=True)
        await w.nodes.until(answer.finished.done)
        answer.finish()
    message = message_of(wire.chunks)
    assert (message["reasoning"], message["content"]) == ("so", "Well.")
    assert [name for name, _ in functions(message)] == ["weather", "clock"]
    assert wire.chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert wire.chunks[-1]["usage"]["pdserve"]["migrations"] == 1
    assert wire.chunks[-1]["usage"]["completion_tokens"] == len(ids)


# ---------------------------------------------------------------- what the template sees


async def prompt_of(fields, **changes):
    """What the model reads."""
    async with serving("ok", changes=changes.items()) as client:
        await client.chat(**fields)
        return TOKENIZER.decode(client.backend.requests[0].prompt, skip_special_tokens=False)


async def test_the_template_sees_the_tools_as_they_were_sent():
    assert json.dumps(WEATHER, separators=(", ", ": ")) in await prompt_of({"tools": TOOLS})


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_that_may_be_called_it_sees_none(fields):
    assert "<tools>" not in await prompt_of(fields)


async def test_without_tools_calls_are_text():
    async with serving(PARIS) as client:
        fields = {"tools": TOOLS, "tool_choice": "none", "skip_special_tokens": False}
        (choice,) = (await client.chat(**fields))["choices"]
    assert choice["message"]["content"].startswith(PARIS)
    assert choice["finish_reason"] == "stop"


async def test_the_end_of_a_text_is_never_shown():
    marked = card(eos_token_ids=(TOKENIZER.token_to_id("</tool_call>"),))
    script = Script(tokens=tokens(PARIS), repeat=False)
    async with frontend(script, models={MODEL: marked}) as client:
        (choice,) = (await client.chat(tools=TOOLS))["choices"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


async def test_an_earlier_call_and_its_result_reach_the_template():
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "reasoning": "they want to know",
            "tool_calls": [
                {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "18 °C"},
    ]
    prompt = await prompt_of({"messages": messages, "tools": TOOLS})
    assert "<think>\nthey want to know\n</think>" in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "<tool_response>\n18 °C\n</tool_response>" in prompt


SHOWS = "{{ documents | tojson }}|{{ tools | tojson }}|{{ reasoning_effort }}|{{ thinking }}"


@pytest.mark.parametrize("own", [False, True])
async def test_documents_and_tools_reach_a_template_of_the_requests_own(own):
    documents = [{"title": "a", "text": "b"}]
    fields = {"tools": [WEATHER], "documents": documents, "reasoning_effort": "none"}
    served = card(**({} if own else {"chat_template": SHOWS}))
    extra = {"chat_template": SHOWS} if own else {}
    script = Script(tokens=[END])
    models = {MODEL: served}
    async with frontend(script, models, trust_request_chat_template=True) as client:
        await client.chat(**fields, **extra)
        (request,) = client.backend.requests
        _, _, tokenized = await client.post(
            "/tokenize", HELLO | {"tools": [WEATHER], "documents": documents} | extra
        )
    shown = TOKENIZER.decode(request.prompt).split("|")
    assert [json.loads(part) for part in shown[:2]] == [documents, [WEATHER]]
    assert shown[2:] == ["none", "False"]
    assert TOKENIZER.decode(tokenized["tokens"]).split("|")[:2] == shown[:2]


# ---------------------------------------------------------------- what is refused

NAMED = {"type": "function", "function": {"name": "weather"}}
REFUSED: dict[str, Any] = {
    "a name twice": ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    "a name that no tool has": (
        {"tools": [CLOCK], "tool_choice": NAMED},
        "tool_choice.function.name",
    ),
    "required, without tools": ({"tool_choice": "required"}, "tool_choice"),
    "named, without tools": ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_contradicts_itself_is_refused(name):
    fields, param = REFUSED[name]
    async with serving("ok") as client:
        status, _, answer = await client.post(CHAT, HELLO | fields)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("choice", [None, "auto", "required", NAMED])
async def test_a_model_whose_calls_are_not_known_is_no_use_with_tools(choice):
    fields = {"tools": TOOLS, "tool_choice": choice}
    async with serving("ok", changes={"tool_parser": ""}.items()) as client:
        status, _, answer = await client.post(CHAT, HELLO | fields)
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "--tool-parser" in answer["error"]["message"]
        fields["tool_choice"] = "none"
        assert (await client.chat(**fields))["choices"][0]["message"]["content"] == "ok"


async def test_a_format_of_another_release_is_told_in_the_log(caplog):
    async with serving("ok", changes={"tool_parser": "of_tomorrow"}.items()) as client:
        status, _, _ = await client.post(CHAT, HELLO | {"tools": TOOLS})
        assert status == 400
        assert (await client.chat())["choices"][0]["message"]["content"] == "ok"
    assert "of_tomorrow" in caplog.text


async def test_the_listing_names_the_parsers():
    async with serving("ok") as client:
        _, _, body = await client.get("/v1/models")
    (model,) = json.loads(body)["data"]
    assert (model["tool_parser"], model["reasoning_parser"]) == ("hermes", "think")
