"""What a value written as plain text means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.openai.schema import FunctionSpec, Tool
from pdserve.text.tools.qwen3_values import Schemas, written


def types_of(schema: Any, **more: Any) -> tuple[str, ...]:
    parameters = {"type": "object", "properties": {"a": schema}, **more}
    return Schemas(Tool(function=FunctionSpec(name="f", parameters=parameters))).types("a")


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, ("integer",)),
        ({"type": ["string", "null"]}, ("string", "null")),
        ({"type": "number", "nullable": True}, ("number", "null")),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]},
         ("string", "integer", "number", "null", "boolean", "array", "object")),
        ({"const": 3}, ("integer",)),
        ({"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}]}]}, ("integer", "null")),
        ({"allOf": [{"$ref": "#/$defs/x~1y"}]}, ("array",)),
        ({"$ref": "#/$defs/loop"}, ("boolean",)),
        ({"$ref": "#/$defs/nowhere"}, ("string",)),
        ({"$ref": "https://example.org"}, ("string",)),
        ({"type": "date"}, ("date",)),
        ({}, ("string",)),
        (True, ("string",)),
        ({"type": 7, "enum": "a", "anyOf": {}}, ("string",)),
    ],
)  # fmt: skip
def test_types_follow_from_the_schema(schema: Any, types: tuple[str, ...]):
    definitions = {
        "x/y": {"type": "array"},
        "loop": {"type": "boolean", "anyOf": [{"$ref": "#/$defs/loop"}]},
    }
    assert types_of(schema, **{"$defs": definitions}) == types


def test_what_is_not_described_is_a_string():
    assert Schemas(None).types("a") == ("string",)
    assert types_of({"type": "integer"}, properties=["a"]) == ("string",)


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", ["integer"], 5),
        (" -5\n", ["integer"], -5),
        ("+05", ["integer"], 5),
        ("5.0", ["integer"], 5),
        ("5.5", ["integer"], "5.5"),
        ("five", ["integer"], "five"),
        ("٣", ["integer"], 3),
        ("1" * 5000, ["integer"], "1" * 5000),
        ("1.50", ["number"], 1.5),
        ("2E400", ["number"], float("inf")),
        (".5", ["number"], 0.5),
        ("inf", ["number"], "inf"),
        ("nan", ["number"], "nan"),
        ("TRUE", ["boolean"], True),
        ("yes", ["boolean"], "yes"),
        ("null", ["null", "string"], None),
        ("null", ["string", "integer"], "null"),
        ("7", ["string", "integer"], 7),
        ('{"a": [1]}', ["object"], {"a": [1]}),
        ("{'a': None}", ["object"], {"a": None}),
        ("[1]", ["object"], "[1]"),
        ("[NaN]", ["array"], "[NaN]"),
        ("(1,)", ["array"], "(1,)"),
        ("['a'", ["array"], "['a'"),
        ("{'a': {1}}", ["object"], "{'a': {1}}"),
        ("[" * 100_000, ["array"], "[" * 100_000),
        ("-" * 100_000 + "1", ["array"], "-" * 100_000 + "1"),
        ("2026-01-01", ["date"], "2026-01-01"),
        (" kept \n", ["date"], " kept \n"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_value_is_of_the_narrowest_type_that_fits(text: str, types: list[str], value: Any):
    assert json.loads(written(text, tuple(types))) == value
