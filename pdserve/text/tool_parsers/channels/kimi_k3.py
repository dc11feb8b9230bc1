"""Parses Kimi K3's format: reasoning, answer and calls in tags made of special tokens.

    <|open|>think<|sep|>REASONING<|close|>think<|sep|><|open|>response<|sep|>ANSWER
    <|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>
    <|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

There are no line breaks between tags. A prompt ends after the tag that opens the reasoning, or the
answer. A string is written as it is, other values as JSON; `&` and `"` in a tag are escaped. The
arguments may also be one object, in the tag `json`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.channels.channel_reader import ChannelReader
from pdserve.text.tool_parsers.channels.kimi_k3_grammar import KimiK3Grammar
from pdserve.text.tool_parsers.partial_json import JsonValue
from pdserve.text.tool_parsers.tool_call_grammar import call_id
from pdserve.text.tool_parsers.typed_values import (
    ParameterTypes,
    check_parameters,
    json_or_text,
    value_as_json,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolChoiceMode

OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"
MARKERS: Final = (OPEN, CLOSE, SEP, "<|end_of_msg|>")
THINK: Final = f"{OPEN}think{SEP}"
THINK_END: Final = f"{CLOSE}think{SEP}"
TOOLS: Final = f"{OPEN}tools{SEP}"
_ARGUMENT_END: Final = f"{CLOSE}argument{SEP}"
_VALUE_ENDS: Final = (
    _ARGUMENT_END,
    f"{OPEN}argument ",
    f"{OPEN}call ",
    f"{CLOSE}call{SEP}",
    f"{CLOSE}tools{SEP}",
)
"""What ends a value; all but the first stand for an end that is missing."""
_ANY: Final = re.compile("|".join(map(re.escape, MARKERS)))
_MAYBE_END: Final = re.compile("|".join(map(re.escape, _VALUE_ENDS)))
_CHANNELS: Final = ("think", "response", "tools", "message")
_TAGS: Final = (*_CHANNELS, "call", "argument", "json")
_ATTRIBUTE: Final = re.compile(r'(\w+)="([^"]*)"')
_LONGEST_TAG: Final = 512


def is_family(template: str) -> bool:
    """Whether a chat template writes these tags."""
    return all(each in template for each in (OPEN, CLOSE, SEP))


class KimiK3:
    markers: Final = MARKERS
    starts: Final = (TOOLS,)

    def detect(self, template: str) -> bool:
        return is_family(template)

    def check(self, tools: Sequence[Tool]) -> None:
        check_parameters(tools)

    def parser(self, tools: Sequence[Tool]) -> KimiK3Reader:
        return KimiK3Reader(tools)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        return KimiK3Grammar(tools, choice, parallel, special).text()

    def call_id(self) -> str:
        return call_id()


class KimiK3Reader(ChannelReader):
    """Reads reasoning, content and calls."""

    __slots__ = (
        "_closing",
        "_held",
        "_junk",
        "_object",
        "_parameters",
        "_schemas",
        "_tag",
        "_thinking",
        "_types",
    )

    def __init__(self, tools: Sequence[Tool] = (), *, calls: bool = True) -> None:
        super().__init__(self._text, tools, calls=calls)
        self._schemas: ParameterTypes | None = None
        """Parameters of the function that is called; None outside of calls."""
        self._thinking = False
        self._closing = False
        """The tag that is read is one that closes."""
        self._tag = ""
        """Its inside, as far as it has come."""
        self._parameters = 0
        self._types: tuple[str, ...] = ()
        """Types of the value that is read; none: any JSON."""
        self._held: list[str] = []
        """The value, unless it is a string."""
        self._junk: list[str] = []
        """Text between parameters, which is content after the call."""
        self._object = JsonValue()

    @property
    def in_reasoning(self) -> bool:
        return self._thinking

    def begin_reasoning(self) -> None:
        """The prompt has opened the reasoning. Call it before any text."""
        self._thinking = True

    # ------------------------------------------------------------------ tags

    def _text(self) -> bool:
        """State outside of tags."""
        text, marker = self.seek(_ANY, MARKERS)
        self._show(text)
        if not marker:
            return False
        self.mark()
        if marker in (OPEN, CLOSE):
            self._closing = marker == CLOSE
            self._tag = ""
            return self.turn(self._head)
        return True

    def _show(self, text: str) -> None:
        if self._schemas is not None:
            self._junk.append(text)
        elif not self._thinking:
            self.say(text)
        else:
            self.reason(text)

    def _head(self) -> bool:
        """State inside of a tag. What does not become one is text."""
        text, marker = self.seek(_ANY, MARKERS)
        self._tag += text
        if marker == SEP and len(self._tag) <= _LONGEST_TAG:
            return self._tagged()
        if not marker and len(self._tag) <= _LONGEST_TAG and not self.last:
            return False
        self.at -= len(marker)
        if marker and self._tag in _CHANNELS:
            # Only the separator was left out.
            return self._tagged()
        if marker or not self._is_cut():
            self._show(self._tag)
        self._tag = ""
        return self.turn(self._text)

    def _is_cut(self) -> bool:
        """True if the text has ended and its rest is the beginning of a tag."""
        word = self._tag.split(maxsplit=1)[0] if self._tag.strip() else ""
        return self.last and any(each.startswith(word) for each in _TAGS)

    def _tagged(self) -> bool:
        words = self._tag.split(maxsplit=1)
        name = words[0] if words else ""
        if name in _CHANNELS:
            if self._schemas is not None:
                self._close()
            self._thinking = name == "think" and not self._closing
            return self.turn(self._text)
        if name == "call" and self._calls:
            return self._close() if self._closing else self._begins()
        if self._schemas is None or self._closing:
            return self.turn(self._text)
        if name == "argument":
            return self._parameter()
        if name == "json" and not self._parameters:
            self._object = JsonValue(_VALUE_ENDS)
            return self.turn(self._object_begins)
        return self.turn(self._text)

    def _attributes(self) -> dict[str, str]:
        found = _ATTRIBUTE.findall(self._tag)
        return {key: text.replace("&quot;", '"').replace("&amp;", "&") for key, text in found}

    # ------------------------------------------------------------------ calls

    def _begins(self) -> bool:
        if self._schemas is not None:
            self._close()
        name = self._attributes().get("tool", "")
        if name:
            self._thinking = False
            self.begin(name)
            self._schemas = ParameterTypes(self._known.get(name))
            self._parameters = 0
        return self.turn(self._text)

    def _close(self) -> bool:
        """End the call, if there is one."""
        if self._schemas is not None:
            self._schemas = None
            if self._parameters >= 0:
                self.argue("}" if self._parameters else "{}")
            self._show("".join(self._junk).strip())
            self._junk.clear()
        return self.turn(self._text)

    def _object_begins(self) -> bool:
        """State before the arguments as one object."""
        if not self.skip_blank():
            return False
        if self.text[self.at] != "{":
            return self.turn(self._text)
        self._parameters = -1
        return self.turn(self._whole)

    def _whole(self) -> bool:
        self.argue(self._object.take(self))
        ended = self._object.done or self._object.broken
        return ended and self.turn(self._text)

    def _parameter(self) -> bool:
        # A parameter is read only inside of a call.
        assert self._schemas is not None
        told = self._attributes()
        name = told.get("key", "")
        if not name or self._parameters < 0:
            return self.turn(self._text)
        declared = self._schemas.types(name)
        self._types = declared if told.get("type", "string") == "string" else ()
        if "string" in self._types:
            self._types = ("string",)
        before = ", " if self._parameters else "{"
        self.argue(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        self._parameters += 1
        self._held.clear()
        if self._is_text():
            self.argue('"')
        return self.turn(self._value)

    def _is_text(self) -> bool:
        return self._types == ("string",)

    def _value(self) -> bool:
        text, end = self.seek(_MAYBE_END, _VALUE_ENDS)
        if self._is_text():
            self.argue(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._held.append(text)
        if not end:
            if self.last:
                self.argue("".join(self._held))
                self._held.clear()
            return False
        if end != _ARGUMENT_END:
            self.at -= len(end)
        if self._is_text():
            self.argue('"')
        elif self._types:
            self.argue(value_as_json("".join(self._held), self._types))
        else:
            self.argue(json_or_text("".join(self._held)))
        return self.turn(self._text)
