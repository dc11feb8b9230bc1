"""What a value written as plain text means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.protocols.completion_requests import FunctionSpec, Tool
from pdserve.text.tool_parsers.schema_budget import MAX_STEPS, SchemaBudget
from pdserve.text.tool_parsers.typed_values import (
    MAX_PARAMETER_STEPS,
    ParameterTypes,
    check_parameters,
    json_or_text,
    value_as_json,
)


def types_of(schema: Any, **more: Any) -> tuple[str, ...]:
    parameters = {"type": "object", "properties": {"a": schema}, **more}
    return ParameterTypes(Tool(function=FunctionSpec(name="f", parameters=parameters))).types("a")


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
        ({"$ref": "#"}, ("object",)),
        ({"type": "date"}, ("date",)),
        ({"type": ["float", "int", "bool"]}, ("number", "integer", "boolean")),
        ({"type": ["dict", "list", "str", "None"]}, ("object", "array", "string", "null")),
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


def bomb(references: int) -> dict[str, Any]:
    """Each leads back to the parameter: what follows all of them blindly never ends."""
    return {"anyOf": [{"$ref": "#/properties/a"}] * references}


def test_a_schema_that_refers_to_itself_is_looked_at_once():
    assert types_of(bomb(100)) == ("string",)
    steps = SchemaBudget("tools")
    schemas = ParameterTypes(
        Tool(function=FunctionSpec(name="f", parameters={"properties": {"a": bomb(100)}}))
    )
    schemas.types("a", steps)
    assert steps.steps < 500
    schemas.types("a", steps)
    assert steps.steps < 500, "it is remembered"


@pytest.mark.parametrize(
    "schema",
    [
        bomb(MAX_PARAMETER_STEPS),
        {"type": ["string"] * MAX_PARAMETER_STEPS},
        {"enum": [1] * 64 * MAX_PARAMETER_STEPS},
        {"$ref": "#" + "/x" * MAX_PARAMETER_STEPS},
        {"allOf": [{"anyOf": [{} for _ in range(100)]} for _ in range(100)]},
    ],
)
def test_a_parameter_of_too_many_schemas_is_refused_by_its_tool(schema: Any):
    tools = [
        Tool(function=FunctionSpec(name=name, parameters={"properties": {"a": each}}))
        for name, each in (("good", {"type": "integer"}), ("bad", schema))
    ]
    check_parameters(tools[:1])
    with pytest.raises(InvalidRequest, match="too complex") as caught:
        check_parameters(tools)
    assert caught.value.param == "tools[1].function.parameters"


def test_all_parameters_together_are_bounded():
    many = {f"p{number}": bomb(400) for number in range(1 + MAX_STEPS // 800)}
    shared = {name: {"$ref": "#/properties/p0"} for name in map(str, range(1000))}
    tool = Tool(function=FunctionSpec(name="f", parameters={"properties": many | shared}))
    with pytest.raises(InvalidRequest, match=f"more than {MAX_STEPS} steps"):
        check_parameters([tool])


def test_what_is_not_described_is_a_string():
    assert ParameterTypes(None).types("a") == ("string",)
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
    assert json.loads(value_as_json(text, tuple(types))) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"a\\qb"', "a\\qb"),
        (' "a\nb" ', "a\nb"),
        ('"a\\u12"', "a\\u12"),
        ('"a" b', '"a" b'),
        ('"a', '"a'),
        ('"a\\', '"a\\'),
        ("a\\qb", "a\\qb"),
        ('{"a": NaN}', '{"a": NaN}'),
        ("1e999", "1e999"),
    ],
)
def test_a_text_between_quotes_is_a_string_whatever_it_escapes(text: str, value: str):
    assert json.loads(json_or_text(text)) == value


def test_half_of_a_surrogate_pair_is_not_sent():
    for text in (r"{'a': '\ud800'}", r"{\"a\": \"\ud800\"}"):
        value = value_as_json(text, ("object",))
        value.encode()
        assert json.loads(value) == text
