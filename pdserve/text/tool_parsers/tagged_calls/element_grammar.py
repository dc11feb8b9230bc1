"""Builds the grammar of calls whose arguments are elements in elements.

Objects with properties and arrays with items are written as elements, other objects and arrays as
JSON. A string is any text without the mark that stands before each tag.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pdserve.text.tool_parsers.literal_grammar import Dialect, LiteralGrammar
from pdserve.text.tool_parsers.tagged_calls.tag_grammar import shared_definitions
from pdserve.text.tool_parsers.tool_call_grammar import (
    json_schema_term,
    lark_string,
    properties_of,
    text_without,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolChoiceMode
    from pdserve.text.tool_parsers.tagged_calls.tag_syntax import TagSyntax

__all__ = ["ElementGrammar"]


class ElementGrammar(LiteralGrammar):
    """Builds the grammar of one request's tools. Each value contains the mark that ends it."""

    dialect = Dialect(any="element_text", any_object="", simple={}, spell=str, key=str, comma="")

    def __init__(
        self,
        syntax: TagSyntax,
        mark: str,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None,
    ) -> None:
        super().__init__(tools, choice, parallel, special)
        self._syntax = syntax
        self._mark = mark
        self._tool = tools[0]
        """The tool whose arguments are built."""

    def text(self) -> str:
        grammar, layout = self._grammar, self._syntax.layout
        calls = grammar.any_call(self._call(tool) for tool in grammar.tools)
        bans = [] if grammar.has_special(self._mark) else [self._mark]
        grammar.terminal(f"ELEMENT_TEXT: {text_without(bans)}")
        grammar.terminal(f"element_text: {grammar.text_up_to('ELEMENT_TEXT', self._mark)}")
        calls = grammar.sequence(calls, self._markup(layout.between_calls or ""))
        end = self._markup(layout.block_end + self._syntax.ends[0])
        body = f"{self._markup(layout.block)} {calls} {end}"
        return grammar.tagged(
            self._syntax.starts[0],
            body,
            between=self._markup(layout.between),
            bans=self._syntax.openers,
        )

    def _markup(self, text: str) -> str:
        """Terms for markup. The mark is a term of its own, since different tags may follow it."""
        return self._grammar.markup(text, (self._mark,))

    def _call(self, tool: Tool) -> str:
        self._grammar.begin(tool)
        self._tool = tool
        self._root = tool.function.parameters or {}
        self._referred = {}
        layout = self._syntax.layout
        head = self._markup(layout.call.replace("{name}", tool.function.name))
        return f"{head} {self._elements(self._root)} {self._markup(layout.call_end)}"

    def _elements(self, schema: Mapping[str, Any]) -> str:
        pairs = [
            (self._element(name, each), must)
            for name, each, must in properties_of(schema)
            if name and not name.startswith("/") and ">" not in name
        ]
        return self._joined(pairs)

    def _element(self, name: str, schema: Any) -> str:
        begin = self._markup(f"{self._mark}<{name}>")
        return f"{begin} {self._value(schema)} {lark_string(f'</{name}>')}"

    def _constant(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return f"{lark_string(text)} {self._markup(self._mark)}"

    def _typed(self, kind: Any, schema: dict[str, Any]) -> str:
        if kind == "array" and isinstance(schema.get("items"), dict):
            item = self._rule("item", self._element("item", schema["items"]))
            some = f"{item}+" if schema.get("minItems") else f"{item}*"
            return self._rule("array", f"{some} {self._markup(self._mark)}")
        if kind == "object" and properties_of(schema):
            inner = f"{self._elements(schema)} {self._markup(self._mark)}"
            return self._rule("object", inner)
        if kind in ("array", "object", "integer", "number", "boolean", "null"):
            described = {**shared_definitions(self._tool, schema), **schema, "type": kind}
            term = json_schema_term(described, strict=bool(self._tool.function.strict))
            return self._rule("json", f"{term} {self._markup(self._mark)}")
        return self.dialect.any
