"""Parses Gemma 4's format: reasoning on a channel, and calls whose values have quotes of their own.

    <|channel>thought
    REASONING<channel|>ANSWER<|tool_call>call:NAME{key:<|"|>text<|"|>,count:3}<tool_call|>

Keys are bare. A bare value gets its type from the tool's schema; without one it is a number, a
boolean or null if it looks like it, else a string. Strings stream as they come. Brackets that are
open at the end of a call are closed. Where the call's marker is left out, the name of a tool of the
request makes a call.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from pdserve.text.tool_parsers.channels.channel_reader import ChannelReader
from pdserve.text.tool_parsers.json_repair import bare_as_json
from pdserve.text.tool_parsers.literal_grammar import Dialect, LiteralGrammar
from pdserve.text.tool_parsers.partial_json import JsonValue
from pdserve.text.tool_parsers.tool_call_grammar import call_id, lark_string, text_without
from pdserve.text.tool_parsers.typed_values import ParameterTypes, check_parameters, value_as_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolChoiceMode

CHANNEL: Final = "<|channel>"
CHANNEL_END: Final = "<channel|>"
CALL: Final = "<|tool_call>"
CALL_END: Final = "<tool_call|>"
QUOTE: Final = '<|"|>'
_RESULT: Final = "<|tool_response>"
_TURN_END: Final = "<turn|>"
MARKERS: Final = (CALL, CALL_END, QUOTE, CHANNEL, CHANNEL_END, _RESULT, _TURN_END)
_ENDS: Final = (CALL_END, CALL, _RESULT, _TURN_END, CHANNEL, CHANNEL_END)
"""Markers that end a call, wherever they stand outside of strings."""
_ANY: Final = re.compile("|".join(map(re.escape, MARKERS)))
_UNMARKED: Final = ("call:", "<call>")
"""What begins a call where the marker was left out."""
_ANY_OR_UNMARKED: Final = re.compile("|".join(map(re.escape, (*MARKERS, *_UNMARKED))))
_LABEL: Final = "thought"
_NAME: Final = re.compile(r"[^{(<\s]*")
_LONGEST_NAME: Final = 256
_LONGEST_BARE: Final = 4096
_LONGEST_BLANK: Final = 64
"""Blanks before a label without a marker; behind more of them, it is content."""
_KEY: Final = re.compile(r"[^:<{}\[\],]*")
_BARE: Final = re.compile(r"[^,{}\[\]<]*")


class Gemma4:
    markers: Final = MARKERS
    starts: Final = (CALL,)

    def detect(self, template: str) -> bool:
        return CALL in template and QUOTE in template

    def check(self, tools: Sequence[Tool]) -> None:
        check_parameters(tools)

    def parser(self, tools: Sequence[Tool]) -> Gemma4Reader:
        return Gemma4Reader(tools)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        return _Grammar(tools, choice, parallel, special).text()

    def call_id(self) -> str:
        return call_id()


class Gemma4Reader(ChannelReader):
    """Reads reasoning, content and calls."""

    __slots__ = (
        "_held",
        "_joint",
        "_name",
        "_open",
        "_schemas",
        "_string_value",
        "_types",
    )

    def __init__(self, tools: Sequence[Tool] = (), *, calls: bool = True) -> None:
        super().__init__(self._first, tools, calls=calls)
        self._schemas: dict[str, ParameterTypes] = {}
        """Schemas of the functions called so far."""
        self._name = ""
        self._held = ""
        """A bare value, as far as it has come."""
        self._open: list[str] = []
        """Closing brackets of the objects and arrays that are open."""
        self._types: tuple[str, ...] | None = None
        """Types of the value that is read; None: its schema is not known."""
        self._string_value = JsonValue()
        """The string with JSON's quotes that is read."""
        self._joint = ""
        """What parts the next key from the one before."""

    @property
    def in_reasoning(self) -> bool:
        return self.state in (self._think, self._label)

    def begin_reasoning(self) -> None:
        """The prompt has opened the channel. Call it before any text."""
        self.state = self._label

    # ------------------------------------------------------------------ channels

    def _first(self) -> bool:
        """State at the beginning. Some models leave the channel's marker out, not its label."""
        begin = self.at
        found = self.skip_blank()
        if self.at - begin > _LONGEST_BLANK:
            self.at = begin
            return self.turn(self._content)
        label = self.meets((f"{_LABEL}\n",)) if found else ""
        if label is None or (not found and not self.last):
            self.at = begin
            return False
        if label:
            self.at += len(label)
            return self.turn(self._think)
        self.at = begin
        return self.turn(self._content)

    def _content(self) -> bool:
        if self._known:
            text, marker = self.seek(_ANY_OR_UNMARKED, (*MARKERS, *_UNMARKED))
        else:
            text, marker = self.seek(_ANY, MARKERS)
        self.say(text)
        if not marker:
            return False
        if marker in _UNMARKED:
            self._held = marker
            self._name = ""
            return self.turn(self._unmarked)
        self.mark()
        if marker == CHANNEL:
            return self.turn(self._label)
        return self._calls_if(marker)

    def _label(self) -> bool:
        """State between the channel's marker and its text."""
        if not self.skip_blank():
            return False
        label = self.meets((f"{_LABEL}\n", f"{_LABEL}{CHANNEL_END}", CHANNEL))
        if label is None:
            return False
        self.drop_half((f"{_LABEL}\n",))
        if label:
            self.at += len(_LABEL) if label != CHANNEL else len(CHANNEL)
        return True if label == CHANNEL else self.turn(self._think)

    def _think(self) -> bool:
        text, marker = self.seek(_ANY, MARKERS)
        self.reason(text)
        if marker in (CHANNEL_END, _TURN_END, _RESULT):
            return self.turn(self._content)
        return bool(marker) and self._calls_if(marker)

    def _calls_if(self, marker: str) -> bool:
        """Go on after a marker, which may begin a call."""
        if marker == CALL and self._calls:
            self.mark()
            self._name = ""
            return self.turn(self._call)
        return True

    # ------------------------------------------------------------------ calls

    def _call(self) -> bool:
        """State between the marker and the name."""
        if not self.skip_blank():
            return False
        prefix = self.meets(("call:", ":"))
        if prefix is None:
            return False
        self.drop_half(("call:",))
        self.at += len(prefix)
        return True if prefix == ":" else self.turn(self._named)

    def _unmarked(self) -> bool:
        """State in the name of what may be a call without its marker."""
        found = _NAME.match(self.text, self.at)
        # The pattern matches an empty string too.
        assert found is not None
        self._name += found[0]
        self.at = found.end()
        ended = self.at < len(self.text)
        if not ended and not self.last and len(self._name) <= _LONGEST_NAME:
            return False
        if ended and self.text[self.at] == "{" and self._name in self._known:
            return self._begins()
        self.say(self._held + self._name)
        return self.turn(self._content)

    def _begins(self) -> bool:
        """Start the call at its opening bracket."""
        bracket = self.text[self.at]
        self.at += 1
        self.begin(self._name)
        self.argue("{")
        self._joint = ""
        self._open = ["}" if bracket == "{" else ")"]
        if self._name not in self._schemas:
            self._schemas[self._name] = ParameterTypes(self._known.get(self._name))
        return self.turn(self._key)

    def _named(self) -> bool:
        found = _NAME.match(self.text, self.at)
        # The pattern matches an empty string too.
        assert found is not None
        self._name += found[0]
        self.at = found.end()
        if len(self._name) > _LONGEST_NAME:
            return self._no_call()
        if self.at == len(self.text):
            return self.last and self._no_call()
        if self.text[self.at] in "{(" and self._name:
            return self._begins()
        marker = self.meets(MARKERS)
        if marker is None:
            return False
        self.drop_half(MARKERS)
        if marker in _ENDS and self._name in self._known:
            self.begin(self._name)
            self.argue("{}")
            return self.turn(self._content)
        return self._no_call()

    def _no_call(self) -> bool:
        """What follows the marker is no call: it is content."""
        self.say(self._name)
        return self.turn(self._content)

    def _close(self) -> bool:
        """End the call at a marker; brackets that are open are closed."""
        self.argue("".join("}" if each == ")" else each for each in reversed(self._open)))
        self._open.clear()
        return self.turn(self._content)

    def _at_end(self) -> bool | None:
        """True if a marker that ends a call begins here; None if more text decides."""
        marker = self.meets(_ENDS)
        if marker is None:
            return None
        self.drop_half(MARKERS)
        return bool(marker)

    def _key(self) -> bool:
        """State at the beginning of an object: a key, or its end."""
        if not self.skip_blank():
            return False
        if self.text[self.at] in "})":
            return self._shut()
        self._held = ""
        return self.turn(self._key_text)

    def _next_key(self) -> bool:
        """State after a comma in an object."""
        if not self.skip_blank():
            return False
        char = self.text[self.at]
        if char == ",":
            self.at += 1
            return True
        if char in "})":
            return self._shut()
        self._held = ""
        return self.turn(self._key_text)

    def _key_text(self) -> bool:
        found = _KEY.match(self.text, self.at)
        # The pattern matches an empty string too.
        assert found is not None
        self._held += found[0]
        self.at = found.end()
        if self.at == len(self.text):
            return False
        char = self.text[self.at]
        if char == ":" or len(self._held) > _LONGEST_BARE:
            self.at += char == ":"
            return self._keyed()
        if char == "<":
            quote = self.meets((QUOTE,))
            if quote is None:
                return False
            if quote:
                self.at += len(QUOTE)
                return True
            ended = self._at_end()
            if ended is None or self.at == len(self.text):
                return False
            if ended:
                return self._keyless()
        elif char in "})],":
            return self._keyless()
        self._held += char
        self.at += 1
        return True

    def _keyless(self) -> bool:
        """Text where a key and a value should be is passed over."""
        return self.turn(self._after)

    def _keyed(self) -> bool:
        name = _bare_key(self._held)
        self.argue(f"{self._joint}{json.dumps(name, ensure_ascii=False)}: ")
        self._joint = ", "
        self._types = None
        if len(self._open) == 1:
            self._types = self._schemas[self._name].described(name)
        return self.turn(self._value)

    def _value(self) -> bool:
        """State where a value begins."""
        if not self.skip_blank():
            return False
        char = self.text[self.at]
        if char in "{[":
            self.at += 1
            self.argue(char)
            self._joint = ""
            self._open.append("}" if char == "{" else "]")
            return self.turn(self._key if char == "{" else self._item)
        if char == '"':
            self._string_value = JsonValue()
            return self.turn(self._json_string)
        if char == "<":
            quote = self.meets((QUOTE,))
            if quote is None:
                return False
            if quote:
                self.at += len(QUOTE)
                self.argue('"')
                return self.turn(self._string)
        self._held = ""
        return self.turn(self._bare)

    def _item(self) -> bool:
        """State in an array: an item, or its end."""
        if not self.skip_blank():
            return False
        if self.text[self.at] == "]":
            return self._shut()
        self._types = None
        return self.turn(self._value)

    def _string(self) -> bool:
        end = self.text.find(QUOTE, self.at)
        if end < 0:
            stop = self._before_half(QUOTE)
            self._quote_text(self.text[self.at : stop])
            # Half a quote at the end of the text is markup.
            self.at = len(self.text) if self.last else stop
            return False
        self._quote_text(self.text[self.at : end])
        self.argue('"')
        self.at = end + len(QUOTE)
        return self.turn(self._after)

    def _before_half(self, marker: str) -> int:
        """Where an incomplete marker at the end of the text begins."""
        size = min(len(marker) - 1, len(self.text) - self.at)
        while size and not self.text.endswith(marker[:size]):
            size -= 1
        return len(self.text) - size

    def _quote_text(self, text: str) -> None:
        self.argue(json.dumps(text, ensure_ascii=False)[1:-1])

    def _json_string(self) -> bool:
        """State in a string with JSON's quotes, which some models write."""
        self.argue(self._string_value.take(self))
        return self._string_value.done and self.turn(self._after)

    def _bare(self) -> bool:
        """State in a value without quotes."""
        found = _BARE.match(self.text, self.at)
        # The pattern matches an empty string too.
        assert found is not None
        self._held += found[0]
        self.at = found.end()
        if self.at == len(self.text):
            return False
        char = self.text[self.at]
        if char == "<":
            ended = self._at_end()
            if ended is None or self.at == len(self.text):
                return False
            if not ended:
                self._held += char
                self.at += 1
                return True
        elif char in "{[" or (char in "}])" and char not in self._open):
            self._held += char
            self.at += 1
            return True
        self._put_bare()
        return self.turn(self._after)

    def _put_bare(self) -> None:
        text = self._held.strip()
        self._held = ""
        if self._types is not None:
            self.argue(value_as_json(text, self._types) if text else '""')
        else:
            self.argue(bare_as_json(text))

    def _after(self) -> bool:
        """State after a value: a comma, or the end of what holds it."""
        if not self.skip_blank():
            return False
        char = self.text[self.at]
        if char == ",":
            self.at += 1
            if self._open[-1] == "]":
                return self.turn(self._next_item)
            return self.turn(self._next_key)
        if char in "}])":
            return self._shut()
        if char == "<":
            ended = self._at_end()
            if ended is None or self.at == len(self.text):
                return False
            if ended:
                return self._close()
        # Text where a comma should be is passed over.
        self.at += 1
        return True

    def _next_item(self) -> bool:
        """State after a comma in an array."""
        if not self.skip_blank():
            return False
        char = self.text[self.at]
        if char == ",":
            self.at += 1
            return True
        if char == "]":
            return self._shut()
        self.argue(", ")
        self._types = None
        return self.turn(self._value)

    def _shut(self) -> bool:
        """A closing bracket ends the innermost object or array, whatever its form."""
        self.at += 1
        closing = self._open.pop()
        self._joint = ", "
        self.argue("}" if closing == ")" else closing)
        return self.turn(self._after if self._open else self._content)


def _bare_key(text: str) -> str:
    return text.strip().strip('"')


# ---------------------------------------------------------------- grammar

_LITERALS: Final = r"""
gemma_value: gemma_string | GEMMA_NUMBER | GEMMA_BOOLEAN | "null" | gemma_list | gemma_object
gemma_list: "[" (gemma_value ("," gemma_value)*)? "]"
gemma_object: "{" (gemma_pair ("," gemma_pair)*)? "}"
gemma_pair: GEMMA_KEY ":" gemma_value
GEMMA_KEY: /[a-zA-Z_][a-zA-Z0-9_]{0,63}/
GEMMA_INTEGER: /0|-?[1-9][0-9]{0,17}/
GEMMA_NUMBER: /0|-?[1-9][0-9]{0,17}|-?(0|[1-9][0-9]{0,17})\.[0-9]{1,18}/
GEMMA_BOOLEAN: "true" | "false"
""".strip()
_PLAIN_KEY: Final = re.compile(r"[^\s:,{}\[\]<\"][^:,{}\[\]<\"]*(?<!\s)")


def _key(name: str) -> str | None:
    return f"{name}:" if _PLAIN_KEY.fullmatch(name) else None


def _spelled(value: Any) -> str:
    match value:
        case str():
            return f"{QUOTE}{value}{QUOTE}"
        case list():
            return "[" + ",".join(map(_spelled, value)) + "]"
        case dict():
            return "{" + ",".join(f"{k}:{_spelled(v)}" for k, v in value.items()) + "}"
        case _:
            return json.dumps(value)


_DIALECT: Final = Dialect(
    any="gemma_value",
    any_object="gemma_object",
    simple={
        "string": "gemma_string",
        "integer": "GEMMA_INTEGER",
        "number": "GEMMA_NUMBER",
        "boolean": "GEMMA_BOOLEAN",
        "null": '"null"',
    },
    spell=_spelled,
    key=lambda name: f"{name}:",
    comma=",",
)


class _Grammar(LiteralGrammar):
    dialect = _DIALECT

    def text(self) -> str:
        grammar = self._grammar
        calls = grammar.any_call(
            f"{lark_string(f'call:{tool.function.name}{{')} {self.arguments(tool, _key)} "
            f'"}}" {grammar.marker(CALL_END)}'
            for tool in grammar.tools
        )
        grammar.terminal(_LITERALS)
        quote = grammar.marker(QUOTE)
        name = "gemma_string" if grammar.is_special(QUOTE) else "GEMMA_STRING"
        if name == "GEMMA_STRING":
            grammar.terminal("gemma_string: GEMMA_STRING")
        grammar.terminal(f"{name}: {quote} GEMMA_TEXT {quote}")
        banned = [] if grammar.is_special(QUOTE) else [QUOTE]
        grammar.terminal(f"GEMMA_TEXT: {text_without(banned)}")
        return grammar.tagged(CALL, calls)

    def _constant(self, value: Any) -> str:
        quote = self._grammar.marker(QUOTE)
        return f" {quote} ".join(map(lark_string, _spelled(value).split(QUOTE)))
