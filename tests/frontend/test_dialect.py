"""What a dialect is told of an answer: in order, everything once, whatever comes of the request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace

from pdserve.errors import EngineDied
from pdserve.frontend.api import Target
from pdserve.frontend.generation import Route
from pdserve.frontend.prompts import plan_chat
from pdserve.openai.decode import CHAT
from pdserve.testing.fake_backend import Script
from pdserve.text.parts import CallArguments, CallBegin, Content, Reasoning, merged
from tests.frontend.markup import END, WEATHER, call, card, tokens
from tests.frontend.support import HELLO, MODEL, Client, frontend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import PdserveError
    from pdserve.frontend.output import Piece
    from pdserve.frontend.plan import Plan
    from pdserve.openai.responses import ChatCompletion, Usage
    from pdserve.text.parts import Part

TEXT = f"<think>\nhm\n</think>\nWell. {call('weather', city='Rome')}"


class Plainly:
    """Says what it was told."""

    def __init__(self) -> None:
        self.told: list[Part] = []
        self.tokens = 0

    def begin(self, plan: Plan, usage: Usage) -> bytes:
        return b"data: begin %d\n\n" % usage.prompt_tokens

    def parts(self, parts: Sequence[Part], piece: Piece) -> bytes:
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


def speak(client: Client, dialect: Plainly) -> None:
    """Serve `/plainly` in this dialect."""

    async def plan(request: Any, context: Any) -> Plan:
        return replace(await plan_chat(request, context), dialect=dialect)

    api = client.service._api
    route = Route(CHAT, plan)
    api._targets["/plainly"] = Target(
        "/plainly", {"POST": lambda call: api._generations.serve(route, call)}
    )


async def test_a_stream_is_worded_by_its_dialect():
    dialect = Plainly()
    async with frontend(Script(tokens=[*tokens(TEXT), END]), models={MODEL: card()}) as client:
        speak(client, dialect)
        events = await client.events("/plainly", HELLO | {"tools": [WEATHER]})
        prompt = len(client.backend.requests[0].prompt)
    assert [event.data for event in events] == [f"begin {prompt}", "finish tool_calls None"]
    assert merged(dialect.told) == [
        Reasoning("hm"),
        Content("Well."),
        CallBegin(0, "weather"),
        CallArguments(0, '{"city": "Rome"}'),
    ]
    assert dialect.tokens == len(tokens(TEXT)) + 1


async def test_text_that_nobody_takes_apart_is_content():
    dialect = Plainly()
    plain = card(tool_parser="", reasoning_parser="")
    async with frontend(Script(tokens=tokens("one two")), models={MODEL: plain}) as client:
        speak(client, dialect)
        events = await client.events("/plainly", HELLO | {"max_tokens": len(tokens("one two"))})
    assert events[-1].data == "finish length None"
    assert merged(dialect.told) == [Content("one two")]


async def test_the_end_of_a_broken_stream_is_worded_too():
    script = Script(tokens=tokens("one two three"), fail=EngineDied("gone"), fail_after=3)
    async with frontend(script, models={MODEL: card()}) as client:
        speak(client, Plainly())
        events = await client.events("/plainly", HELLO)
    assert [event.data.split()[0] for event in events] == ["begin", "error"]


@pytest.mark.parametrize("fields", [{}, {"stop": ["zzz"]}])
async def test_a_whole_answer_is_worded_by_its_dialect(fields):
    async with frontend(Script(tokens=[*tokens(TEXT), END]), models={MODEL: card()}) as client:
        speak(client, Plainly())
        status, _, answer = await client.post("/plainly", HELLO | {"tools": [WEATHER]} | fields)
    assert status == 200
    assert (answer["content"], answer["reasoning"]) == ("Well.", "hm")
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
