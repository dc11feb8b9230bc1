"""Reads JSON while a model writes it: one value, or one tool call as an object.

Nothing is parsed twice: a value's text is scanned once to find its end. Strings are repaired where
models make errors that have only one reading: raw line breaks, and backslashes that escape nothing.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Container

    from pdserve.text.incremental_reader import IncrementalReader
    from pdserve.text.tool_parsers.base import ToolCallReader

_IN_STRING: Final = re.compile(r'[^"\\\x00-\x1f]+')
_OUTSIDE: Final = re.compile(r'[^"{}\[\]<]+')
_SCALAR: Final = re.compile(r'[^,:{}\[\]"<\s]+')
_HEX: Final = re.compile(r"[0-9a-fA-F]{0,4}")
_BRACE: Final = re.compile(r"\{\s*")
_LONGEST_BLANK: Final = 64
_ESCAPES: Final = '"\\/bfnrt'
ARGUMENTS: Final = ("arguments", "parameters")


class JsonValue:
    """Finds the end of one value that begins at the reader's position.

    `closings`: markup that ends the call even if the value is not complete. It counts anywhere
    outside of strings; in a string only at the beginning of a line, where JSON allows none.
    """

    __slots__ = ("_closings", "_depth", "_line_closings", "_scalar", "_string", "broken", "done")

    def __init__(self, closings: tuple[str, ...] = ()) -> None:
        self._closings = closings
        self._line_closings = tuple(end + each for each in closings for end in ("\n", "\r\n"))
        self._depth = 0
        self._scalar = False
        """The value is no string, object or array, and some of it was read."""
        self._string = False
        self.done = False
        self.broken = False
        """Markup was found inside the value."""

    def take(self, reader: IncrementalReader) -> str:
        """Return the value's next text, repaired; the reader moves past its source."""
        taken: list[str] = []
        step = True
        while step and not self.done and not self.broken and reader.at < len(reader.text):
            step = self._in_string(reader, taken) if self._string else self._outside(reader, taken)
        return "".join(taken)

    def _outside(self, reader: IncrementalReader, taken: list[str]) -> bool:
        char = reader.text[reader.at]
        if char in "<[" and self._closings:
            marker = reader.meets(self._closings)
            if marker is None:
                return False
            reader.drop_half(self._closings)
            self.broken = bool(marker)
            if self.broken or reader.at == len(reader.text):
                return False
        if char in '"{}[]':
            self.done = self._scalar
            if self.done:
                return False
            self._turn(char)
            if self.broken:
                return False
            taken.append(char)
            reader.at += 1
            return True
        return self._run(reader, taken)

    def _run(self, reader: IncrementalReader, taken: list[str]) -> bool:
        """Read characters that neither open nor close anything."""
        pattern = _OUTSIDE if self._depth else _SCALAR
        found = pattern.match(reader.text, reader.at)
        if found is None:
            if self._depth:
                # This is a `<` that begins no marker.
                taken.append(reader.text[reader.at])
                reader.at += 1
                return True
            # A scalar ends before the character that follows it.
            self.done = True
            return False
        taken.append(found[0])
        reader.at = found.end()
        self._scalar = not self._depth
        return True

    def _turn(self, char: str) -> None:
        if char == '"':
            self._string = True
        elif char in "{[":
            self._depth += 1
        elif self._depth:
            self._depth -= 1
            self.done = not self._depth
        else:
            self.broken = True

    def _in_string(self, reader: IncrementalReader, taken: list[str]) -> bool:
        found = _IN_STRING.match(reader.text, reader.at)
        if found is not None:
            taken.append(found[0])
            reader.at = found.end()
            return True
        char = reader.text[reader.at]
        if char == "\\":
            return self._escape(reader, taken)
        if char == '"':
            self._string = False
            self.done = not self._depth
            taken.append(char)
        else:
            if char in "\r\n" and self._line_closings:
                marker = reader.meets(self._line_closings)
                self.broken = bool(marker)
                if marker != "":
                    return False
            taken.append(json.dumps(char)[1:-1])
        reader.at += 1
        return True

    def _escape(self, reader: IncrementalReader, taken: list[str]) -> bool:
        """Read a backslash and what it escapes, if all of it is there."""
        text, at = reader.text, reader.at
        char = text[at + 1 : at + 2]
        size = 2
        if char == "u":
            digits = _HEX.match(text, at + 2)
            # The pattern matches an empty string too.
            assert digits is not None
            size = 6
            if len(digits[0]) < 4:
                if digits.end() == len(text):
                    return self._cut_short(reader, taken)
                taken.append("\\\\")
                reader.at += 1
                return True
        elif not char:
            return self._cut_short(reader, taken)
        elif char < " ":
            # A raw control character after a backslash becomes its JSON escape, such as `\n`.
            taken.append("\\")
            taken.append(json.dumps(char)[2:-1])
            reader.at += 2
            return True
        elif char not in _ESCAPES:
            taken.append("" if char == "'" else "\\\\")
            reader.at += 1
            return True
        taken.append(text[at : at + size])
        reader.at += size
        return True

    def _cut_short(self, reader: IncrementalReader, taken: list[str]) -> bool:
        if reader.last:
            taken.append(reader.text[reader.at :])
            reader.at = len(reader.text)
        return False


class CallObject:
    """Reads one object that is a call: `{"name": ..., "arguments": {...}}`, keys in any order.

    The arguments may be an object, a string that holds one, null or absent. Other keys are ignored.
    `known`: names that make it a call; None: any. `bare`: an object without arguments is a call,
    too.
    """

    __slots__ = (
        "_arguments",
        "_bare",
        "_closings",
        "_expect",
        "_held",
        "_key",
        "_known",
        "_name",
        "_name_keys",
        "_raw",
        "_stream",
        "_value",
        "begun",
        "done",
        "failed",
    )

    def __init__(
        self,
        closings: tuple[str, ...] = (),
        *,
        known: Container[str] | None = None,
        bare: bool = True,
        name_keys: tuple[str, ...] = ("name",),
    ) -> None:
        self._closings = closings
        self._known = known
        self._name_keys = name_keys
        self._bare = bare
        self._expect = "{"
        """What must come next: a character, or `value`."""
        self._value: JsonValue | None = None
        """The value, or key, that is being read."""
        self._held: list[str] = []
        """Its text, as far as it is needed."""
        self._key = ""
        self._name = ""
        self._arguments: str | None = None
        """Complete arguments that wait for the name."""
        self._stream = False
        """The value is the arguments, which are output as they come."""
        self._raw: list[str] = []
        """All text so far, as long as it may turn out not to be a call."""
        self.begun = False
        self.done = False
        self.failed = False
        """The object is no call; `raw` is all the text read."""

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def read(self, reader: ToolCallReader) -> bool:
        """Continue; returns whether it is `done` or `failed`."""
        while not (self.done or self.failed):
            begin = reader.at
            more = self._step(reader)
            if not self.begun:
                self._raw.append(reader.text[begin : reader.at])
            if not more:
                if not reader.last:
                    return False
                self._cut_short(reader)
        return True

    def _cut_short(self, reader: ToolCallReader) -> None:
        """The text has ended: if no arguments are required, a name is enough for a call."""
        if not self.begun and self._name and self._bare:
            self._begin(reader)
        self.done = self.begun
        self.failed = not self.begun

    def _begin(self, reader: ToolCallReader) -> None:
        reader.begin(self._name)
        self.begun = True
        self._raw.clear()

    def _step(self, reader: ToolCallReader) -> bool:
        if self._value is not None:
            return self._take(reader, self._value)
        if not reader.skip_blank():
            return False
        char = reader.text[reader.at]
        if self._expect == "value":
            return self._open(reader, char)
        elif self._expect == "key" and char == '"':
            self._value = JsonValue(self._closings)
            self._held.clear()
        elif self._expect == "key" and char == "}":
            reader.at += 1
            self._end(reader)
        elif char == self._expect or (char == "," and self._expect == "key"):
            reader.at += 1
            self._expect = "value" if char == ":" else "key"
        else:
            return self._broken(reader)
        return True

    def _open(self, reader: ToolCallReader, char: str) -> bool:
        streams = self._key in ARGUMENTS and char == "{" and bool(self._name) and not self.begun
        if streams:
            found = _looks_like_object(reader)
            if not found:
                self.failed = found is not None
                return self.failed
        self._value = JsonValue(self._closings)
        self._held.clear()
        if streams:
            self._begin(reader)
            self._stream = True
        return True

    def _take(self, reader: ToolCallReader, value: JsonValue) -> bool:
        text = value.take(reader)
        if self._stream:
            reader.argue(text)
        elif not self.begun:
            self._held.append(text)
        if value.broken:
            return self._broken(reader)
        if value.done:
            self._value = None
            self._close(reader)
        return value.done

    def _broken(self, reader: ToolCallReader) -> bool:
        self._cut_short(reader)
        return True

    def _close(self, reader: ToolCallReader) -> None:
        """A key or a value is complete."""
        if self._expect == "key":
            self._key = json_or_none("".join(self._held)) if not self.begun else ""
            self._expect = ":"
            return
        self._expect = "key"
        self._stream = False
        if self.begun:
            return
        if self._key in self._name_keys:
            self._named(reader)
        elif self._key in ARGUMENTS:
            self._argued(reader)

    def _named(self, reader: ToolCallReader) -> None:
        name = json_or_none("".join(self._held))
        if isinstance(name, str) and name and (self._known is None or name in self._known):
            self._name = name
            self._pair(reader)
        else:
            self.failed = True

    def _argued(self, reader: ToolCallReader) -> None:
        self._arguments = _object_text("".join(self._held))
        self.failed = self._arguments is None
        self._pair(reader)

    def _pair(self, reader: ToolCallReader) -> None:
        if self._name and self._arguments is not None:
            self._begin(reader)
            reader.argue(self._arguments)

    def _end(self, reader: ToolCallReader) -> None:
        if not self.begun and self._name and self._bare:
            self._begin(reader)
            reader.argue("{}")
        self.done = self.begun
        self.failed = not self.begun


def _looks_like_object(reader: ToolCallReader) -> bool | None:
    """Whether a quote or a brace follows the brace at the reader's position; None: more text
    decides."""
    found = _BRACE.match(reader.text, reader.at)
    # The caller has seen the brace.
    assert found is not None
    if found.end() - reader.at > _LONGEST_BLANK:
        return True
    if found.end() == len(reader.text):
        return True if reader.last else None
    return reader.text[found.end()] in '"}'


def json_or_none(text: str) -> Any:
    """The parsed JSON; None if it is no JSON or cannot be written as UTF-8."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()
    except (ValueError, RecursionError):
        return None
    return value


def _object_text(text: str) -> str | None:
    """The object that a value of `arguments` stands for, as JSON; None if it stands for none."""
    if text.startswith("{"):
        return text
    value = json_or_none(text)
    if isinstance(value, str):
        text = value.strip()
        return (text or "{}") if isinstance(json_or_none(text or "{}"), dict) else None
    return "{}" if text == "null" else None
