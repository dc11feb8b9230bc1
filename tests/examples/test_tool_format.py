"""The example of a tool-call format is loaded by its name, read however cut, and enforced."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.text.tool_parsers import tool_format
from tests.text.golden.samples import TOOLS
from tests.text.tool_parsers.reading import calls, content, cut, read
from tests.text.tool_parsers.test_tool_call_grammar import TOOLS as STRICT
from tests.text.tool_parsers.test_tool_call_grammar import check_call, written

if TYPE_CHECKING:
    from pdserve.text.tool_parsers.base import ToolFormat

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_format"


@pytest.fixture
def format(monkeypatch: pytest.MonkeyPatch) -> ToolFormat:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "at_calls", raising=False)
    tool_format.cache_clear()
    return tool_format("at_calls:AtCalls")


@pytest.mark.parametrize(
    ("text", "shown", "called"),
    [
        ("No call.", "No call.", []),
        ('@call now {"a": [1]}', "", [("now", '{"a": [1]}')]),
        ('Well.\n@call now {}\n@call get_weather {"city": "Ulm"}\n', "Well.", None),
        ("@call nothing here", "nothing here", []),
    ],
)
def test_it_reads_calls(format: ToolFormat, text: str, shown: str, called: list | None):
    def make():
        return format.parser(TOOLS)

    whole = read(make, [text])
    assert content(whole) == shown
    assert called is None or calls(whole) == called
    assert called is not None or [name for name, _ in calls(whole)] == ["now", "get_weather"]
    assert read(make, text) == whole
    for pair in combinations(range(len(text) + 1), 2):
        assert read(make, cut(text, pair)) == whole


@pytest.mark.parametrize("number", range(3))
def test_it_enforces_calls(format: ToolFormat, number: int):
    text = written(format.grammar(STRICT, "required", True), {}, Random(number))
    found = calls(read(lambda: format.parser(STRICT), [text]))
    assert found
    for name, arguments in found:
        check_call(name, arguments, STRICT, as_text=False)
