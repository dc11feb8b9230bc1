"""Writes valid JSON from the tokens of JSON that a model may have written wrongly.

Valid JSON comes out as it is, layout included. Otherwise what is missing is added: quotes, a comma,
a colon, a value (null), closing brackets. What is too much is left out: commas, colons, and words
where a comma should be. A closing bracket ends the innermost object or array, whatever its form.
Nothing that was output is taken back, so a comma waits for what follows it. It does not know what a
text's tokens are: the caller finds them. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Final, Literal

__all__ = ["JsonRepair", "bare_as_json"]

_NUMBER: Final = re.compile(r"(-?(?:0|[1-9]\d*))(?:(\.\d+)?([eE][+-]?\d+)?|\.)", re.ASCII)
_WORDS: Final = {
    "true": "true",
    "false": "false",
    **dict.fromkeys(("null", "none", "nil"), "null"),
}
"""Bare values by their lower-case spelling."""


class JsonRepair:
    """One value. Each method is told a token, and returns the text to output for it."""

    __slots__ = ("_comma", "_expect", "_open")

    def __init__(self) -> None:
        self._open: list[str] = []
        """Closing brackets of the objects and arrays that are open."""
        self._expect: Literal["value", "key", "colon", "comma"] = "value"
        """What comes next in valid JSON."""
        self._comma = ""
        """A comma that is not output yet, and the blanks after it."""

    @property
    def depth(self) -> int:
        """Number of objects and arrays that are open."""
        return len(self._open)

    @property
    def takes_key(self) -> bool:
        """True where a bare text is a key."""
        return self._expect == "key"

    @property
    def takes_bare(self) -> bool:
        """True where a bare text is a key or a value; elsewhere it is left out."""
        return self._expect != "comma"

    def blank(self, text: str) -> str:
        if not self._comma:
            return text
        self._comma += text
        return ""

    def comma(self) -> str:
        text = self._missing()
        if text or self._expect == "comma":
            self._comma = ","
            self._expect = "key" if self._in_object() else "value"
        return text

    def colon(self) -> str:
        if self._expect != "colon":
            return ""
        self._expect = "value"
        return ":"

    def open(self, bracket: str) -> str:
        text = self._before_value()
        self._open.append("}" if bracket == "{" else "]")
        self._expect = "key" if bracket == "{" else "value"
        return text + bracket

    def close(self) -> str:
        """A closing bracket, while one is open."""
        text = self._missing() + self.pending()[1:] + self._open.pop()
        self._expect = "comma"
        return text

    def string(self) -> str:
        """The beginning of a string. Its own text, with the quotes, is the caller's to output."""
        if not self._in_object() or self._expect in ("value", "colon"):
            text = self._before_value()
            self._expect = "comma"
        else:
            text = ", " if self._expect == "comma" else self.pending()
            self._expect = "colon"
        return text

    def bare(self, text: str) -> str:
        """A text without quotes."""
        if not self.takes_bare:
            return ""
        if self.takes_key:
            found = self.pending() + json.dumps(text, ensure_ascii=False)
            self._expect = "colon"
            return found
        found = self._before_value() + bare_as_json(text)
        self._expect = "comma"
        return found

    def pending(self) -> str:
        """The comma that waits, which is forgotten."""
        text, self._comma = self._comma, ""
        return text

    def end(self) -> str:
        """The text that completes the value, which ends before its time."""
        return "".join(self.close() for _ in range(self.depth))

    def _in_object(self) -> bool:
        return self._open[-1:] == ["}"]

    def _missing(self) -> str:
        """What the last key lacks, if no value follows."""
        if self._expect == "colon":
            text = ": null"
        elif self._expect == "value" and self._in_object():
            text = "null"
        else:
            return ""
        self._expect = "comma"
        return text

    def _before_value(self) -> str:
        """What has to be output before a value. An object's value that has no key gets an empty
        one."""
        match self._expect:
            case "value":
                return self.pending()
            case "colon":
                return ": "
            case "key":
                return f'{self.pending()}"": '
            case "comma":
                return ', "": ' if self._in_object() else ", "


def bare_as_json(text: str) -> str:
    """A text without quotes as JSON: a number, a boolean or null if it looks like it, else a
    string."""
    number = _NUMBER.fullmatch(text)
    if number is not None:
        return f"{text}0" if text.endswith(".") else text
    return _WORDS.get(text.lower()) or json.dumps(text, ensure_ascii=False)
