"""Builds grammars of values that are written as literals of a language, by their JSON schemas.

It enforces types, `enum`, `const`, unions, items and properties of a value's schema. A format gives
its `Dialect` and the grammar of a call around the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pdserve.text.tool_parsers.tool_call_grammar import (
    ToolCallGrammar,
    lark_string,
    properties_of,
    resolve_reference,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolChoiceMode

__all__ = ["Dialect", "LiteralGrammar"]

_SHORT: Final = 64
"""Most characters of a term that may be repeated without a rule of its own."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a language writes values."""

    any: str
    """Rule of any value."""
    any_object: str
    """Rule of any object."""
    simple: Mapping[str, str]
    """Terms of JSON schema's types without parts."""
    spell: Callable[[Any], str]
    """Writes a constant."""
    key: Callable[[str], str]
    """Writes the key of an object, with what separates it from its value."""
    comma: str
    """Text between two items."""


class LiteralGrammar:
    """Builds the values of one request's tools."""

    dialect: ClassVar[Dialect]
    """How the format's language writes values."""

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

    def arguments(self, tool: Tool, key: Callable[[str], str | None]) -> str:
        """The tool's arguments in the order of its schema.

        `key` writes the name of an argument with what follows it; None leaves the argument out.
        """
        self._grammar.begin(tool)
        self._root = tool.function.parameters or {}
        self._referred = {}
        pairs = [
            (f"{lark_string(name)} {self._value(schema)}", must)
            for name, schema, must in (
                (key(name), schema, must) for name, schema, must in properties_of(self._root)
            )
            if name is not None
        ]
        return self._joined(pairs)

    def _joined(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """The pairs in their order with commas between them; optional ones may be left out."""
        comma = lark_string(self.dialect.comma)
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
            more = f"({comma} {here})" if must else f"({comma} {rule})? {rest}"
            rest = self._rule("rest", more)
        return first

    def _value(self, schema: Any) -> str:
        """The name of a rule, or a term short enough to be repeated."""
        self._grammar.budget.step()
        if not isinstance(schema, dict):
            return self.dialect.any
        values = schema.get("enum")
        if isinstance(values, list):
            self._grammar.budget.step(len(values))
            return self._union([self._constant(value) for value in values])
        if "const" in schema:
            return self._union([self._constant(schema["const"])])
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

    def _constant(self, value: Any) -> str:
        return lark_string(self.dialect.spell(value))

    def _rule(self, stem: str, body: str) -> str:
        if body not in self._rules:
            self._rules[body] = self._grammar.rule(stem, body)
        return self._rules[body]

    def _union(self, terms: Sequence[str]) -> str:
        different = list(dict.fromkeys(terms)) or [self.dialect.any]
        if len(different) == 1 and len(different[0]) <= _SHORT:
            return different[0]
        return self._rule("union", " | ".join(different))

    def _typed(self, kind: Any, schema: dict[str, Any]) -> str:
        if kind == "array":
            item = self._value(schema.get("items"))
            some = f"{item} ({lark_string(self.dialect.comma)} {item})*"
            return self._rule(
                "array", f'"[" {some} "]"' if schema.get("minItems") else f'"[" ({some})? "]"'
            )
        if kind == "object":
            return self._object(schema)
        return self.dialect.simple.get(str(kind), self.dialect.any)

    def _object(self, schema: dict[str, Any]) -> str:
        pairs = [
            (f"{lark_string(self.dialect.key(name))} {self._value(each)}", must)
            for name, each, must in properties_of(schema)
        ]
        if not pairs:
            return self.dialect.any_object
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
