"""Reads JSON while a model writes it: one value, or one tool call as an object.

Nothing is parsed twice: a value's text is scanned once to find its end. What is output for a
complete value is valid JSON whatever the model wrote: strings are repaired here (raw line breaks,
backslashes that escape nothing), the rest by `json_repair.py`. Valid JSON is output as it is.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pdserve.text.incremental_reader import IncrementalReader
from pdserve.text.tool_parsers.json_repair import JsonRepair

if TYPE_CHECKING:
    from collections.abc import Container

    from pdserve.text.tool_parsers.base import ToolCallReader

_IN_STRING: Final = {
    '"': re.compile(r'[^"\\\x00-\x1f]+'),
    "'": re.compile(r"[^'\"\\\x00-\x1f]+"),
}
_BLANKS: Final = " \t\n\r"
_BLANK: Final = re.compile(r"[ \t\n\r]+")
_TOKENS: Final = '"{}[],'
_BEGIN: Final = '"{}[]'
"""What begins a value that is more than a number or a word, or ends what is around it."""
_WORD: Final = re.compile(r'[^,{}\[\]"<]+')
_KEY: Final = re.compile(r'[^,:{}\[\]"<]+')
_SCALAR: Final = re.compile(r'[^,:{}\[\]"<\s]+')
_HEX: Final = re.compile(r"[0-9a-fA-F]{0,4}")
_BRACE: Final = re.compile(r"\{\s*")
_LONGEST_BLANK: Final = 64
_ESCAPES: Final = '"\\/bfnrt'
ARGUMENTS: Final = ("arguments", "parameters")


class JsonValue:
    """Finds the end of one value that begins at the reader's position, and repairs it.

    The value ends with the bracket or the quote that completes it, or as a number or a word before
    what follows it. `closings`: markup that ends the call even if the value is not complete; the
    value is completed then. It counts anywhere outside of strings; in a string only at the
    beginning of a line, where JSON allows none. If the text ends within the value, nothing is
    added.
    """

    __slots__ = (
        "_bare",
        "_closings",
        "_json",
        "_line_closings",
        "_quote",
        "_scalar",
        "broken",
        "done",
    )

    def __init__(self, closings: tuple[str, ...] = ()) -> None:
        self._closings = closings
        self._line_closings = tuple(end + each for each in closings for end in ("\n", "\r\n"))
        self._json = JsonRepair()
        self._scalar = False
        """The value is no string, object or array, and some of it was read."""
        self._bare: list[str] = []
        """Text without quotes inside of an object or array, as far as it has come."""
        self._quote = ""
        """The quote that ends the string that is read; empty outside of strings."""
        self.done = False
        self.broken = False
        """Markup was found inside the value."""

    def take(self, reader: IncrementalReader) -> str:
        """Return the value's next text, repaired; the reader moves past its source."""
        taken: list[str] = []
        step = True
        while step and not self.done and not self.broken and reader.at < len(reader.text):
            step = self._in_string(reader, taken) if self._quote else self._outside(reader, taken)
        if reader.last and reader.at == len(reader.text) and not self.done and not self.broken:
            taken.append(self._json.pending())
            taken += self._bare
            self._bare.clear()
        return "".join(taken)

    def _outside(self, reader: IncrementalReader, taken: list[str]) -> bool:
        char = reader.text[reader.at]
        if char in "<[" and self._closings:
            marker = reader.meets(self._closings)
            if marker is None:
                return False
            reader.drop_half(self._closings)
            if marker:
                self._break(taken)
                return False
            if reader.at == len(reader.text):
                return False
        if not self._json.depth and char not in _BEGIN:
            return self._top(reader, taken)
        if char in _TOKENS or (char == ":" and (self._json.takes_key or not self._bare)):
            self.done = self._scalar
            return not self.done and self._token(char, reader, taken)
        if not self._bare:
            blank = _BLANK.match(reader.text, reader.at)
            if blank is not None:
                taken.append(self._json.blank(blank[0]))
                reader.at = blank.end()
                return True
            if char == "'" and self._json.takes_bare:
                return self._token(char, reader, taken)
        return self._word(reader)

    def _top(self, reader: IncrementalReader, taken: list[str]) -> bool:
        """Read a number or a word that is the whole value; it ends before what follows it."""
        found = _SCALAR.match(reader.text, reader.at)
        if found is None:
            self.done = True
            return False
        taken.append(found[0])
        reader.at = found.end()
        self._scalar = True
        return True

    def _word(self, reader: IncrementalReader) -> bool:
        """Read text without quotes, of which a `<` that begins no marker may be a part. Where none
        may stand, blanks are no part of it."""
        word = _WORD if self._json.takes_bare else _SCALAR
        found = (_KEY if self._json.takes_key else word).match(reader.text, reader.at)
        size = 1 if found is None else found.end() - reader.at
        if self._json.takes_bare:
            self._bare.append(reader.text[reader.at : reader.at + size])
        reader.at += size
        return True

    def _token(self, char: str, reader: IncrementalReader, taken: list[str]) -> bool:
        """Read a quote, a bracket, a comma or a colon."""
        self._end_bare(taken)
        match char:
            case "," | ":":
                taken.append(self._json.comma() if char == "," else self._json.colon())
            case '"' | "'":
                taken.append(self._json.string() + '"')
                self._quote = char
            case "{" | "[":
                taken.append(self._json.open(char))
            case _ if not self._json.depth:
                self.broken = True
                return False
            case _:
                taken.append(self._json.close())
                self.done = not self._json.depth
        reader.at += 1
        return True

    def _end_bare(self, taken: list[str]) -> None:
        """Output text without quotes, which is complete."""
        if self._bare:
            text = "".join(self._bare)
            self._bare.clear()
            word = text.rstrip(_BLANKS)
            taken.append(self._json.bare(word))
            taken.append(self._json.blank(text[len(word) :]))

    def _break(self, taken: list[str]) -> None:
        """End the value at markup."""
        if self._quote:
            taken.append('"')
        self._end_bare(taken)
        taken.append(self._json.end())
        self.broken = True

    def _in_string(self, reader: IncrementalReader, taken: list[str]) -> bool:
        found = _IN_STRING[self._quote].match(reader.text, reader.at)
        if found is not None:
            taken.append(found[0])
            reader.at = found.end()
            return True
        char = reader.text[reader.at]
        if char == "\\":
            return self._escape(reader, taken)
        if char == self._quote:
            self._quote = ""
            self.done = not self._json.depth
            taken.append('"')
        else:
            if char in "\r\n" and self._line_closings:
                marker = reader.meets(self._line_closings)
                if marker:
                    self._break(taken)
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
        elif char == "'":
            taken.append(char)
            reader.at += 2
            return True
        elif char not in _ESCAPES:
            taken.append("\\\\")
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
        """What follows is not of the call."""
        begun = self.begun
        self._cut_short(reader)
        if self.begun and not begun:
            reader.argue("{}")
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


def refuse_constant(constant: str) -> NoReturn:
    """Errors: `ValueError`. NaN and infinity are constants of Python's JSON alone."""
    raise ValueError(f"{constant} is no JSON")


def json_or_none(text: str) -> Any:
    """The parsed JSON; None if it is no JSON or cannot be written as UTF-8."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
        if isinstance(value, str):
            value.encode()
    except (ValueError, RecursionError):
        return None
    return value


def repaired_string(text: str) -> str | None:
    """A text between quotes as a JSON string; None if it does not end with its quote."""
    reader = IncrementalReader(lambda: False)
    reader.text, reader.last = text, True
    value = JsonValue()
    found = value.take(reader)
    return found if value.done and reader.at == len(text) else None


def _object_text(text: str) -> str | None:
    """The object that a value of `arguments` stands for, as JSON; None if it stands for none."""
    if text.startswith("{"):
        return text
    value = json_or_none(text)
    if isinstance(value, str):
        text = value.strip() or "{}"
        return text if isinstance(json_or_none(text), dict) else None
    return "{}" if text == "null" else None
