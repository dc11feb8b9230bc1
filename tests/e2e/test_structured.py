"""Answers of a given form, by the official client: a real server, a model of random weights."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.openai_client import client_of
from tests.e2e.server import Server, serving
from tests.support.json_schemas import ENFORCED, valid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ASK: dict[str, Any] = {"model": "tools", "messages": [{"role": "user", "content": "hi"}]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tool_model: Path) -> Iterator[Server]:
    with serving(tool_model, "--threads", "1") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server.url) as client:
        yield client


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


def choice_of(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"max_tokens": 300} | ASK | fields).choices[0]


def test_an_answer_fits_its_schema(client):
    bounded = {"thinking_token_budget": 8}
    choice = choice_of(client, response_format=form(PERSON), seed=1, extra_body=bounded)
    assert choice.finish_reason == "stop"
    assert valid(PERSON, choice.message.content)


def test_a_stream_is_the_same_text(client):
    fields: dict[str, Any] = {"response_format": form(PERSON), "seed": 1, "max_tokens": 300}
    whole = choice_of(client, **fields).message.content
    with client.chat.completions.create(**ASK | fields, stream=True) as stream:
        pieces = [c.choices[0].delta.content or "" for c in stream if c.choices]
    assert "".join(pieces) == whole


def test_many_schemas_at_once(client):
    names = list(ENFORCED)[::3]

    def ask(number: int) -> Any:
        schema = ENFORCED[names[number]]
        return choice_of(client, response_format=form(schema), seed=number, max_tokens=120)

    with ThreadPoolExecutor(8) as threads:
        choices = list(threads.map(ask, range(len(names))))
    ended = [(n, c) for n, c in zip(names, choices, strict=True) if c.finish_reason == "stop"]
    assert len(ended) > len(names) / 2
    assert [n for n, c in ended if not valid(ENFORCED[n], c.message.content or "")] == []


def test_choices_and_completions(client):
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.completions.create(model="tools", prompt="?", n=4, extra_body=extra)
    assert {each.text for each in answer.choices} <= {"yes", "no"}


def test_a_call_that_is_required_is_made(client):
    bounded = {"thinking_token_budget": 8}  # a model of chance may think for ever
    must = {"tool_choice": "required", "parallel_tool_calls": False}
    choice = choice_of(client, tools=[WEATHER], seed=1, extra_body=bounded, **must)
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_reasoning_comes_first_and_is_bounded(client):
    choice = choice_of(
        client,
        response_format=form(PERSON),
        extra_body={"thinking_token_budget": 6, "chat_template_kwargs": {"thinks": True}},
    )
    assert choice.finish_reason == "stop"
    assert valid(PERSON, choice.message.content)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": form({"properties": {"a": {"not": {}}}})},
            "response_format.json_schema.schema.properties.a",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
    ],
)
def test_a_bad_one_is_refused_by_its_place(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        choice_of(client, **fields)
    assert caught.value.param == param
