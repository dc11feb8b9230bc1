"""Builds the grammar of calls whose arguments stand between tags: parameters in schema order, each
by its type.

A string is any text in which the parser sees no end tag; of its schema only `enum` is enforced.
Values of other types are JSON by their schema.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pdserve.text.tool_parsers.tool_call_grammar import (
    ToolCallGrammar,
    json_schema_term,
    lark_string,
    properties_of,
    text_without,
)
from pdserve.text.tool_parsers.typed_values import ParameterTypes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolChoiceMode
    from pdserve.text.tool_parsers.tagged_calls.tag_syntax import TagSyntax

__all__ = ["shared_definitions", "tagged_grammar"]


def tagged_grammar(
    syntax: TagSyntax,
    tools: Sequence[Tool],
    choice: ToolChoiceMode,
    parallel: bool,
    special: Mapping[str, int] | None,
) -> str:
    """The grammar of `ToolFormat.grammar` for one family's tags."""
    return _TaggedGrammar(syntax, ToolCallGrammar(tools, choice, parallel, special)).text()


class _TaggedGrammar:
    def __init__(self, syntax: TagSyntax, grammar: ToolCallGrammar) -> None:
        self._syntax = syntax
        self._layout = syntax.layout
        self._grammar = grammar

    def text(self) -> str:
        syntax, layout, grammar = self._syntax, self._layout, self._grammar
        calls = grammar.any_call(self._call(tool) for tool in grammar.tools)
        if layout.between_calls is not None:
            calls = grammar.sequence(calls, grammar.markup(layout.between_calls))
        start = syntax.starts[0]
        # A line break is a term of its own, as it may stand before different tags.
        end = f"{grammar.markup(layout.block_end)} {grammar.markup(syntax.ends[0])}"
        body = f"{grammar.markup(layout.block)} {calls} {end}"
        between = grammar.markup(layout.between)
        bans = [each for each in (*syntax.starts, *syntax.openers) if each != start]
        if not syntax.wraps:
            return grammar.tagged(start, body, between=between, bans=bans)
        first, last = syntax.wraps
        block = grammar.rule("block", f"{grammar.markup(start)} {body}")
        blocks = grammar.sequence(block, between)
        wrapped = f"{between} {blocks} {between} {grammar.markup(last)}"
        return grammar.tagged(first, wrapped, again=False, bans=[*bans, start])

    def _call(self, tool: Tool) -> str:
        grammar, layout = self._grammar, self._layout
        grammar.begin(tool)
        schemas = ParameterTypes(tool)
        terms = [grammar.markup(layout.call.replace("{name}", tool.function.name))]
        for name, described, must in properties_of(tool.function.parameters or {}):
            types = schemas.types(name, grammar.budget)
            rule = grammar.rule("parameter", self._parameter(tool, name, types, described))
            terms.append(rule if must else f"{rule}?")
        return " ".join([*terms, grammar.markup(layout.call_end)])

    def _parameter(self, tool: Tool, name: str, types: tuple[str, ...], schema: Any) -> str:
        """A tag and its value; where the tag tells the type, one for strings and one for others."""
        if "{string}" not in self._layout.parameter:
            return f"{self._tag(name)} {self._value(tool, types, schema)}"
        values = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(values, list) and values:
            return " | ".join(self._listed(name, value) for value in values)
        as_text = f"{self._tag(name, 'true')} {self._text()}"
        others = tuple(each for each in types if each != "string")
        if not others:
            return as_text
        as_json = f"{self._tag(name, 'false')} {self._json(tool, schema)}"
        return as_json if "string" not in types else f"{as_text} | {as_json}"

    def _listed(self, name: str, value: Any) -> str:
        kind = "true" if isinstance(value, str) else "false"
        text = value if isinstance(value, str) else json.dumps(value)
        end = self._grammar.markup(self._layout.value_end)
        return f"{self._tag(name, kind)} {lark_string(text)} {end}"

    def _tag(self, name: str, string: str = "") -> str:
        told = self._layout.parameter.replace("{name}", name).replace("{string}", string)
        return self._grammar.markup(told)

    def _value(self, tool: Tool, types: tuple[str, ...], schema: Any) -> str:
        values = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(values, list) and values:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in values]
            end = self._grammar.markup(self._layout.value_end)
            return "(" + " | ".join(f"{lark_string(text)} {end}" for text in texts) + ")"
        return self._text() if "string" in types else self._json(tool, schema)

    def _text(self) -> str:
        """Any text up to the end of a value."""
        syntax, grammar = self._syntax, self._grammar
        line = "\n" if syntax.unended == "line" else ""
        bans = [*syntax.value_ends, *([line + syntax.parameter.begin] if syntax.unended else [])]
        bans = [each for each in bans if not grammar.has_special(each)]
        grammar.terminal(f"PARAMETER_TEXT: {text_without(bans)}")
        return grammar.text_up_to("PARAMETER_TEXT", self._layout.value_end)

    def _json(self, tool: Tool, schema: Any) -> str:
        described = {**shared_definitions(tool, schema), **schema}
        term = json_schema_term(described, strict=bool(tool.function.strict))
        return f"{term} {self._grammar.markup(self._layout.value_end)}"


def shared_definitions(tool: Tool, schema: Any) -> dict[str, Any]:
    """The parts of the tool's schema that one parameter's schema may refer to."""
    if '"$ref"' not in json.dumps(schema):
        return {}
    root = tool.function.parameters or {}
    return {key: root[key] for key in ("$defs", "definitions") if key in root}
