"""Random schemas of tools, in every format: what the grammar lets through is read back as valid."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from pdserve.protocols.completion_requests import FunctionSpec, Tool
from tests.support.seeds import is_long, number_for, run_seed
from tests.text.formats import FORMATS, SLICE
from tests.text.tool_parsers.reading import calls, content, read
from tests.text.tool_parsers.test_tool_call_grammar import closers_of, finite, written

SCHEMAS = 200 if is_long() else 8
WORDS = ("city", "max_items", "when", "unit", "filter", "tags", "from_date", "notes", "x", "mode")
CHOICES = ("new", "old", "north east", "a/b", "é", "it's", "1")


def some(rng: Random, depth: int) -> dict[str, Any]:
    """A schema of one value."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "constant", "union"]
    kind = rng.choice(kinds + ["array", "object", "object"] * (depth > 0))
    match kind:
        case "enum":
            return {"type": "string", "enum": rng.sample(CHOICES, rng.randint(1, 4))}
        case "constant":
            return {"enum": rng.sample([0, 1, 2, 30], rng.randint(1, 3))}
        case "union":
            simple = rng.sample(["integer", "boolean", "null", "string"], 2)
            listed = [{"type": each} for each in simple]
            return {"anyOf": listed} if rng.random() < 0.5 else {"type": simple}
        case "array":
            return {"type": "array", "items": some(rng, depth - 1)} | (
                {"minItems": 1} if rng.random() < 0.3 else {}
            )
        case "object":
            return thing(rng, depth - 1)
        case _:
            return {"type": kind}


def thing(rng: Random, depth: int) -> dict[str, Any]:
    """A schema of an object."""
    names = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: some(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("name", SLICE)
def test_arguments_follow_their_schema(name: str):
    format = FORMATS[name]
    for number in range(SCHEMAS):
        rng = Random(number_for(run_seed(), f"{name} {number}"))
        schema = thing(rng, 2)
        spec = FunctionSpec(
            name=rng.choice(["f", "get_x", "a.b-c"]), parameters=schema, strict=True
        )
        tools = (Tool(function=spec), Tool(function=FunctionSpec(name="other", strict=True)))
        grammar = format.grammar(tools, spec.name, False)
        text = written(grammar, {}, rng, closers_of(name))
        found = read(lambda: format.parser(tools), [text])  # noqa: B023
        assert content(found) == "", text
        ((called, arguments),) = calls(found)
        assert called == spec.name, text
        value = json.loads(arguments, parse_float=finite)
        jsonschema_rs.validate(schema, value)
