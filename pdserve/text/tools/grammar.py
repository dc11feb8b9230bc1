"""Grammars of tool calls, in the Lark of llguidance: what every format's is made of.

Arguments follow the tool's JSON schema. Where the tool is not strict, keywords that cannot be
enforced are passed over; where it is, compiling the grammar says so. Blank space inside of JSON is
one space at most, so that no answer consists of it.
"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.openai.schema import Tool
    from pdserve.text.tools.base import Choice

_SPACING: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


def call_id() -> str:
    """A fresh id with 96 random bits."""
    return f"call_{secrets.token_hex(12)}"


def quoted(text: str) -> str:
    """A string of Lark; nothing for the empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def guided(schema: Mapping[str, Any] | bool, *, strict: bool) -> str:
    """A term that follows a JSON schema."""
    described = dict(schema) if isinstance(schema, dict) else ({} if schema else {"not": {}})
    described["x-guidance"] = _SPACING if strict else {**_SPACING, "lenient": True}
    return f"%json {json.dumps(described)}"


def parameters(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments."""
    schema = tool.function.parameters
    if schema is None:
        return {"type": "object"} if not tool.function.strict else _nothing()
    return {**schema, "type": "object"}


def _nothing() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


class Grammar:
    """What every format starts from: the tools that may be called, and terms for its markers."""

    def __init__(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        parallel: bool,
        special: Mapping[str, int] | None,
    ) -> None:
        self.free = choice == "auto"
        """Text may stand around the calls, or instead of them."""
        named = [each for each in tools if each.function.name == choice]
        self.tools = tools if choice in ("auto", "required") else named
        if not self.tools:
            raise ValueError(f"there is no tool to call: {choice!r}")
        self.parallel = parallel
        self._special = special or {}

    def is_special(self, marker: str) -> bool:
        return marker in self._special

    def marker(self, marker: str) -> str:
        """The token, where the tokenizer has one that no other text gives; else the text."""
        id = self._special.get(marker)
        return quoted(marker) if id is None else f"<[{id}]>"

    def json_call(self, tool: Tool, key: str) -> str:
        """A call as one JSON object with the arguments under `key`."""
        head = f'{{"name": {json.dumps(tool.function.name)}, "{key}": '
        return f'{quoted(head)} {self.arguments(tool)} "}}"'

    def arguments(self, tool: Tool) -> str:
        return guided(parameters(tool), strict=bool(tool.function.strict))

    def tagged(self, start: str, opening: str, calls: Sequence[str], closing: str) -> str:
        """Calls that begin with the marker `start`: `opening`, one of `calls`, `closing`.

        In free text the marker is the trigger: what follows it is enforced.
        """
        rules = [f"call_{at}: {call}" for at, call in enumerate(calls)]
        any_call = " | ".join(f"call_{at}" for at in range(len(calls)))
        rules.append(f"call: {opening} ({any_call}) {closing}")
        more = "*" if self.parallel else "?"
        if not self.free:
            begin = self.marker(start)
            again = f' ("\\n"? {begin} call)*' if self.parallel else ""
            rules.append(f"start: {begin} call{again}")
        elif self.is_special(start):
            rules.append(f"start: (TEXT {self.marker(start)} call){more} TEXT")
            rules.append("TEXT: /(?s:.*)/")
        else:
            rules.append(f"start: (before call){more} after")
            rules.append(f"before[lazy]: /(?s:.*)/ {quoted(start)}")
            rules.append("after: AFTER")
            rules.append(f"AFTER: /(?s:.*)/ & ~(/(?s:.*)/ {quoted(start)} /(?s:.*)/)")
        return "%llguidance {}\n" + "\n".join(rules) + "\n"
