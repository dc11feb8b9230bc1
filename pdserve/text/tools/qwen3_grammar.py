"""The grammar of Qwen3-Coder's calls: parameters in the order of the schema, each as its type.

A string is any text in which the parser sees no end of a value; of its schema only `enum` is
enforced. Values of other types are JSON by their schema.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pdserve.text.tools.grammar import Grammar, guided, quoted, without
from pdserve.text.tools.qwen3_values import Schemas

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.openai.schema import Tool
    from pdserve.text.tools.base import Choice

_END: Final = "\n</parameter>\n"
_ENDS: Final = ("</parameter>", "\n<parameter=", "</function>")


def qwen3_grammar(
    tools: Sequence[Tool], choice: Choice, parallel: bool, special: Mapping[str, int] | None
) -> str:
    grammar = Grammar(tools, choice, parallel, special)
    calls = grammar.any_call([_call(grammar, tool) for tool in grammar.tools])
    body = f'"\\n" {calls} "\\n" {grammar.marker("</tool_call>")}'
    return grammar.tagged("<tool_call>", body, between='"\\n"', bans="<function=")


def _call(grammar: Grammar, tool: Tool) -> str:
    schema = tool.function.parameters or {}
    properties = schema.get("properties")
    required = schema.get("required")
    terms = [quoted(f"<function={tool.function.name}>\n")]
    for name, described in (properties if isinstance(properties, dict) else {}).items():
        value = _value(grammar, tool, name, described)
        rule = grammar.rule("parameter", f"{quoted(f'<parameter={name}>' + chr(10))} {value}")
        must = isinstance(required, list) and name in required
        terms.append(rule if must else f"{rule}?")
    return " ".join([*terms, '"</function>"'])


def _value(grammar: Grammar, tool: Tool, name: str, schema: Any) -> str:
    types = Schemas(tool).types(name)
    values = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(values, list) and values:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in values]
        return "(" + " | ".join(quoted(text + _END) for text in texts) + ")"
    if "string" in types:
        grammar.terminal(f"PARAMETER_TEXT: {without(_ENDS)}")
        grammar.terminal(f"PARAMETER_VALUE: PARAMETER_TEXT {quoted(_END)}")
        return "PARAMETER_VALUE"
    described = {**_shared(tool, schema), **schema}
    return f"{guided(described, strict=bool(tool.function.strict))} {quoted(_END)}"


def _shared(tool: Tool, schema: Any) -> dict[str, Any]:
    """What the schema of one parameter may refer to in the tool's."""
    if '"$ref"' not in json.dumps(schema):
        return {}
    root = tool.function.parameters or {}
    return {key: root[key] for key in ("$defs", "definitions") if key in root}
