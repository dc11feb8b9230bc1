"""Converts a request's structured-output fields to a grammar source for llguidance.

Pure: nothing is compiled here. A `GrammarSource` holds the text to compile and the name of the
request field it came from. A value that cannot become a grammar raises `InvalidRequest`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.messages.grammar_limits import MAX_GRAMMAR

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import TaggedStructure

__all__ = [
    "GrammarSource",
    "JsonStyle",
    "after",
    "any_of",
    "from_choice",
    "from_grammar",
    "from_regex",
    "from_schema",
    "from_tags",
]

WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,64}"
"""Whitespace between the parts of JSON: enough for layout, but never a whole answer."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar to compile."""

    kind: Literal["schema", "grammar", "ready"]
    """`schema`: one JSON schema, errors name places inside of it; `grammar`: Lark or GBNF as a
    client wrote it; `ready`: as llguidance reads it."""
    text: str
    param: str
    """Request field that the grammar came from."""


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """Whitespace in generated JSON, and whether schemas allow unlisted properties."""

    whitespace: str | None = WHITESPACE
    """Regex of whitespace between the parts of JSON; None: no whitespace."""
    closed: bool = False
    """True: objects have only the properties that their schemas list."""

    @property
    def options(self) -> dict[str, Any]:
        """Return these options under llguidance's names."""
        if self.whitespace is None:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.whitespace}


DEFAULT_JSON_STYLE: Final = JsonStyle()


def from_schema(
    schema: Mapping[str, Any] | bool, param: str, style: JsonStyle = DEFAULT_JSON_STYLE
) -> GrammarSource:
    """Accept JSON that matches the schema. Errors: `InvalidRequest`."""
    guided = _guided(schema, style, param)
    grammar = _json({"grammars": [{"json_schema": guided}]}, param)
    return GrammarSource("schema", _limited(grammar, param), param)


def from_choice(choices: Sequence[str], param: str) -> GrammarSource:
    """Accept exactly one of these texts. Errors: `InvalidRequest`."""
    _check_length(sum(map(len, choices)), param)
    for index, choice in enumerate(choices):
        if not choice:
            where = f"{param}[{index}]"
            raise InvalidRequest(f"'{where}' is empty; leave it out", param=where)
    return _lark_source(f"start: /{'|'.join(map(_literal, choices))}/", param)


def from_regex(regex: str, param: str) -> GrammarSource:
    """Accept texts that match as a whole; `^` and `$` at the ends are allowed, without effect."""
    return _lark_source(f"start: /{_one_line(regex)}/", param)


def from_grammar(grammar: str, param: str) -> GrammarSource:
    """Accept texts of a Lark or GBNF grammar; its first rule is `start` or `root`."""
    return GrammarSource("grammar", _limited(grammar, param), param)


def from_tags(
    structures: Sequence[TaggedStructure],
    triggers: Sequence[str],
    param: str,
    special: Mapping[str, int],
    style: JsonStyle = DEFAULT_JSON_STYLE,
) -> GrammarSource:
    """Accept free text until one of `triggers`, then a structure that begins with it; repeated.

    `special`: ids of special tokens by their text; such a text is enforced as that token.
    Errors: `InvalidRequest`.
    """
    _check_tags(structures, triggers, param, style)
    _check_triggers(structures, triggers, param)
    texts = [trigger for trigger in triggers if trigger not in special]
    _check_size([each.schema for each in structures], param)
    schemas = [_json(_guided(each.schema, style, param), param) for each in structures]
    rules = [f"start: ({' | '.join(f'seg_{at}' for at in range(len(triggers)))})* after"]
    for at, trigger in enumerate(triggers):
        bodies = [
            f"{_quoted(each.begin[len(trigger) :])} %json {schema} {_term(each.end, special)}"
            for each, schema in zip(structures, schemas, strict=True)
            if each.begin.startswith(trigger)
        ]
        others = "".join(f" & {_without(other)}" for other in texts if other != trigger)
        if trigger in special:
            rules.append(f"seg_{at}: FREE <[{special[trigger]}]> ({' | '.join(bodies)})")
        else:
            rules.append(f"seg_{at}: before_{at} ({' | '.join(bodies)})")
            rules.append(f"before_{at}[lazy]: (/(?s:.*)/ {_quoted(trigger)}){others}")
    rules.append("after: FREE")
    rules.append("FREE: /(?s:.*)/" + "".join(f" & {_without(text)}" for text in texts))
    return _lark_source("%llguidance {}\n" + "\n".join(rules), param)


def any_of(calls: str, text: GrammarSource) -> GrammarSource:
    """Accept tool calls (`calls` is Lark) or a text of `text`. Errors name the field of `text`."""
    first, *others = json.loads(text.text)["grammars"]
    name = first.setdefault("name", "text")
    grammars = [
        {"name": "either", "lark_grammar": f"start: @calls | @{name}"},
        {"name": "calls", "lark_grammar": calls},
        *(first, *others),
    ]
    whole = _json({"grammars": grammars}, text.param)
    return GrammarSource("ready", _limited(whole, text.param), text.param)


def after(term: str, text: GrammarSource) -> GrammarSource:
    """Accept `term` (Lark), then a text of `text`. Errors: `InvalidRequest`."""
    if text.kind == "grammar":
        raise InvalidRequest(
            f"'{text.param}' cannot be a grammar for this model, which puts markup before its "
            "answer: use a JSON schema, a regex or choices",
            param=text.param,
        )
    (only,) = json.loads(text.text)["grammars"]
    grammars = [{"name": "whole", "lark_grammar": f"start: {term} @text"}, {"name": "text", **only}]
    whole = _json({"grammars": grammars}, text.param)
    return GrammarSource("ready", _limited(whole, text.param), text.param)


# ---------------------------------------------------------------- pieces


def _guided(schema: Mapping[str, Any] | bool, style: JsonStyle, param: str) -> dict[str, Any]:
    _check_size(schema, param)
    if isinstance(schema, bool):
        return {"x-guidance": style.options} if schema else {"enum": [], "x-guidance": {}}
    try:
        closed = _closed(schema) if style.closed else schema
    except RecursionError:
        raise _not_json(param) from None
    return {**closed, "x-guidance": style.options}


def _closed(schema: Any) -> Any:
    """Set `additionalProperties` to false where a schema lists properties and leaves it open."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: value if key in ("enum", "const", "default", "examples") else _closed(value)
        for key, value in schema.items()
    }
    if isinstance(kept.get("properties"), dict) and schema.get("type", "object") == "object":
        kept.setdefault("additionalProperties", False)
    return kept


def _check_tags(
    structures: Sequence[TaggedStructure], triggers: Sequence[str], param: str, style: JsonStyle
) -> None:
    """Check that triggers and structures belong together and none is part of another."""
    written = len(triggers) * sum(map(len, triggers))
    written += sum(len(each.begin) + len(each.end) for each in structures)
    _check_length(written + len(structures) * len(style.whitespace or ""), param)


def _check_triggers(
    structures: Sequence[TaggedStructure], triggers: Sequence[str], param: str
) -> None:
    for index, trigger in enumerate(triggers):
        where = f"{param}.triggers[{index}]"
        if not trigger or not any(each.begin.startswith(trigger) for each in structures):
            raise InvalidRequest(f"'{where}' begins none of the 'structures'", param=where)
        if any(trigger in other for other in triggers if other is not trigger):
            raise InvalidRequest(f"'{where}' is part of another trigger", param=where)
    for index, each in enumerate(structures):
        if not any(each.begin.startswith(trigger) for trigger in triggers):
            where = f"{param}.structures[{index}].begin"
            raise InvalidRequest(f"'{where}' begins with none of the 'triggers'", param=where)


def _without(text: str) -> str:
    return f"~(/(?s:.*)/ {_quoted(text)} /(?s:.*)/)"


def _term(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else _quoted(text)


def _quoted(text: str) -> str:
    """Return a text as a Lark regex with every character as a number."""
    return f"/{_literal(text)}/" if text else ""


def _literal(text: str) -> str:
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text
    )


def _one_line(regex: str) -> str:
    """Escape slashes and line breaks, which would end a regex in Lark."""
    pieces = re.findall(r"\\.|[^\\]", regex, re.DOTALL)
    ending = {"/": "\\/", "\n": "\\n", "\r": "\\r", "\\\n": "\\n", "\\\r": "\\r"}
    whole = "".join(ending.get(piece, piece) for piece in pieces)
    # A last backslash escapes nothing: the group that stays open makes compiling refuse it.
    return whole if len("".join(pieces)) == len(regex) else whole + "\\\\("


def _lark_source(lark: str, param: str) -> GrammarSource:
    grammar = _json({"grammars": [{"lark_grammar": lark}]}, param)
    return GrammarSource("ready", _limited(grammar, param), param)


def _json(value: object, param: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        raise _not_json(param) from None
    return text


def _not_json(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}' must be JSON and valid Unicode, and not be nested too deeply", param=param
    )


def _limited(text: str, param: str) -> str:
    _check_length(len(text), param)
    return text


def _check_size(value: object, param: str) -> None:
    """Refuse a value whose grammar would be too large in any form, before it is built. A body may
    have some megabytes; measuring its shortest spelling is cheap beside building the grammar."""
    try:
        text = msgspec.json.encode(value).decode()
    except (OverflowError, UnicodeError, RecursionError):
        # The caller refuses such a value when it writes it as JSON.
        return
    _check_length(len(text), param)


def _check_length(length: int, param: str) -> None:
    if length > MAX_GRAMMAR:
        raise InvalidRequest(
            f"'{param}' comes to {length} characters or more; the limit is {MAX_GRAMMAR}: make it "
            "smaller",
            param=param,
        )
