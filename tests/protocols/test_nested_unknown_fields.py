"""Strangers inside of objects are found by the schema, wherever a record stands."""

import json
from typing import Literal

import msgspec
import pytest

from pdserve.errors import InvalidRequest
from pdserve.protocols.nested_unknown_fields import record_tree, unknown_nested_fields
from pdserve.protocols.request_decoder import CHAT, COMPLETION, TOKENIZE

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def strangers(decoder=CHAT, **fields):
    return decoder.decode(json.dumps(HELLO | fields).encode()).unknown


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stream_options": {"include_usages": True}}, ["stream_options.include_usages"]),
        (
            {"messages": [{"role": "user", "content": "a", "wight": 1}]},
            ["messages[0].wight"],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            ["messages[0].content[0].x"],
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "stric": 1}}},
            ["response_format.json_schema.stric"],
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "params": {}}}]},
            ["tools[0].function.params"],
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f", "y": 1}}},
            ["tool_choice.function.y"],
        ),
        (
            {"repetition_detection": {"max_pattern_size": 2, "min_count": 2, "z": 1}},
            ["repetition_detection.z"],
        ),
    ],
)
def test_a_name_that_nobody_knows_is_found_wherever_it_stands(fields, expected):
    assert strangers(**fields) == expected
    with pytest.raises(InvalidRequest) as caught:
        CHAT.decode(json.dumps(HELLO | fields).encode(), strict=True)
    assert caught.value.param == expected[0]


def test_free_objects_are_not_looked_into():
    schema = {"type": "object", "properties": {"a": {}}, "anything": 1}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert strangers(tools=tools, chat_template_kwargs={"b": {"c": 1}}, documents=[schema]) == []


def test_what_an_earlier_answer_held_may_be_sent_back():
    answer = {"role": "assistant", "content": "a", "refusal": "no", "audio": None, "spam": None}
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert strangers(messages=[answer | {"tool_calls": [call], "annotations": []}]) == []


def test_a_name_is_told_once_however_many_items_have_it():
    wrong = [{"role": "user", "content": "a", "wight": 1}] * 3
    assert strangers(messages=[*HELLO["messages"], *wrong]) == ["messages[1].wight"]


def test_every_endpoint_looks_inside():
    wrong = {"messages": [{"role": "user", "content": "a", "x": 1}]}
    assert strangers(TOKENIZE, **wrong) == ["messages[0].x"]
    body = {"prompt": "a", "stream_options": {"x": 1}}
    assert COMPLETION.decode(json.dumps(body).encode()).unknown == ["stream_options.x"]


def test_the_nearest_path_is_suggested():
    body = {"messages": [{"role": "user", "content": "a", "contents": "b"}]}
    with pytest.raises(InvalidRequest, match=r"did you mean 'messages\[\]\.content'"):
        CHAT.decode(json.dumps(body).encode(), strict=True)


class Circle(msgspec.Struct, tag="circle", tag_field="type"):
    radius: int


class Group(msgspec.Struct, tag="group", tag_field="type"):
    shapes: "list[Circle | Group]"


class Drawing(msgspec.Struct):
    shape: Circle | Group
    mode: Literal["a"] = "a"


def test_records_told_apart_by_a_tag_that_hold_each_other():
    place = record_tree(Drawing)
    inner = {"type": "circle", "radius": 1, "shapes": []}
    body = {"shape": {"type": "group", "shapes": [{"type": "circle", "radius": 2}, inner]}}
    assert unknown_nested_fields(body, place) == ["shape.shapes[1].shapes"]
    assert "shape.shapes[].radius" in set(place.paths())
