"""Builds the grammar of Python-style calls: arguments in schema order, values as literals.

It enforces types, `enum`, `const`, unions, items and properties of a value's schema. An argument
whose name is no Python name is left out.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from pdserve.text.tool_parsers.tool_call_grammar import (
    ToolCallGrammar,
    lark_string,
    properties_of,
    resolve_reference,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolChoiceMode

_SHORT: Final = 64
"""Most characters of a term that may be repeated without a rule of its own."""
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


class PythonicGrammar:
    """Builds the grammar of one request's tools."""

    def __init__(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None,
    ) -> None:
        self._grammar = ToolCallGrammar(tools, choice, parallel, special)
        self._root: dict[str, Any] = {}
        """The schema in which references are looked up."""
        self._referred: dict[int, str] = {}
        """Id of a referenced schema -> its rule."""
        self._rules: dict[str, str] = {}
        """Body -> rule, so that equal schemas share one."""

    def text(self) -> str:
        grammar = self._grammar
        calls = grammar.any_call(self._call(tool) for tool in grammar.tools)
        grammar.terminal(_LITERALS)
        body = f'"[" {grammar.sequence(calls, lark_string(", "))} "]"'
        return grammar.whole("[", body, tag="<|python_start|>", closing="<|python_end|>")

    def _call(self, tool: Tool) -> str:
        self._grammar.begin(tool)
        self._root = tool.function.parameters or {}
        self._referred = {}
        pairs = [
            (f"{lark_string(f'{name}=')} {self._value(schema)}", must)
            for name, schema, must in properties_of(self._root)
            if _NAME.fullmatch(name)
        ]
        return f'{lark_string(f"{tool.function.name}(")} {self._joined(pairs)} ")"'

    def _joined(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """The pairs in their order with commas between them; optional ones may be left out."""
        first = rest = ""
        for pair, must in reversed(pairs):
            rule = self._rule("pair", pair)
            here = f"{rule} {rest}"
            if not must and first:
                first = self._rule("pairs", f"{here} | {first}")
            elif not must:
                first = f"({here})?"
            else:
                first = here
            more = f'(", " {here})' if must else f'(", " {rule})? {rest}'
            rest = self._rule("rest", more)
        return first

    def _value(self, schema: Any) -> str:
        """The name of a rule, or a term short enough to be repeated."""
        self._grammar.budget.step()
        if not isinstance(schema, dict):
            return "py_value"
        values = schema.get("enum")
        if isinstance(values, list):
            self._grammar.budget.step(len(values))
            return self._union([lark_string(_python(value)) for value in values])
        if "const" in schema:
            return self._union([lark_string(_python(schema["const"]))])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return self._union([self._value(each) for each in schema[key]])
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            self._grammar.budget.step(len(kinds))
            different = dict.fromkeys(each for each in kinds if isinstance(each, str))
            return self._union([self._typed(kind, schema) for kind in different])
        return self._typed(kinds, schema)

    def _rule(self, stem: str, body: str) -> str:
        if body not in self._rules:
            self._rules[body] = self._grammar.rule(stem, body)
        return self._rules[body]

    def _union(self, terms: Sequence[str]) -> str:
        different = list(dict.fromkeys(terms)) or ["py_value"]
        if len(different) == 1 and len(different[0]) <= _SHORT:
            return different[0]
        return self._rule("union", " | ".join(different))

    def _typed(self, kind: Any, schema: dict[str, Any]) -> str:
        if kind == "array":
            item = self._value(schema.get("items"))
            some = f'{item} (", " {item})*'
            return self._rule(
                "array", f'"[" {some} "]"' if schema.get("minItems") else f'"[" ({some})? "]"'
            )
        if kind == "object":
            return self._object(schema)
        return _SIMPLE.get(kind, "py_value") if isinstance(kind, str) else "py_value"

    def _object(self, schema: dict[str, Any]) -> str:
        pairs = [
            (f"{lark_string(_python(name))} {lark_string(': ')} {self._value(each)}", must)
            for name, each, must in properties_of(schema)
        ]
        if not pairs:
            return "py_dict"
        return self._rule("object", f'"{{" {self._joined(pairs)} "}}"')

    def _reference(self, reference: str) -> str:
        """The rule of a referenced schema; it has a rule of its own, since it may contain
        itself."""
        self._grammar.budget.step(reference.count("/"))
        found = resolve_reference(self._root, reference)
        if id(found) not in self._referred:
            name = self._grammar.name("referred")
            # The name is set before the rule is made, because the schema may refer to itself.
            self._referred[id(found)] = name
            self._grammar.define(name, self._value(found))
        return self._referred[id(found)]


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
