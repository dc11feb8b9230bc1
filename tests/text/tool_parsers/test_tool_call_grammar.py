"""What the grammars of calls allow, the parsers read: as calls of the right tools, whole and valid.

A matcher says which tokens may come next and chance picks one of them, so what is read here was
written by nobody.
"""

from __future__ import annotations

import json
import tracemalloc
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import numpy
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

import pdserve
from pdserve.errors import InvalidRequest
from pdserve.protocols.completion_requests import FunctionSpec, Tool
from tests.support.seeds import is_long, number_for, run_seed
from tests.text.formats import CORPORA, FORMATS, SLICE, unions_as_text
from tests.text.golden.samples import tool
from tests.text.tool_parsers.reading import calls, content, read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TOKENIZER = Path(pdserve.__file__).parent / "bundled" / "tokenizer.json"
END = 3
"""The id of the bundled tokenizer's token that ends an answer."""
SPECIAL = (0, 1, 2)
"""Ids of special tokens, which stand in for the markers that the bundled tokenizer lacks."""
SEED = number_for(run_seed(), __name__)
SEEDS = 12 if is_long() else 3
PATIENCE = 60
"""Tokens after which chance is no longer asked where something can be closed."""
CLOSERS = ("\n</parameter>\n", '"', "'", "}", "]", ")", ", ", ",", ": 1", "1", "</function>")

TOOLS = (
    tool(
        "search.web-2",
        True,
        query={"type": "string"},
        opt_limit={"type": "integer"},
        opt_kind={"enum": ["new", "</x>", 'it\'s "q"', "", "é😀\u2028\x7f"]},
        opt_ratio={"type": "number"},
    ),
    tool(
        "plan",
        True,
        steps={"type": "array", "items": {"type": "string"}, "minItems": 1},
        opt_tree={"$ref": "#/$defs/node"},
        opt_flag={"type": ["boolean", "null"]},
        opt_point={
            "type": "object",
            "properties": {"x y": {"type": "number"}, "ключ": {"type": "null"}},
            "required": ["x y"],
            "additionalProperties": False,
        },
        opt_union={"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]},
    ),
    Tool(function=FunctionSpec(name="now", strict=True)),
)
LOOSE = Tool(function=FunctionSpec(name="anything"))


@lru_cache(maxsize=1)
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TOKENIZER.read_text("utf-8"), eos_token=END)


def specials(name: str) -> dict[str, int]:
    return dict(zip(FORMATS[name].markers, SPECIAL, strict=False))


def written(
    grammar: str, special: Mapping[str, int], chance: Random, closers: Sequence[str] = CLOSERS
) -> str:
    """A text that the grammar allows. `closers`: texts that close something; the first that fits is
    taken."""
    closing = [ids_of(each, special) for each in closers]
    matcher = LLMatcher(tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < 3000:
        ids += step(matcher, chance, closing, hurried=len(ids) > PATIENCE)
        assert not matcher.is_error(), matcher.get_error()
    assert matcher.is_stopped(), "no end was found"
    names = {id: marker for marker, id in special.items()}
    text = b"".join(
        names[id].encode() if id in names else tokenizer().decode_bytes([id])
        for id in ids
        if id != END
    )
    return text.decode()


def closers_of(name: str) -> tuple[str, ...]:
    """What closes a value in this format: its own first, since values may contain the others."""
    return (*getattr(CORPORA[name], "CLOSERS", ()), *CLOSERS)


def ids_of(text: str, special: Mapping[str, int]) -> list[int]:
    """Tokens of text that may contain markers."""
    for marker, id in special.items():
        before, found, after = text.partition(marker)
        if found:
            return [*ids_of(before, special), id, *ids_of(after, special)]
    return tokenizer().tokenize_str(text) if text else []


def step(
    matcher: LLMatcher, chance: Random, closing: Sequence[list[int]], *, hurried: bool
) -> list[int]:
    bits = numpy.frombuffer(matcher.compute_bitmask(), dtype=numpy.uint8)
    allowed = numpy.flatnonzero(numpy.unpackbits(bits, bitorder="little"))
    assert len(allowed), "nothing may follow"
    if hurried or chance.random() < 0.2:
        if END in allowed:
            return taken(matcher, [END])
        for ids in closing:
            if matcher.validate_tokens(ids) == len(ids):
                return taken(matcher, ids)
    return taken(matcher, [int(chance.choice(allowed))])


def taken(matcher: LLMatcher, ids: list[int]) -> list[int]:
    assert matcher.consume_tokens(ids)
    return ids


def finite(text: str) -> float:
    """A number that a validator takes for one."""
    return max(-1e300, min(float(text), 1e300))


def check_call(name: str, arguments: str, tools: Sequence[Tool], *, as_text: bool) -> None:
    called = next(each for each in tools if each.function.name == name)
    value = json.loads(arguments, parse_float=finite)
    assert isinstance(value, dict)
    schema: dict[str, Any] = called.function.parameters or {}
    if as_text and "union" in str(schema):
        schema = {**schema, "properties": {**schema["properties"], "opt_union": {}}}
    jsonschema_rs.validate(schema, value)
    if schema == {} and called.function.strict:
        assert value == {}


CHOICES = [
    (choice, parallel, special)
    for choice in ("required", "plan", "auto")
    for parallel in (True, False)
    for special in (False, True)
]


@pytest.mark.parametrize(("choice", "parallel", "special"), CHOICES)
@pytest.mark.parametrize("name", SLICE)
def test_what_the_grammar_allows_is_read_as_calls(
    name: str, choice: str, parallel: bool, special: bool
):
    format = FORMATS[name]
    ids = specials(name) if special else {}
    grammar = format.grammar(TOOLS, choice, parallel, ids)
    for number in range(SEEDS):
        chance = Random(number_for(run_seed(), f"{name} {choice} {parallel} {special} {number}"))
        text = written(grammar, ids, chance, closers_of(name))
        parts = read(lambda: format.parser(TOOLS), [text])
        found = calls(parts)
        for called, arguments in found:
            check_call(called, arguments, TOOLS, as_text=unions_as_text(name))
        if choice != "auto":
            assert content(parts) == "", text
            assert found, text
        if choice == "plan":
            assert {called for called, _ in found} == {"plan"}
        if not parallel:
            assert len(found) <= 1


@pytest.mark.parametrize("name", FORMATS)
def test_in_free_text_a_call_that_has_begun_is_enforced(name: str):
    format = FORMATS[name]
    matcher = LLMatcher(tokenizer(), format.grammar(TOOLS, "auto", True), log_level=0)
    assert matcher.consume_tokens(tokenizer().tokenize_str(CORPORA[name].TRIGGER))
    wrong = tokenizer().tokenize_str("nonsense")
    assert matcher.validate_tokens(wrong) < len(wrong)
    assert not matcher.is_accepting()


@pytest.mark.parametrize("name", FORMATS)
def test_free_text_may_be_all_there_is(name: str):
    grammar = FORMATS[name].grammar(TOOLS, "auto", True)
    matcher = LLMatcher(tokenizer(), grammar, log_level=0)
    assert matcher.consume_tokens(tokenizer().tokenize_str("Hello, <b>{you}</b> [1]!\n\nBye."))
    assert matcher.is_accepting()


MARKED = [name for name, format in FORMATS.items() if format.starts[0] in format.markers]


@pytest.mark.parametrize("name", MARKED)
def test_a_marker_that_is_a_token_is_enforced_as_one(name: str):
    format = FORMATS[name]
    ids = specials(name)
    start = format.starts[0]
    free = LLMatcher(tokenizer(), format.grammar(TOOLS, "auto", True, ids), log_level=0)
    assert free.consume_tokens([*tokenizer().tokenize_str("So: "), ids[start]])
    wrong = tokenizer().tokenize_str("nonsense")
    assert free.validate_tokens(wrong) < len(wrong)


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_without_a_schema_takes_what_it_is_given(name: str):
    format = FORMATS[name]
    grammar = format.grammar([LOOSE], "required", False)
    assert LLMatcher.validate_grammar(grammar, tokenizer()) == ""
    found = calls(
        read(lambda: format.parser([LOOSE]), [written(grammar, {}, Random(1), closers_of(name))])
    )
    assert [each for each, _ in found] == ["anything"]
    assert isinstance(json.loads(found[0][1]), dict)


VALUE_PIECES = (
    "\n",
    "\r\n",
    "</parameter>",
    "</function>",
    "<parameter=",
    "</tool_call>",
    "<",
    "x",
)


@seed(SEED)
@settings(max_examples=1000 if is_long() else 50, deadline=None, database=None)
@given(st.lists(st.sampled_from(VALUE_PIECES), max_size=6).map("".join))
def test_a_string_that_the_grammar_of_qwen3_coder_allows_is_read_back(value: str):
    format = FORMATS["qwen3_coder"]
    text = (
        f"<tool_call>\n<function=search.web-2>\n<parameter=query>\n{value}\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    matcher = LLMatcher(tokenizer(), format.grammar(TOOLS, "required", False), log_level=0)
    ids = tokenizer().tokenize_str(text)
    if matcher.validate_tokens(ids) < len(ids):
        assert "</parameter>" in value or "</function>" in value or "\n<parameter=" in value
        return
    found = calls(read(lambda: format.parser(TOOLS), text))
    assert [(name, json.loads(each)) for name, each in found] == [
        ("search.web-2", {"query": value})
    ]


def test_a_tool_that_is_not_there_cannot_be_called():
    with pytest.raises(ValueError, match="no tool"):
        FORMATS["hermes"].grammar(TOOLS, "nothing", True)


def test_what_cannot_be_enforced_matters_only_to_strict_tools():
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "no-such"}}}
    for strict in (False, True):
        one = Tool(function=FunctionSpec(name="f", parameters=schema, strict=strict))
        grammar = FORMATS["hermes"].grammar([one], "required", True)
        assert bool(LLMatcher.validate_grammar(grammar, tokenizer())) is strict


def nested(depth: int, **more: Any) -> Tool:
    """A parameter that is a list of lists, `depth` of them."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema} | more
    return Tool(function=FunctionSpec(name="f", parameters={"properties": {"x": schema}}))


def test_lists_in_lists_make_a_grammar_as_long_as_their_schema():
    """An item is written down twice: so it is a rule, or each level would double the grammar."""
    ten, twenty, forty = (
        len(FORMATS["pythonic"].grammar([nested(depth)], "required", True))
        for depth in (10, 20, 40)
    )
    assert forty - twenty <= 2.2 * (twenty - ten)


def test_a_type_that_is_listed_repeatedly_counts_once():
    format = FORMATS["pythonic"]
    once = format.grammar([nested(20, type=["array"])], "required", True)
    assert format.grammar([nested(20, type=["array"] * 50)], "required", True) == once


BOMBS: dict[str, Any] = {
    "a value in each tool": {"properties": {f"p{n}": {"enum": [f"{n}" * 50]} for n in range(1500)}},
    "definitions of each parameter": {
        "properties": {f"p{n}": {"type": "object", "x": {"$ref": "#"}} for n in range(200)},
        "$defs": {"a": {"enum": ["x" * 4000]}},
    },
}


LARGE = [
    (name, bomb)
    for name in SLICE
    for bomb in BOMBS
    if not (bomb.startswith("definitions") and getattr(CORPORA[name], "WITHOUT_DEFINITIONS", False))
]


@pytest.mark.parametrize(("name", "bomb"), LARGE)
def test_characters_are_counted_while_a_grammar_is_made(name: str, bomb: str):
    """Of many tools that are too large together no more is made than fits."""
    many = [
        Tool(function=FunctionSpec(name=f"f{n}", parameters=BOMBS[bomb], strict=True))
        for n in range(128)
    ]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="come to a grammar of more than") as caught:
            FORMATS[name].grammar(many, "required", True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value.param).startswith("tools[")
    assert peak < 4e6


NO_SCHEMAS: list[Any] = [
    {"enum": 7},
    {"enum": {"a": 1}},
    {"enum": []},
    {"anyOf": []},
    {"type": []},
    {"type": [7, None, ["array"]]},
    {"type": {"a": 1}},
    {"required": 7, "properties": 7},
    {"required": [["a"], 7], "properties": {"a": {}}},
    {"items": 7, "type": "array"},
    {"$ref": 7},
    {"$ref": "#"},
    {"$ref": "#/properties/x"},
    {"$ref": "#/~2/~/"},
]


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_that_is_none_makes_a_grammar_of_some_kind(name: str):
    for schema in NO_SCHEMAS:
        tools = [
            Tool(function=FunctionSpec(name="f", parameters={"properties": {"x": schema}})),
            Tool(function=FunctionSpec(name="g", parameters=schema)),
        ]
        assert "start:" in FORMATS[name].grammar(tools, "required", True), schema
