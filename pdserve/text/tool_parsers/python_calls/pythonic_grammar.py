"""Builds the grammar of Python-style calls: arguments in schema order, values as literals.

An argument whose name is no Python name is left out.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from pdserve.text.tool_parsers.literal_grammar import Dialect, LiteralGrammar
from pdserve.text.tool_parsers.tool_call_grammar import lark_string

if TYPE_CHECKING:
    from pdserve.protocols.completion_requests import Tool

_NAME: Final = re.compile(r"[^\s=,()\[\]{}'\"<#\\]+")
_LITERALS: Final = r"""
py_value: PY_STRING | PY_NUMBER | PY_BOOLEAN | "None" | py_list | py_dict
py_list: "[" (py_value (", " py_value)*)? "]"
py_dict: "{" (py_pair (", " py_pair)*)? "}"
py_pair: PY_STRING ": " py_value
PY_STRING: /"([^"\\\x00-\x1f\x7f]|\\["\\nrt])*"/
PY_INTEGER: /0|-?[1-9][0-9]{0,17}/
PY_NUMBER: /0|-?[1-9][0-9]{0,17}|-?(0|[1-9][0-9]{0,17})\.[0-9]{1,18}/
PY_BOOLEAN: "True" | "False"
""".strip()
_SIMPLE: Final = {
    "string": "PY_STRING",
    "integer": "PY_INTEGER",
    "number": "PY_NUMBER",
    "boolean": "PY_BOOLEAN",
    "null": '"None"',
}


def _key(name: str) -> str | None:
    return f"{name}=" if _NAME.fullmatch(name) else None


def _python(value: Any) -> str:
    """The value as a Python literal, with strings in double quotes."""
    match value:
        case None | bool():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return "[" + ", ".join(map(_python, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{_python(k)}: {_python(v)}" for k, v in value.items()) + "}"
        case _:
            return json.dumps(value)


_DIALECT: Final = Dialect(
    any="py_value",
    any_object="py_dict",
    simple=_SIMPLE,
    spell=_python,
    key=lambda name: f"{_python(name)}: ",
    comma=", ",
)


class PythonicGrammar(LiteralGrammar):
    """Builds the grammar of one request's tools."""

    dialect = _DIALECT

    def text(self) -> str:
        grammar = self._grammar
        calls = grammar.any_call(self.call(tool) for tool in grammar.tools)
        grammar.terminal(_LITERALS)
        body = f'"[" {grammar.sequence(calls, lark_string(", "))} "]"'
        return grammar.whole("[", body, tag="<|python_start|>", closing="<|python_end|>")

    def block(self, start: str, end: str, opening: str, between: str, closing: str) -> str:
        """The grammar of calls between two markers."""
        grammar = self._grammar
        calls = grammar.any_call(self.call(tool) for tool in grammar.tools)
        grammar.terminal(_LITERALS)
        several = grammar.sequence(calls, lark_string(between))
        body = f"{lark_string(opening)} {several} {lark_string(closing)} {grammar.marker(end)}"
        return grammar.tagged(start, body, again=False)

    def call(self, tool: Tool) -> str:
        arguments = self.arguments(tool, _key)
        return f'{lark_string(f"{tool.function.name}(")} {arguments} ")"'
