"""Builds the grammar of Kimi K3's calls: arguments in schema order, each in a tag with its type."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pdserve.text.tool_parsers.tool_call_grammar import (
    ToolCallGrammar,
    json_schema_term,
    lark_string,
    properties_of,
    text_without,
)
from pdserve.text.tool_parsers.typed_values import ParameterTypes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolChoiceMode

_TYPES: Final = ("string", "number", "boolean", "null", "object", "array")
_KINDS: Final = {"integer": "number", **{each: each for each in _TYPES}}
"""What a tag calls each type of JSON schema."""
_VALUE_ENDS: Final = ("<|open|>", "<|close|>")


def before_answer(special: Mapping[str, int]) -> str:
    """A Lark term for the tag before an answer that follows a grammar. A prompt without thinking
    has it already."""
    if not {"<|open|>", "<|sep|>"} <= special.keys():
        return '"<|open|>response<|sep|>"?'
    return f'(<[{special["<|open|>"]}]> "response" <[{special["<|sep|>"]}]>)?'


class KimiK3Grammar:
    """The grammar of one request's tools."""

    def __init__(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None,
    ) -> None:
        self._grammar = ToolCallGrammar(tools, choice, parallel, special)

    def text(self) -> str:
        grammar = self._grammar
        call = grammar.any_call(self._call(tool) for tool in grammar.tools)
        calls = f"{grammar.sequence(call, '')} {self._close('tools')}"
        start = self._open("tools")
        if not grammar.free:
            shut = f"({self._open('response')})? ({self._close('response')})?"
            return grammar.text(f"{shut} {start} {calls} ({self._close('message')})?")
        if not grammar.is_special("<|open|>"):
            return grammar.tagged("<|open|>tools<|sep|>", calls, again=False)
        grammar.terminal(f"FREE: {text_without([])}")
        shut = f"({self._open('response')})? FREE ({self._close('response')})?"
        return grammar.text(f"{shut} ({start} {calls})? ({self._close('message')})?")

    def _open(self, tag: str) -> str:
        return self._grammar.markup(f"<|open|>{tag}<|sep|>")

    def _close(self, tag: str) -> str:
        return self._grammar.markup(f"<|close|>{tag}<|sep|>")

    def _call(self, tool: Tool) -> str:
        grammar = self._grammar
        grammar.begin(tool)
        grammar.terminal("CALL_INDEX: /[1-9][0-9]{0,2}/")
        schemas = ParameterTypes(tool)
        name = _escaped(tool.function.name)
        terms = [
            grammar.markup(f'<|open|>call tool="{name}" index="'),
            f"CALL_INDEX {grammar.markup(f'{chr(34)}<|sep|>')}",
        ]
        for key, described, must in properties_of(tool.function.parameters or {}):
            types = schemas.types(key, grammar.budget)
            options = self._parameter(tool, key, types, described)
            rule = grammar.rule("parameter", " | ".join(options))
            terms.append(rule if must else f"{rule}?")
        return " ".join([*terms, self._close("call")])

    def _parameter(
        self, tool: Tool, key: str, types: tuple[str, ...], schema: Any
    ) -> Iterable[str]:
        """Terms for the argument: one for text, one for other types."""
        values = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(values, list) and values:
            return [self._listed(key, value) for value in values]
        kinds = dict.fromkeys(_KINDS[each] for each in types if each in _KINDS)
        found = []
        if "string" in kinds or not kinds:
            found.append(f"{self._tag(key, 'string')} {self._text()}")
        others = [each for each in kinds if each != "string"]
        if others:
            tags = " | ".join(self._tag(key, kind) for kind in others)
            found.append(f"({tags}) {self._json(tool, schema)}")
        return found

    def _listed(self, key: str, value: Any) -> str:
        written = value if isinstance(value, str) else json.dumps(value)
        return f"{self._tag(key, _kind(value))} {lark_string(written)} {self._close('argument')}"

    def _tag(self, key: str, kind: str) -> str:
        return self._grammar.markup(f'<|open|>argument key="{_escaped(key)}" type="{kind}"<|sep|>')

    def _text(self) -> str:
        """Any text up to the end of the argument."""
        grammar = self._grammar
        banned = [each for each in _VALUE_ENDS if not grammar.is_special(each)]
        grammar.terminal(f"ARGUMENT_TEXT: {text_without(banned)}")
        return grammar.text_up_to("ARGUMENT_TEXT", "<|close|>argument<|sep|>")

    def _json(self, tool: Tool, schema: Any) -> str:
        root = tool.function.parameters or {}
        shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
        term = json_schema_term({**shared, **schema}, strict=bool(tool.function.strict))
        return f"{term} {self._close('argument')}"


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
    return "array"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")
