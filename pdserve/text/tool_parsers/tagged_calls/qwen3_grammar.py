"""Builds the grammar of Qwen3-Coder's calls: parameters in schema order, each by its type.

A string is any text in which the parser sees no end tag; of its schema only `enum` is enforced.
Values of other types are JSON by their schema.
"""

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
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolChoiceMode

_END: Final = "\n</parameter>\n"
_ENDS: Final = ("</parameter>", "\n<parameter=", "</function>")


def qwen3_grammar(
    tools: Sequence[Tool], choice: ToolChoiceMode, parallel: bool, special: Mapping[str, int] | None
) -> str:
    grammar = ToolCallGrammar(tools, choice, parallel, special)
    calls = grammar.any_call(_call(grammar, tool) for tool in grammar.tools)
    body = f'"\\n" {calls} "\\n" {grammar.marker("</tool_call>")}'
    return grammar.tagged("<tool_call>", body, between='"\\n"', bans="<function=")


def _call(grammar: ToolCallGrammar, tool: Tool) -> str:
    grammar.begin(tool)
    schemas = ParameterTypes(tool)
    terms = [lark_string(f"<function={tool.function.name}>\n")]
    for name, described, must in properties_of(tool.function.parameters or {}):
        types = schemas.types(name, grammar.budget)
        value = _value(grammar, tool, types, described)
        rule = grammar.rule("parameter", f"{lark_string(f'<parameter={name}>' + chr(10))} {value}")
        terms.append(rule if must else f"{rule}?")
    return " ".join([*terms, '"</function>"'])


def _value(grammar: ToolCallGrammar, tool: Tool, types: tuple[str, ...], schema: Any) -> str:
    values = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(values, list) and values:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in values]
        return "(" + " | ".join(lark_string(text + _END) for text in texts) + ")"
    if "string" in types:
        grammar.terminal(f"PARAMETER_TEXT: {text_without(_ENDS)}")
        grammar.terminal(f"PARAMETER_VALUE: PARAMETER_TEXT {lark_string(_END)}")
        return "PARAMETER_VALUE"
    described = {**_shared(tool, schema), **schema}
    return f"{json_schema_term(described, strict=bool(tool.function.strict))} {lark_string(_END)}"


def _shared(tool: Tool, schema: Any) -> dict[str, Any]:
    """The parts of the tool's schema that one parameter's schema may refer to."""
    if '"$ref"' not in json.dumps(schema):
        return {}
    root = tool.function.parameters or {}
    return {key: root[key] for key in ("$defs", "definitions") if key in root}
