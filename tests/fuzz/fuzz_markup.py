"""Fuzz target: what a model may write where calls of tools and reasoning are read.

    python -m tests.fuzz markup -max_total_time=60

Whatever it is and wherever it is cut, each format's parser ends, its parts are in order, and they
add up to what the uncut text gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.protocols.completion_requests import FunctionSpec, Tool
from pdserve.text.output_parts import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_parts,
)
from pdserve.text.reasoning_parsers import REASONING_PARSERS, reasoning_format
from pdserve.text.tool_parsers import ALIASES, TOOL_PARSERS, tool_format
from tests.fuzz.input import Input

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.text.output_parts import OutputParser, OutputPart

__all__ = ["PARSERS", "fuzz", "seeds"]

_TYPES: Final = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "object"}}
TOOLS: Final = [
    Tool(function=FunctionSpec(name="f", parameters={"type": "object", "properties": _TYPES})),
    Tool(function=FunctionSpec(name="g.h")),
]
_REASONING: Final = {target: name for name, target in REASONING_PARSERS.items()}
"""One name of each format."""
PARSERS: Final = [
    (tool, reasoning, begun)
    for tool in (None, *sorted(set(TOOL_PARSERS) - set(ALIASES)))
    for reasoning in (None, *sorted(_REASONING.values()))
    for begun in (False, True)
    if (tool or reasoning) and not (begun and reasoning is None)
]


def _parser(number: int) -> OutputParser:
    tool, reasoning, begun = PARSERS[number % len(PARSERS)]
    inner = None if tool is None else tool_format(tool).parser(TOOLS)
    if reasoning is not None:
        return reasoning_format(reasoning).parser(begun, inner)
    assert inner is not None  # PARSERS has no empty entry
    return inner


def fuzz(data: bytes) -> None:
    """One input: a parser, how the text is cut, and the text."""
    source = Input(data)
    number, step = source.number(2), 1 + source.number() % 7
    text = source.bytes(len(data)).decode(errors="replace")
    whole = _read(number, [text] if text else [])
    cut = _read(number, [text[at : at + step] for at in range(0, len(text), step)])
    assert cut == whole, (cut, whole)
    _check(whole)
    assert sum(len(part.text) for part in whole if isinstance(part, ContentDelta)) <= len(text)


def _read(number: int, texts: Iterable[str]) -> list[OutputPart]:
    parser = _parser(number)
    parts: list[OutputPart] = []
    for text in texts:
        parts += parser.feed(text)
    return merge_parts([*parts, *parser.finish()])


def _check(parts: list[OutputPart]) -> None:
    """Calls are numbered as they begin, and arguments are of a call that has begun."""
    begun = 0
    for part in parts:
        match part:
            case ToolCallStart(index, name):
                assert index == begun
                assert name
                begun += 1
            case ToolCallArguments(index, text):
                assert index < begun
                assert text
            case ContentDelta(text) | ReasoningDelta(text):
                assert text


_TEXTS: Final = [
    '<think>\nx\n</think>\n\nhi <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    '{"name": "f", "parameters": {"b": "\\u00e9"}}; {"name": "g.h", "parameters": {}}',
    "[f(a=1, b='x\\n', c={'k': [True, None]}), g.h()]",
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    '[THINK]x[/THINK][TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g.h[ARGS]{}',
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    '<tool_calls>[{"name": "f", "arguments": {"a": 1}}, {"name": "g.h"}]</tool_calls>',
    '<|tools_prefix|>[{"f": {"a": 1}}, {"g.h": null}]<|tools_suffix|>',
    '<|START_THINKING|>x<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f",'
    ' "parameters": {}}]<|END_ACTION|><|START_RESPONSE|>hi<|END_RESPONSE|>',
    "<seed:think>x</seed:think><seed:tool_call><function=f><parameter=a>1</parameter></function>",
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value></tool_call>"
    "<tool_call>g.h</tool_call>",
    "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource><arg_key:opensource>b"
    "</arg_key:opensource><arg_value:opensource>x</arg_value:opensource></tool_call:opensource>",
    '<minimax:tool_call><invoke name="f"><parameter name="b">x</parameter></invoke>'
    '<invoke name="g.h">',
    '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1'
    '</｜DSML｜parameter><｜DSML｜parameter name="b" string="true">x</｜DSML｜invoke>',
    ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<c>]<]minimax[>[<k>1'
    "]<]minimax[>[</k>]<]minimax[>[</c>]<]minimax[>[<b>x]<]minimax[>[</b>]<]minimax[>[</invoke>",
    '<function name="f"><param name="b"><![CDATA[<x>]]></param></function>'
    '<function name="g.h"></function>',
    "<|tool_call_start|>[f(a=1, b='it's'), g.h()]<|tool_call_end|><function_calls>f(a=07)\ng.h()",
    '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">'
    '<steptml:parameter name="a">1</steptml:parameter></steptml:invoke><｜tool_call_end｜>',
    'functools[{"name": "f", "arguments": {}}] ```json\n[{"name": "f", "arguments": {}}]\n```',
]


def seeds() -> list[bytes]:
    """Three forms of calls for every parser."""
    return [
        number.to_bytes(2, "big")
        + bytes([number % 7])
        + _TEXTS[(number + more) % len(_TEXTS)].encode()
        for number in range(len(PARSERS))
        for more in (0, 3, 7)
    ]
