"""Parses Python calls between markers: LFM2's list of calls, and OLMo 3's call on each line.

    <|tool_call_start|>[f(a=1, b="x"), g()]<|tool_call_end|>
    <function_calls>f(a=1)
    g()</function_calls>

Any name makes a call. Calls may be separated by commas or line breaks, with or without brackets; a
JSON object with a name and arguments is a call, too. Arguments are literals given by keyword. A
call is shown once it is complete; one that cannot be parsed is content, and the next one is read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.base import SchemaFree, ToolCallReader
from pdserve.text.tool_parsers.partial_json import CallObject
from pdserve.text.tool_parsers.python_calls.pythonic import PythonicArguments, arguments_json
from pdserve.text.tool_parsers.python_calls.pythonic_grammar import PythonicGrammar
from pdserve.text.tool_parsers.tool_call_grammar import call_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.output_parts import OutputParser
    from pdserve.text.tool_parsers.base import ToolChoiceMode

__all__ = ["Lfm2", "Olmo3"]

_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]+")
_LONGEST_NAME: Final = 256
_FENCE: Final = "```"
_LANGUAGE: Final = re.compile(r"[a-z]*")
_LONGEST_ECHO: Final = 8192
"""Most characters after a block that may turn out to repeat it."""


class MarkedPython(SchemaFree):
    """A format of Python calls between two markers."""

    start: str
    end: str
    opening = ""
    closing = ""
    between = "\n"

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start, self.end

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start,)

    def detect(self, template: str) -> bool:
        return self.start in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return MarkedPythonReader(self.start, self.end)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        return PythonicGrammar(tools, choice, parallel, special).block(
            self.start, self.end, self.opening, self.between, self.closing
        )

    def call_id(self) -> str:
        return call_id()


class Lfm2(MarkedPython):
    start = "<|tool_call_start|>"
    end = "<|tool_call_end|>"
    opening = "["
    closing = "]"
    between = ", "


class Olmo3(MarkedPython):
    start = "<function_calls>"
    end = "</function_calls>"

    def detect(self, template: str) -> bool:
        """Several families may use the words; OLMo's templates print results as `environment`."""
        return super().detect(template) and "environment" in template


class MarkedPythonReader(ToolCallReader):
    __slots__ = ("_arguments", "_echo", "_markers", "_name", "_object", "_pattern", "_raw")

    def __init__(self, start: str, end: str) -> None:
        super().__init__(self._content)
        self._markers = (start, end)
        self._pattern = re.compile(f"{re.escape(start)}|{re.escape(end)}|\n")
        self._name = ""
        self._raw: list[str] = []
        """Text that has not become a call."""
        self._echo: list[str] = []
        """Text after a block that may repeat it, and its length."""
        self._arguments = PythonicArguments()
        self._object = CallObject()

    def _content(self) -> bool:
        start, end = self._markers
        marker = self.seek_call(_either(start, end), self._markers)
        if marker == start:
            return self.turn(self._between)
        return bool(marker)

    def _between(self) -> bool:
        """State in a block: before a call, or before the end."""
        if not self.skip_blank():
            return False
        char = self.text[self.at]
        if char in "[],;":
            self.at += 1
            return True
        if char == "{":
            self._object = CallObject(self._markers)
            return self.turn(self._json)
        if _NAME.match(char):
            self._name = ""
            return self.turn(self._named)
        known = (*self._markers, _FENCE)
        marker = self.meets(known)
        if marker is None:
            return False
        self.drop_half(self._markers)
        if not marker:
            return self.turn(self._words)
        self.at += len(marker)
        if marker == self._markers[1]:
            return self.turn(self._after)
        return marker != _FENCE or self.turn(self._fence)

    def _fence(self) -> bool:
        """State behind the beginning of a code block, which may name a language."""
        found = _LANGUAGE.match(self.text, self.at)
        # The pattern matches an empty string too.
        assert found is not None
        self.at = found.end()
        return self.at < len(self.text) and self.turn(self._between)

    def _words(self) -> bool:
        """State in text that is no call, up to the end of the line or of the block."""
        text, marker = self.seek(self._pattern, self._markers)
        self.say(text)
        if marker == "\n":
            self.say(marker)
        elif marker:
            self.mark()
        if marker == self._markers[1]:
            return self.turn(self._after)
        return bool(marker) and self.turn(self._between)

    def _give_up(self) -> bool:
        self.say_raw("".join(self._raw), _either(*self._markers))
        self._raw.clear()
        return self.turn(self._words)

    def _json(self) -> bool:
        if not self._object.read(self):
            return False
        if self._object.failed:
            self._raw.append(self._object.raw)
            return self._give_up()
        return self.turn(self._between)

    def _named(self) -> bool:
        found = _NAME.match(self.text, self.at)
        if found is not None:
            self._name += found[0]
            self.at = found.end()
        waits = self.at == len(self.text) and len(self._name) <= _LONGEST_NAME
        if waits and not self.last:
            return False
        self._raw.append(self._name)
        if not self.text.startswith("(", self.at) or len(self._name) > _LONGEST_NAME:
            return self._give_up()
        self.at += 1
        self._raw.append("(")
        self._arguments = PythonicArguments()
        return self.turn(self._call)

    def _call(self) -> bool:
        begin = self.at
        ended = self._arguments.read(self)
        self._raw.append(self.text[begin : self.at])
        if not ended:
            return self.last and self._give_up()
        text = None if self._arguments.broken else arguments_json(self._arguments.items)
        if text is None:
            return self._give_up()
        self._raw.clear()
        self.begin(self._name)
        self.argue(text)
        return self.turn(self._between)

    def _after(self) -> bool:
        """State after a block. Some models write it again, without its start."""
        if not self.say_blank():
            return False
        if self.text[self.at] != "[" or not self.calls:
            return self.turn(self._content)
        self._echo = []
        return self.turn(self._repeated)

    def _repeated(self) -> bool:
        start, end = self._markers
        text, marker = self.seek(_either(start, end), self._markers)
        self._echo.append(text)
        if marker == end:
            self.mark()
            return self.turn(self._content)
        if not marker and not self.last and sum(map(len, self._echo)) < _LONGEST_ECHO:
            return False
        self.at -= len(marker)
        self.say("".join(self._echo))
        return self.turn(self._content)


def _either(start: str, end: str) -> re.Pattern[str]:
    return re.compile(f"{re.escape(start)}|{re.escape(end)}")
