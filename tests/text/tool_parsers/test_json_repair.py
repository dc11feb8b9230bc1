"""Tokens in any order become valid JSON, and valid JSON stays as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.incremental_reader import IncrementalReader
from pdserve.text.tool_parsers.json_repair import JsonRepair, bare_as_json
from pdserve.text.tool_parsers.partial_json import JsonValue

TOKENS = ("{", "}", "[", "]", ",", ":", '"s"', "word", " ", "\n")


def tell(json: JsonRepair, token: str) -> str:
    match token:
        case "{" | "[":
            return json.open(token)
        case "}" | "]":
            return json.close() if json.depth else ""
        case ",":
            return json.comma()
        case ":":
            return json.colon()
        case '"s"':
            return json.string() + token
        case _ if token.isspace():
            return json.blank(token)
        case _:
            return json.bare(token)


def told(tokens: list[str]) -> str:
    """The output for an object's tokens, up to its end."""
    json = JsonRepair()
    text = json.open("{")
    for token in tokens:
        if json.depth:
            text += tell(json, token)
    return text + json.end()


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


@given(st.lists(st.sampled_from(TOKENS), max_size=25))
def test_any_tokens_become_an_object(tokens: list[str]):
    assert isinstance(strict(told(tokens)), dict)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (['"s"', ":", "1", ",", "}"], '{"s":1}'),
        (['"s"', "1", '"s"', '"s"'], '{"s": 1, "s": "s"}'),
        (['"s"', ",", '"s"', ":", ","], '{"s": null,"s":null}'),
        (["key", ":", "[", ",", "1", ",", ",", "x", "y", "}"], '{"key":[1,"x"]}'),
        (["{", "}", ",", " ", "[", "]"], '{"": {}, "": []}'),
        (['"s"', ":", "{", '"s"', ":", "]"], '{"s":{"s":null}}'),
        ([":", ":", ","], "{}"),
    ],
)
def test_what_is_missing_is_added_and_what_is_too_much_is_left_out(tokens: list[str], text: str):
    assert told(tokens) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1", 1), ("-0.5e3", -500.0), ("7.", 7.0), ("True", True), ("none", None), ("nil", None)),
        *(("01", "01"), ("1_000", "1_000"), (".5", ".5"), ("NaN", "NaN"), ("-", "-"), ("é", "é")),
    ],
)
def test_a_text_without_quotes(text: str, value: object):
    assert strict(bare_as_json(text)) == value


# ---------------------------------------------------------------- texts


def taken(text: str, size: int = 0) -> tuple[str, bool]:
    """What a value's text becomes, read in pieces of a size, and whether it is complete."""
    reader = IncrementalReader(lambda: False)
    value, found = JsonValue(), ""
    for at in range(0, len(text), size or len(text)):
        reader.text = reader.text[reader.at :] + text[at : at + (size or len(text))]
        reader.at = 0
        found += value.take(reader)
    reader.last = True
    return found + value.take(reader), value.done


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text(max_size=3), VALUES, max_size=4),
    st.sampled_from([None, 0, 2, "\t"]),
    st.booleans(),
    st.integers(1, 9),
)
def test_valid_json_stays_as_it_is(value: Any, indent: Any, ascii: bool, size: int):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    if "Infinity" not in text:
        assert taken(text, size) == (text, True)


@given(
    st.dictionaries(st.text(max_size=3), VALUES, max_size=4),
    st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["", *"\"'\\{}[],:1x \n\x01"]))),
    st.integers(1, 9),
)
def test_whatever_is_wrong_a_complete_text_is_valid(
    value: Any, slips: list[tuple[int, str]], size: int
):
    text = json.dumps(value)
    for place, slip in slips:
        at = place % len(text)
        text = text[:at] + slip + text[at + 1 :]
        text = text or "{"
    text = "{" + text
    found, done = taken(text)
    assert taken(text, size) == (found, done)
    if done:
        assert isinstance(strict(found), dict)
