"""Arguments of calls in Python that nobody should write."""

from __future__ import annotations

import pytest

from pdserve.text.tool_parsers.python_calls.pythonic import arguments_json


@pytest.mark.parametrize(
    "value",
    [
        "__import__('os')",
        "x.y",
        "lambda: 1",
        "[x for x in y]",
        "b'x'",
        "1j",
        "...",
        "{1: 2}",
        "{**a}",
        "*a",
        "-True and 1",
        "--1",
        "1) + (2",
        "",
        "'\\ud800'",
        "'\\N{no such name}'",
        "1" * 5000,
        "-" * 100_000 + "1",
        "a" + ".a" * 100_000,
        "[" * 1000 + "]" * 1000,
        "\0",
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_literal_is_refused(value: str):
    assert arguments_json([f"a={value}"]) is None


def test_a_comma_may_stand_only_at_the_end():
    assert arguments_json([""]) == "{}"
    assert arguments_json(["a=1", " "]) == '{"a": 1}'
    assert arguments_json(["a=1", "", "b=2"]) is None
    assert arguments_json(["", "a=1"]) is None
