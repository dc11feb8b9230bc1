"""Parses the format of Llama 3.2 and 4: a Python list of calls, `[f(a=1, b="x"), g()]`.

The list is the whole answer. Only names tell it from an answer that is a list, so calls must name
tools of the request unless the list stands between `<|python_start|>` and `<|python_end|>`.
Arguments are literals given by keyword. A call is shown once it is complete; one that cannot be
parsed is content.
"""

from __future__ import annotations

import ast
import json
import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from pdserve.text.tool_parsers.base import SchemaFree, ToolCallReader
from pdserve.text.tool_parsers.python_calls.pythonic_grammar import PythonicGrammar
from pdserve.text.tool_parsers.python_literals import MAX_STRUCTURE, structure_size
from pdserve.text.tool_parsers.tool_call_grammar import call_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.incremental_reader import IncrementalReader
    from pdserve.text.output_parts import OutputParser
    from pdserve.text.tool_parsers.base import ToolChoiceMode

START: Final = "<|python_start|>"
END: Final = "<|python_end|>"
_MARKER: Final = re.compile(f"{re.escape(START)}|{re.escape(END)}")
_MARKER_OR_LIST: Final = re.compile(rf"{re.escape(START)}|{re.escape(END)}|\[")
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]+")
_LONGEST_NAME: Final = 256
_PLAIN: Final = {quote: re.compile(rf"[^\\\r\n\0{quote}]+") for quote in "'\""}
_BEHIND_STRING: Final = re.compile(r"\s{0,32}(?P<brackets>[)\]}][)\]}\s]{0,31})?")
_AFTER_STRING: Final = ",:<+*%'\""
"""What may follow a string: another one and operators, too, which make no literal."""
_AFTER_CALL: Final = re.compile(r"\).*[\]\n]\s*$", re.DOTALL)
"""Brackets behind which any text may stand: they end a list of calls, or the line of one."""
_PADDED: Final = re.compile(r"\s*(-?)0+([1-9][0-9]{0,99})\s*")
"""An integer with zeros in front, which Python refuses."""
_OUTSIDE: Final = re.compile(r"[^'\"()\[\]{}<,]+")
_ITEM: Final = re.compile(r"\s*([^\s=]+)\s*=(.*)", re.DOTALL)
_ESCAPES: Final = "\\'\"abfnrtvxuUN01234567\r\n"
_WORDS: Final = {"true": True, "false": False, "null": None}
"""JSON's words, which models sometimes use."""
_NO_JSON: Final = object()


class Pythonic(SchemaFree):
    markers: Final = (START, END)
    starts: Final = (START,)

    def detect(self, template: str) -> bool:
        return START in template or "[func_name1(" in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _Parser(tools)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        """The grammar. In free text a call begins with a bracket, or with the start marker if that
        is a token of its own."""
        return PythonicGrammar(tools, choice, parallel, special).text()

    def call_id(self) -> str:
        return call_id()


class _Parser(ToolCallReader):
    __slots__ = ("_arguments", "_before", "_known", "_name", "_raw", "_skipped", "_tagged")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(self._first)
        self._known = {tool.function.name for tool in tools}
        self._tagged = False
        """The start marker stands before the list."""
        self._before = 0
        """Number of calls before the list."""
        self._skipped = 0
        """Number of pieces in `_raw` that belong to calls with arguments that are no literals."""
        self._name = ""
        self._raw: list[str] = []
        """Text that has not become a call."""
        self._arguments = PythonicArguments()

    def _first(self) -> bool:
        """State at the start of the answer, or of a list between markers."""
        if not self.say_blank():
            return False
        marker = self.meets((START,))
        if marker is None:
            return False
        if not marker and self.text[self.at] == "[":
            self.at += 1
            return self._list_begins()
        return self.turn(self._content)

    def _list_begins(self) -> bool:
        self._raw = ["["]
        self._before = self.calls
        self._skipped = 0
        return self.turn(self._list)

    def _content(self) -> bool:
        text, marker = self.seek(_MARKER_OR_LIST, (START, END))
        self.say(text)
        self._tagged = marker == START
        if marker == "[":
            return self._list_begins()
        if marker:
            self.mark()
        return bool(marker) and self.turn(self._first if self._tagged else self._content)

    def _give_up(self) -> bool:
        self.say_raw("".join(self._raw).removeprefix(","), _MARKER)
        self._raw.clear()
        return self.turn(self._content)

    def _list(self) -> bool:
        """State before a call, or before the list's end."""
        begin = self.at
        found = self.skip_blank()
        self._raw.append(self.text[begin : self.at])
        if not found:
            return self.last and self._give_up()
        if _NAME.match(self.text[self.at]):
            self._name = ""
            return self.turn(self._named)
        if self.text[self.at] == "]" and self._ended():
            self.at += 1
            self._raw.clear()
            return self.turn(self._after)
        return self._give_up()

    def _after(self) -> bool:
        """State after a list."""
        if not self.say_blank() or self.meets((START, END)) is None:
            return False
        self.drop_half((START, END))
        return self.at < len(self.text) and self.turn(self._content)

    def _ended(self) -> bool:
        """Whether a bracket closes a list with calls, perhaps with a comma after the last one."""
        return "".join(self._raw).strip() in ("", ",")

    def _named(self) -> bool:
        found = _NAME.match(self.text, self.at)
        if found is not None:
            self._name += found[0]
            self.at = found.end()
        waits = self.at == len(self.text) and len(self._name) <= _LONGEST_NAME
        if waits and not self.last:
            return False
        self._raw.append(self._name)
        if not self.text.startswith("(", self.at) or not self._may_be_called():
            return self._give_up()
        self.at += 1
        self._raw.append("(")
        self._arguments = PythonicArguments()
        return self.turn(self._call)

    def _may_be_called(self) -> bool:
        if len(self._name) > _LONGEST_NAME:
            return False
        return self._tagged or self.calls > self._before or self._name in self._known

    def _call(self) -> bool:
        begin = self.at
        ended = self._arguments.read(self)
        self._raw.append(self.text[begin : self.at])
        if not ended:
            return self.last and self._give_up()
        if self._arguments.broken:
            return self._give_up()
        text = arguments_json(self._arguments.items)
        if text is None:
            # The calls beside it are called.
            self._skipped = len(self._raw)
            return self.turn(self._comma)
        self.say_raw("".join(self._raw[: self._skipped]).strip("[, \r\n"), _MARKER)
        self._raw.clear()
        self._skipped = 0
        self.begin(self._name)
        self.argue(text)
        return self.turn(self._comma)

    def _comma(self) -> bool:
        """State after a call."""
        if not self.skip_blank():
            return False
        if self.text[self.at] == ",":
            self._raw.append(",")
            self.at += 1
        elif self.text[self.at] != "]":
            return self._give_up()
        return self.turn(self._list)


class PythonicArguments:
    """Finds the parenthesis that ends a call, and looks at each character once.

    Strings are repaired where models make errors that have only one reading: raw line breaks,
    backslashes that escape nothing, and quotes in a string that nothing of a call follows. Triple
    quotes are not read.
    """

    __slots__ = ("_cuts", "_depth", "_empty", "_quote", "_taken", "broken")

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._empty = False
        """The string has just begun."""
        self._taken: list[str] = []
        self._cuts = [0]
        """Positions in `_taken` where an argument begins, or the last one ends."""
        self.broken = False

    @property
    def items(self) -> list[str]:
        """The text between the parentheses, split at its commas."""
        return ["".join(self._taken[begin:end]) for begin, end in pairwise(self._cuts)]

    def read(self, reader: IncrementalReader) -> bool:
        """Continue; returns whether the end was found or is impossible (`broken`)."""
        while reader.at < len(reader.text):
            ended = self._in_string(reader) if self._quote else self._outside(reader)
            if ended is not None:
                return ended
        return False

    def _take(self, reader: IncrementalReader, size: int, text: str | None = None) -> None:
        at = reader.at
        self._taken.append(reader.text[at : at + size] if text is None else text)
        reader.at += size

    def _broken(self) -> bool:
        self.broken = True
        return True

    def _outside(self, reader: IncrementalReader) -> bool | None:
        """Read outside of strings. None: continue; True or False: stop for now."""
        char = reader.text[reader.at]
        if self._empty:
            self._empty = False
            if self._taken[-1] == char:
                # A third quote begins a triple-quoted string, which is not supported.
                return self._broken()
        found = _OUTSIDE.match(reader.text, reader.at)
        if found is not None:
            self._take(reader, len(found[0]))
            return None
        if char == "<":
            # No literal has a `<` outside of strings: it is a marker or an error.
            return self._broken()
        if char == ",":
            if not self._depth:
                self._cuts.append(len(self._taken))
                self._take(reader, 1, "")
                return None
        elif char in "'\"":
            self._quote = char
            self._empty = True
        elif char in "([{":
            self._depth += 1
        elif self._depth:
            self._depth -= 1
        elif char == ")":
            reader.at += 1
            self._cuts.append(len(self._taken))
            return True
        else:
            return self._broken()
        self._take(reader, 1)
        return None

    def _in_string(self, reader: IncrementalReader) -> bool | None:
        char = reader.text[reader.at]
        if char == self._quote:
            ends = self._empty or self._closes(reader)
            if ends:
                self._quote = ""
                self._take(reader, 1)
            elif ends is False:
                self._take(reader, 1, f"\\{char}")
            return False if ends is None else None
        self._empty = False
        found = _PLAIN[self._quote].match(reader.text, reader.at)
        if found is not None:
            self._take(reader, len(found[0]))
        elif char == "\n":
            self._take(reader, 1, "\\n")
        elif char == "\r":
            self._take(reader, 1, "\\r")
        elif char == "\0":
            self._take(reader, 1, "\\x00")
        else:
            return self._escape(reader)
        return None

    def _closes(self, reader: IncrementalReader) -> bool | None:
        """Whether a quote ends its string: something of the call, or another string, follows it.
        None: more text decides."""
        found = _BEHIND_STRING.match(reader.text, reader.at + 1)
        # The pattern matches an empty string too.
        assert found is not None
        following = reader.text[found.end() : found.end() + 1]
        if not following and not reader.last:
            return None
        brackets = found["brackets"]
        if not brackets:
            return following in _AFTER_STRING or following.isspace()
        return not following or following in ",;:<" or bool(_AFTER_CALL.search(brackets))

    def _escape(self, reader: IncrementalReader) -> bool | None:
        following = reader.text[reader.at + 1 : reader.at + 2]
        if not following:
            if reader.last:
                self._take(reader, 1)
            return False
        if following in "\r\n":
            # The backslash is dropped; the line break after it is read next.
            self._take(reader, 1, "")
        elif following in _ESCAPES:
            self._take(reader, 2)
        else:
            self._take(reader, 1, "\\\\")
        return None


def arguments_json(items: Sequence[str]) -> str | None:
    """The JSON object of a call's arguments. None if an argument is no literal with a name, or if
    too much of it is not JSON and would need Python's parser."""
    last = len(items) - 1
    left = MAX_STRUCTURE
    found: dict[str, Any] = {}
    try:
        for at, item in enumerate(items):
            if at == last and not item.strip():
                # The call has no arguments, or a comma follows the last one.
                break
            matched = _ITEM.fullmatch(item)
            if matched is None or not matched[2].strip() or matched[1] in found:
                return None
            value = _as_json(_unpadded(matched[2]))
            if value is _NO_JSON:
                left -= structure_size(matched[2])
                if left < 0:
                    return None
                value = _value(ast.parse(f"({matched[2]}\n)", mode="eval").body)
            found[matched[1]] = value
        written = json.dumps(found, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return written


def _unpadded(text: str) -> str:
    found = _PADDED.fullmatch(text)
    return text if found is None else found[1] + found[2]


def _as_json(text: str) -> Any:
    """Parse a literal as JSON if it is also JSON with the same meaning, which takes a fortieth of
    the time."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NO_JSON


def _key(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError("not a literal")
    return name


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | str() | int() | None):
            return node.value
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_key(key.value if isinstance(key, ast.Constant) else None) for key in keys]
            return dict(zip(names, map(_value, values), strict=True))
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
    raise ValueError("not a literal")
