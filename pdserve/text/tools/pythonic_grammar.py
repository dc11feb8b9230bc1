"""The grammar of calls as Python: arguments in the order of the schema, values as literals.

Of a value's schema it enforces types, `enum`, `const`, unions, items and properties; an argument
whose name could not be read as one is left out.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from pdserve.text.tools.grammar import Grammar, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.openai.schema import Tool
    from pdserve.text.tools.base import Choice

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
        choice: Choice,
        parallel: bool,
        special: Mapping[str, int] | None,
    ) -> None:
        self._grammar = Grammar(tools, choice, parallel, special)
        self._root: dict[str, Any] = {}
        """The schema that references are looked up in."""
        self._referred: dict[str, str] = {}
        """Reference -> the rule for what it refers to."""

    def text(self) -> str:
        grammar = self._grammar
        calls = grammar.any_call([self._call(tool) for tool in grammar.tools])
        grammar.terminal(_LITERALS)
        body = f'"[" {grammar.sequence(calls, quoted(", "))} "]"'
        return grammar.whole("[", body, tag="<|python_start|>", closing="<|python_end|>")

    def _call(self, tool: Tool) -> str:
        self._root = tool.function.parameters or {}
        self._referred = {}
        pairs = [
            (f"{quoted(f'{name}=')} {self._value(schema)}", must)
            for name, schema, must in _properties(self._root)
            if _NAME.fullmatch(name)
        ]
        return f'{quoted(f"{tool.function.name}(")} {self._joined(pairs)} ")"'

    def _joined(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Pairs in their order with commas between them; those that need not be there may lack."""
        first = rest = ""
        for pair, must in reversed(pairs):
            rule = self._grammar.rule("pair", pair)
            here = f"{rule} {rest}"
            if not must and first:
                first = self._grammar.rule("pairs", f"{here} | {first}")
            elif not must:
                first = f"({here})?"
            else:
                first = here
            more = f'(", " {here})' if must else f'(", " {rule})? {rest}'
            rest = self._grammar.rule("rest", more)
        return first

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            return "py_value"
        for key in ("enum", "const"):
            if key in schema:
                values = schema[key] if key == "enum" else [schema[key]]
                return _union([quoted(_python(value)) for value in values])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return _union([self._value(each) for each in schema[key]])
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return _union([self._typed(kind, schema) for kind in kinds])
        return self._typed(kinds, schema)

    def _typed(self, kind: Any, schema: dict[str, Any]) -> str:
        if kind == "array":
            item = self._value(schema.get("items"))
            some = f'{item} (", " {item})*'
            return f'"[" {some} "]"' if schema.get("minItems") else f'"[" ({some})? "]"'
        if kind == "object":
            return self._object(schema)
        return _SIMPLE.get(kind, "py_value") if isinstance(kind, str) else "py_value"

    def _object(self, schema: dict[str, Any]) -> str:
        pairs = [
            (f"{quoted(_python(name))} {quoted(': ')} {self._value(each)}", must)
            for name, each, must in _properties(schema)
        ]
        if not pairs:
            return "py_dict"
        return f'"{{" {self._joined(pairs)} "}}"'

    def _reference(self, reference: str) -> str:
        """A schema may hold itself, so what it refers to is a rule of its own."""
        if reference not in self._referred:
            found: Any = self._root
            for step in reference.removeprefix("#/").split("/"):
                found = found.get(step) if isinstance(found, dict) else None
            name = self._grammar.name("referred")
            self._referred[reference] = name  # before its rule: it may refer to itself
            self._grammar.define(name, self._value(found))
        return self._referred[reference]


def _properties(schema: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    """(name, schema, whether it must be there) of an object's properties."""
    properties = schema.get("properties")
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    found = properties if isinstance(properties, dict) else {}
    return [(name, each, name in names) for name, each in found.items()]


def _union(terms: Sequence[str]) -> str:
    return "(" + " | ".join(dict.fromkeys(terms)) + ")"


def _python(value: Any) -> str:
    """A literal; strings in double quotes."""
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
