"""Builds Lark grammars of tool calls for llguidance: the parts that all formats share.

Arguments follow the tool's JSON schema. Keywords that cannot be enforced are ignored for a tool
that is not strict; for a strict tool, compiling the grammar fails. Whitespace inside of JSON is at
most one space, so that no answer consists of whitespace.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Any, Final

from pdserve.text.tool_parsers.schema_budget import SchemaBudget

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolChoiceMode

_SPACING: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


ANY_TEXT: Final = "/(?s:.*)/"


def call_id() -> str:
    """A new id with 96 random bits."""
    return f"call_{secrets.token_hex(12)}"


def lark_string(text: str) -> str:
    """The text as a Lark string; nothing for the empty text."""
    return json.dumps(text) if text else ""


def json_schema_term(schema: Mapping[str, Any] | bool, *, strict: bool) -> str:
    """A term that follows a JSON schema."""
    return f"%json {json.dumps(llguidance_schema(schema, strict=strict))}"


def llguidance_schema(schema: Mapping[str, Any] | bool, *, strict: bool) -> dict[str, Any]:
    """The schema with llguidance's options for whitespace and for unknown keywords."""
    described = dict(schema) if isinstance(schema, dict) else ({} if schema else {"not": {}})
    described["x-guidance"] = _SPACING if strict else {**_SPACING, "lenient": True}
    return described


def parameters(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments."""
    schema = tool.function.parameters
    if schema is None:
        return {"type": "object"} if not tool.function.strict else _nothing()
    return {**schema, "type": "object"}


def parameters_field(place: int) -> str:
    """Name of the request's field that holds the schema of the tool at index `place`."""
    return f"tools[{place}].function.parameters"


def resolve_reference(root: Any, reference: str) -> Any:
    """The part of a schema that `#/a/b` refers to; None if it does not exist or is outside of this
    schema."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    found = root
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """(name, schema, whether it is required) of an object's properties, in their order."""
    properties = schema.get("properties")
    required = schema.get("required")
    listed = required if isinstance(required, list) else []
    names = {name for name in listed if isinstance(name, str)}
    found = properties if isinstance(properties, dict) else {}
    return [(name, each, name in names) for name, each in found.items()]


def _nothing() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


class ToolCallGrammar:
    """The base of every format's grammar: the tools that may be called, and terms for its
    markers."""

    def __init__(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None,
    ) -> None:
        self.free = choice == "auto"
        """Whether text may stand around the calls, or instead of them."""
        named = [each for each in tools if each.function.name == choice]
        self.tools = tools if choice in ("auto", "required") else named
        if not self.tools:
            raise ValueError(f"there is no tool to call: {choice!r}")
        self.parallel = parallel
        self.budget = SchemaBudget("tools")
        """For everything that is made from the tools' schemas."""
        self._places = {each.function.name: place for place, each in enumerate(tools)}
        self._special = special or {}
        self._rules: list[str] = []
        self._terminals: list[str] = []
        self._names = 0

    def is_special(self, marker: str) -> bool:
        return marker in self._special

    def marker(self, marker: str) -> str:
        """The marker's token if the tokenizer has one that no other text encodes to; else the
        text."""
        id = self._special.get(marker)
        return lark_string(marker) if id is None else f"<[{id}]>"

    def has_special(self, text: str) -> bool:
        return any(each in text for each in self._special)

    def markup(self, text: str, borders: Sequence[str] = ()) -> str:
        """Terms for text that may contain special tokens, each of which is written as its token.
        Nothing for the empty text. `borders`: what is a term of its own, too, because text may
        follow it that goes on differently."""
        every = sorted((*self._special, *borders), key=len, reverse=True)
        if not any(each in text for each in every):
            return lark_string(text)
        parts = re.split(f"({'|'.join(map(re.escape, every))})", text)
        return " ".join(self.marker(each) for each in parts if each)

    def begin(self, tool: Tool) -> None:
        """Start the part for this tool, which later errors name."""
        self.budget.field = parameters_field(self._places[tool.function.name])

    def json_call(self, tool: Tool, key: str) -> str:
        """A call as one JSON object with the arguments under `key`."""
        head = f'{{"name": {json.dumps(tool.function.name)}, "{key}": '
        return f'{lark_string(head)} {self.arguments(tool)} "}}"'

    def arguments(self, tool: Tool) -> str:
        self.begin(tool)
        return json_schema_term(parameters(tool), strict=bool(tool.function.strict))

    def any_call(self, calls: Iterable[str]) -> str:
        """Make a rule of each of `calls` and return a term for any of them."""
        return "(" + " | ".join(self.rule("call", call) for call in calls) + ")"

    def rule(self, stem: str, body: str) -> str:
        """Add a rule; returns its name."""
        name = self.name(stem)
        self.define(name, body)
        return name

    def name(self, stem: str) -> str:
        """Return a name for a rule that is defined later."""
        self._names += 1
        return f"{stem}_{self._names}"

    def define(self, name: str, body: str) -> None:
        self._rules.append(self.budget.make(f"{name}: {body}"))

    def sequence(self, call: str, between: str) -> str:
        """One call, or several if they may be parallel."""
        return f"{call} ({between} {call})*" if self.parallel else call

    def tagged(
        self,
        start: str,
        body: str,
        *,
        between: str = "",
        again: bool = True,
        bans: Sequence[str] = (),
    ) -> str:
        """Calls that begin with the marker `start`, followed by `body`.

        In free text the marker is the trigger: what follows it is enforced. `bans`: texts that
        would also be parsed as a call. `again`: the marker may occur more than once.
        """
        begin = self.markup(start)
        again = again and self.parallel
        if not self.free:
            more = f" ({between} {begin} {body})*" if again else ""
            return self._forced(f"{begin} {body}{more}")
        more = "*" if again else "?"
        banned = [each for each in (start, *bans) if not self.has_special(each)]
        self._terminals.append(f"FREE: {text_without(banned)}")
        return self.text(f"({self.text_up_to('FREE', start)} {body}){more} FREE")

    def text_up_to(self, terminal: str, marker: str) -> str:
        """Terms for text of this terminal, which does not contain the marker, and the marker."""
        name = f"{terminal.lower()}_end"
        if not self.has_special(marker):
            self.terminal(f"{name}[lazy]: {terminal} {lark_string(marker)}")
            return name
        head = min((marker.partition(each)[0] for each in self._special if each in marker), key=len)
        if not head:
            return f"{terminal} {self.markup(marker)}"
        # The text before a special token is one lexeme, whatever it ends in.
        self.terminal(f"{name.upper()}: {terminal} {lark_string(head)}")
        return f"{name.upper()} {self.markup(marker.removeprefix(head))}"

    def whole(self, first: str, body: str, *, tag: str, closing: str = "") -> str:
        """An answer that has only calls, known by its first character.

        `tag`: the marker that may stand before them, after text, if it is a token of its own.
        """
        if not self.free:
            return self._forced(body)
        calls = self.rule("calls", body)
        banned = "" if self.is_special(tag) else f" & {text_without([tag])}"
        self._terminals.append(f"FREE: /\\s*([^\\s\\{first}](?s:.*))?/{banned}")
        end = self.marker(closing)
        tagged = f" | FREE {self.marker(tag)} {calls} {end}" if self.is_special(tag) else ""
        return self.text(f"FREE | {calls}{tagged}")

    def _forced(self, start: str) -> str:
        """A grammar of calls only; after reasoning a model may begin on a new line."""
        self._terminals.append(r"LINES: /\n{1,2}/")
        return self.text(f"LINES? {start}")

    def text(self, start: str) -> str:
        """Return the grammar, once all its rules have been added."""
        lines = ["%llguidance {}", f"start: {start}", *self._rules, *self._terminals]
        return "\n".join(lines) + "\n"

    def terminal(self, line: str) -> None:
        if line not in self._terminals:
            self._terminals.append(line)


def text_without(banned: Sequence[str]) -> str:
    """A terminal for any text that contains none of these."""
    if not banned:
        return ANY_TEXT
    return f"{ANY_TEXT} & ~({ANY_TEXT} ({' | '.join(map(lark_string, banned))}) {ANY_TEXT})"
