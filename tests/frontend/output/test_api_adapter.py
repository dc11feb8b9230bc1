"""What an adapter is told of an answer: in order, everything once, whatever the request ends in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace

from pdserve.errors import EngineDied
from pdserve.frontend.api.adapters.common import EventStreamAdapter
from pdserve.frontend.api.app import ApiRoute
from pdserve.frontend.generation import RequestKind
from pdserve.frontend.preprocess.input_processor import plan_chat
from pdserve.protocols.request_decoder import CHAT
from pdserve.text.output_parts import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_parts,
)
from tests.frontend.reasoning_model import END, WEATHER, call, card, tokens
from tests.frontend.support import HELLO, MODEL, Client, frontend
from tests.support.fake_backend import Script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import PdserveError
    from pdserve.frontend.output.output_processor import OutputDelta
    from pdserve.frontend.plan import RequestPlan
    from pdserve.protocols.completion_responses import ChatCompletion, Usage
    from pdserve.text.output_parts import OutputPart

TEXT = f"<think>\nhm\n</think>\nWell. {call('weather', city='Rome')}"


class Plainly(EventStreamAdapter):
    """Says what it was told."""

    def __init__(self) -> None:
        self.told: list[OutputPart] = []
        self.tokens = 0

    def repeats(self) -> int:
        return 0

    def begin(self, plan: RequestPlan, usage: Usage) -> bytes:
        return b"data: begin %d\n\n" % usage.prompt_tokens

    def parts(self, parts: Sequence[OutputPart], piece: OutputDelta) -> bytes:
        self.told += parts
        self.tokens += len(piece.tokens)
        return b""

    def finish(self, finish_reason: str, stop_reason: object, usage: Usage) -> bytes:
        assert usage.completion_tokens == self.tokens
        return b"data: finish %s %s\n\n" % (finish_reason.encode(), str(stop_reason).encode())

    def error(self, error: PdserveError) -> bytes:
        return b"data: error %s\n\n" % str(error.code).encode()

    def whole(self, answer: ChatCompletion) -> bytes:
        return msgspec.json.encode(answer.choices[0].message)


def speak(client: Client, adapter: Plainly) -> None:
    """Serve `/plainly` by this adapter."""

    async def plan(request: Any, context: Any) -> RequestPlan:
        return replace(await plan_chat(request, context), adapter=adapter)

    api = client.service._api
    route = RequestKind(CHAT, plan)
    api._targets["/plainly"] = ApiRoute(
        "/plainly", {"POST": lambda call: api._generations.serve(route, call)}
    )


async def test_a_stream_is_worded_by_its_adapter():
    adapter = Plainly()
    async with frontend(Script(tokens=[*tokens(TEXT), END]), models={MODEL: card()}) as client:
        speak(client, adapter)
        events = await client.events("/plainly", HELLO | {"tools": [WEATHER]})
        prompt = len(client.backend.requests[0].prompt)
    assert [event.data for event in events] == [f"begin {prompt}", "finish tool_calls None"]
    assert merge_parts(adapter.told) == [
        ReasoningDelta("hm"),
        ContentDelta("Well."),
        ToolCallStart(0, "weather"),
        ToolCallArguments(0, '{"city": "Rome"}'),
    ]
    assert adapter.tokens == len(tokens(TEXT)) + 1


async def test_text_that_nobody_takes_apart_is_content():
    adapter = Plainly()
    plain = card(tool_parser="", reasoning_parser="")
    async with frontend(Script(tokens=tokens("one two")), models={MODEL: plain}) as client:
        speak(client, adapter)
        events = await client.events("/plainly", HELLO | {"max_tokens": len(tokens("one two"))})
    assert events[-1].data == "finish length None"
    assert merge_parts(adapter.told) == [ContentDelta("one two")]


async def test_the_end_of_a_broken_stream_is_worded_too():
    script = Script(tokens=tokens("one two three"), fail=EngineDied("gone"), fail_after=3)
    async with frontend(script, models={MODEL: card()}) as client:
        speak(client, Plainly())
        events = await client.events("/plainly", HELLO)
    assert [event.data.split()[0] for event in events] == ["begin", "error"]


@pytest.mark.parametrize("fields", [{}, {"stop": ["zzz"]}])
async def test_a_whole_answer_is_worded_by_its_adapter(fields):
    async with frontend(Script(tokens=[*tokens(TEXT), END]), models={MODEL: card()}) as client:
        speak(client, Plainly())
        status, _, answer = await client.post("/plainly", HELLO | {"tools": [WEATHER]} | fields)
    assert status == 200
    assert (answer["content"], answer["reasoning"]) == ("Well.", "hm")
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
