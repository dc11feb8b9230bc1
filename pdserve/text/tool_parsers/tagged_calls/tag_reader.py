"""Parses calls whose arguments stand between tags, in the syntax of any family.

The tool's schema decides the type of a value: `typed_values.py`. Strings are output as they come,
other values when they are complete.

Values are not escaped, so one may contain text that looks like a tag. An end tag counts only if
more markup of the call follows it. A missing end tag is assumed where the next parameter or the end
of the call begins. Without the marker before it, the tag of a call makes a call only if it names a
tool of the request.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.base import ToolCallReader
from pdserve.text.tool_parsers.partial_json import CallObject, JsonValue, json_or_none
from pdserve.text.tool_parsers.tagged_calls.tag_grammar import tagged_grammar
from pdserve.text.tool_parsers.tagged_calls.tag_syntax import LONGEST_HEAD
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
    from pdserve.text.output_parts import OutputParser
    from pdserve.text.tool_parsers.base import ToolChoiceMode
    from pdserve.text.tool_parsers.tagged_calls.tag_syntax import Tag, TagSyntax

__all__ = ["TaggedFormat"]

_MAYBE_END: Final = re.compile(r"[\r\n<]")
_MAYBE_UNQUOTED: Final = re.compile(r"\]")
_BLANK: Final = re.compile(r"\s{0,65}")
_SPELLED_BLANK: Final = re.compile(r"(?:\s|\\n){0,65}")
"""Blanks, among which are line breaks that a model spelled as in a string."""
_WORD: Final = re.compile(r"[\w.-]*")
_LONGEST_BLANK: Final = 64
"""Most whitespace characters between an end tag and the markup that confirms it."""
_STRING: Final = ("string",)
_NO_MATCH: Final = re.compile("").match("")


class TaggedFormat:
    """A format that is described by its syntax. Its class only says how it is recognised."""

    syntaxes: tuple[TagSyntax, ...]
    """The syntax that the family writes; after it, others that it is known to slip into."""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each for syntax in self.syntaxes for each in syntax.markers))

    @property
    def starts(self) -> tuple[str, ...]:
        return tuple(
            each for syntax in self.syntaxes for each in (*syntax.wraps[:1], *syntax.starts)
        )

    def check(self, tools: Sequence[Tool]) -> None:
        check_parameters(tools)

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """Create the parser of one choice. It raises nothing while it reads if `check` accepts the
        tools."""
        return TagReader(self.syntaxes, tools)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        written = (each for each in self.syntaxes if each.starts[0] in (special or {}))
        syntax = next(written, self.syntaxes[0])
        return tagged_grammar(syntax, tools, choice, parallel, special)

    def call_id(self) -> str:
        return call_id()


class TagReader(ToolCallReader):
    __slots__ = (
        "_all",
        "_alone",
        "_call",
        "_held",
        "_junk",
        "_known",
        "_leads",
        "_name",
        "_object",
        "_parameters",
        "_quoted",
        "_schemas",
        "_syntax",
        "_tagged",
        "_types",
        "_whole",
        "_wrapped",
        "_wrapper",
    )

    def __init__(self, syntaxes: Sequence[TagSyntax], tools: Sequence[Tool]) -> None:
        super().__init__(self._content)
        self._all = {
            each: syntax
            for syntax in reversed(syntaxes)
            for each in (*syntax.markers, *syntax.openers)
            if each not in syntax.leads
        }
        """The syntax that each marker belongs to."""
        self._leads = tuple(dict.fromkeys(lead for each in syntaxes for lead in each.leads))
        self._syntax = syntaxes[0]
        self._known = {tool.function.name: tool for tool in tools}
        self._schemas: dict[str, ParameterTypes] = {}
        """Schemas of the functions called so far, since a model may call one repeatedly."""
        self._tagged = False
        """The start of a block stands before the call."""
        self._name = ""
        """The function that may be called."""
        self._alone = False
        """Its tag also ends the call."""
        self._call: ParameterTypes | None = None
        """Parameters of the function that is called."""
        self._parameters = 0
        self._types: tuple[str, ...] = ()
        """Types of the value that is read; none: any JSON."""
        self._quoted = False
        """The value is between quotes."""
        self._wrapper = ""
        """The parameter that is read, if it may hold all arguments."""
        self._wrapped = ""
        """Its value, which is output when the next parameter or the end of the call is read."""
        self._held: list[str] = []
        """The value, unless it is a string; or layout after a name."""
        self._junk: list[str] = []
        """Text between parameters, which is content after the call."""
        self._object = CallObject()
        self._whole = JsonValue()
        """All arguments as one JSON object, which some models write instead of parameters."""

    # ------------------------------------------------------------ around calls

    def _content(self) -> bool:
        marker = self.seek_call(self._pattern(), (*self._all, *self._leads))
        if marker and marker in self._leads:
            self.at -= len(marker)
            return self.turn(self._lead)
        return self._met(marker)

    def _lead(self) -> bool:
        """State before a tag of which only the beginning is known."""
        marker = self.meets(self._all)
        if marker is None:
            return False
        lead = self.meets(self._leads) or ""
        self.at += len(marker or lead)
        return self._met(marker) or self.turn(self._content)

    def _met(self, marker: str) -> bool:
        syntax = self._syntax = self._all.get(marker, self._syntax)
        if marker in syntax.starts:
            return self.turn(self._block)
        if marker and marker in syntax.openers:
            self._tagged = False
            return self.turn(self._call_tag)
        return bool(marker) and self.turn(self._content)

    def _pattern(self) -> re.Pattern[str]:
        """All markers, and tags of calls; of two with the same beginning, the shorter."""
        return _any_of((*self._leads, *self._all))

    def _block(self) -> bool:
        """State after the start of a block."""
        if not self.say_blank():
            return False
        syntax = self._syntax
        prelude = (syntax.prelude,) if syntax.prelude else ()
        markers = (*syntax.openers, *syntax.ends, *syntax.starts, *prelude)
        marker = self.meets(markers)
        if marker is None:
            return False
        self.drop_half(markers)
        if self.at == len(self.text):
            return False
        if marker and marker in (*syntax.openers, *prelude):
            self.at += len(marker)
            self._tagged = True
            return self.turn(self._prelude if marker in prelude else self._call_tag)
        if self.text[self.at] == "{" and syntax.json:
            # Other models of some families write a call as a JSON object.
            self._object = CallObject((*syntax.starts, *syntax.ends))
            return self.turn(self._json)
        if syntax.openers or marker:
            return self.turn(self._content)
        self._tagged = True
        return self.turn(self._call_tag)

    def _prelude(self) -> bool:
        """State before the tag of a call; a name that stands there, too, is dropped."""
        found = _WORD.match(self.text, self.at)
        # The pattern matches an empty string too.
        assert found is not None
        self.at = found.end()
        return self.at < len(self.text) and self.turn(self._block)

    def _json(self) -> bool:
        if not self._object.read(self):
            return False
        if self._object.failed:
            self.say_raw(self._object.raw, self._pattern())
            return self.turn(self._content)
        return self.turn(self._block_ends)

    def _block_ends(self) -> bool:
        """State after a call, up to the end of its block, which may be missing."""
        if not self.say_blank():
            return False
        syntax = self._syntax
        marker = self.meets(self._all)
        self.drop_half(self._all)
        if marker is None or self.at == len(self.text):
            return False
        if marker and marker in syntax.openers:
            self.at += len(marker)
            self._tagged = True
            return self.turn(self._call_tag)
        return self.turn(self._content)

    # ------------------------------------------------------------ tags

    def _head(self, tag: Tag, stop: re.Pattern[str]) -> re.Match[str] | None:
        """The inside of a tag whose beginning was read, and move past the tag. `_NO_MATCH` if it is
        no tag; None if more text decides."""
        found = stop.search(self.text, self.at, self.at + LONGEST_HEAD + len(tag.end))
        if found is None:
            waits = not self.last and len(self.text) - self.at <= LONGEST_HEAD + len(tag.end)
            return None if waits else _NO_MATCH
        if found["end"] is None:
            return _NO_MATCH
        end = found.start()
        # A tag that also ends its element: of a call without arguments.
        self._alone = tag is self._syntax.call and self.text[self.at : found.end()].endswith("/>")
        head = tag.head.fullmatch(self.text, self.at, end - self._alone)
        if head is None or not _name_in(head):
            return _NO_MATCH
        self.at = found.end()
        return head

    def _call_tag(self) -> bool:
        syntax = self._syntax
        head = self._head(syntax.call, syntax.call_stop)
        if head is None:
            return False
        self._name = _name_in(head)
        if not self._name:
            return self._no_call("" if self._tagged else syntax.call.begin)
        if not self._tagged and self._name not in self._known:
            whole = f"{self.text[head.start() : head.end()]}{'/' * self._alone}"
            return self._no_call(f"{syntax.call.begin}{whole}{syntax.call.end}")
        if syntax.call.begin or (syntax.call.end and self._name in self._known):
            return self._begins()
        self._held.clear()
        return self.turn(self._named)

    def _no_call(self, text: str) -> bool:
        """Show text that is no call after all."""
        if self._leads:
            text = _any_of(self._leads).sub("", text)
        self.say(text)
        return self.turn(self._content)

    def _named(self) -> bool:
        """State after a name without a tag: only the markup behind it makes it a call."""
        begin = self.at
        found = self.skip_blank()
        self._held.append(self.text[begin : self.at])
        if not found and not self.last:
            return False
        syntax = self._syntax
        sure = tuple(each for each in (syntax.separator, syntax.parameter.begin) if each)
        markers = (*sure, *syntax.ends, *syntax.starts, *syntax.wraps)
        marker = self.meets(markers)
        if marker is None:
            return False
        self.drop_half(markers)
        ended = self.at == len(self.text) or marker in markers
        sure = (*sure, *syntax.ends)
        if marker not in sure and not (ended and self._name in self._known):
            return self._no_call(self._name + "".join(self._held))
        if marker and marker == syntax.separator:
            self.at += len(marker)
        return self._begins()

    def _begins(self) -> bool:
        self.begin(self._name)
        if self._name not in self._schemas:
            self._schemas[self._name] = ParameterTypes(self._known.get(self._name))
        self._call = self._schemas[self._name]
        self._parameters = 0
        if self._alone:
            return self._close()
        return self.turn(self._between)

    def _between(self) -> bool:
        """State before a parameter, or before the end of the call."""
        if not self.skip_blank():
            return self.last and self._close(cut_short=True)
        syntax = self._syntax
        marker = self.meets(syntax.borders)
        if marker is None:
            return False
        self.drop_half(syntax.borders)
        if self.at == len(self.text):
            return self._close(cut_short=True)
        if marker == syntax.parameter.begin:
            self.at += len(marker)
            return self.turn(self._parameter)
        if marker:
            self.at += len(marker) if marker == syntax.call_end else 0
            return self._close()
        if self.text[self.at] == "{" and syntax.openers and not self._parameters:
            self._whole = JsonValue((*syntax.call_ends, *syntax.ends, *syntax.starts))
            return self.turn(self._all_arguments)
        self._junk.append(self.text[self.at])
        self.at += 1
        return self.turn(self._words)

    def _all_arguments(self) -> bool:
        self.argue(self._whole.take(self))
        if not self._whole.done and not self._whole.broken:
            return self.last and self.turn(self._over)
        return self.turn(self._call_ends)

    def _call_ends(self) -> bool:
        """State behind arguments that are one object, before the end of their call."""
        if not self.skip_blank():
            return False
        markers = (self._syntax.call_end, *self._syntax.ends)
        marker = self.meets(markers)
        self.drop_half(markers)
        if marker is None or self.at == len(self.text):
            return False
        self.at += len(marker) if marker == self._syntax.call_end else 0
        return self.turn(self._block_ends)

    def _words(self) -> bool:
        """State in text where a parameter should be, up to what may be one."""
        end = self.text.find("<", self.at)
        stop = len(self.text) if end < 0 else end
        self._junk.append(self.text[self.at : stop])
        self.at = stop
        return (end >= 0 or self.last) and self.turn(self._between)

    def _close(self, *, cut_short: bool = False) -> bool:
        """End a call. `cut_short`: the text has ended, so whether there are arguments is not known
        if none have come."""
        if self._wrapped and self._unwrapped():
            return self._closed()
        self._unwrap()
        if self._parameters:
            self.argue("}")
        elif not cut_short:
            self.argue("{}")
        return self._closed()

    def _closed(self) -> bool:
        junk = "".join(self._junk)
        self._junk.clear()
        if junk.replace("\\n", "").strip():
            self.say_raw(junk, self._pattern())
        return self.turn(self._block_ends)

    def _parameter(self) -> bool:
        head = self._head(self._syntax.parameter, self._syntax.parameter_stop)
        if head is None:
            return False
        name = _name_in(head)
        if not name:
            if self.last and self._syntax.parameter_stop.search(self.text, self.at) is None:
                # The text ends in the tag.
                self.at = len(self.text)
            return self.turn(self._words)
        # A parameter is read only after its call has begun.
        assert self._call is not None
        self._types = _types_of(head, self._call.types(name))
        self._held.clear()
        self._unwrap()
        known = self._call.names
        if name in self._syntax.wrappers and not self._parameters and known and name not in known:
            self._wrapper = name
        else:
            self._key(name)
        return self.turn(self._value_begins)

    def _key(self, name: str) -> None:
        before = ", " if self._parameters else "{"
        self.argue(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        self._parameters += 1

    def _unwrap(self) -> None:
        """Output a parameter that turned out not to hold all arguments."""
        if self._wrapper:
            self._key(self._wrapper)
            self.argue(self._wrapped)
        self._wrapper = self._wrapped = ""

    def _unwrapped(self) -> bool:
        """Output what the only parameter holds, if these are all arguments."""
        # A parameter is read only after its call has begun.
        assert self._call is not None
        text = self._wrapped
        if text.startswith('"'):
            text = value_as_json(json_or_none(text) or "", ("object",))
        value = json_or_none(text)
        if not isinstance(value, dict) or not all(each in self._call.names for each in value):
            return False
        self.argue(text)
        self._wrapper = self._wrapped = ""
        return True

    # ------------------------------------------------------------ values

    def _value_begins(self) -> bool:
        if self.at == len(self.text):
            return False
        if self._syntax.lines:
            if self.text[self.at :] == "\r" and not self.last:
                return False
            if self.text.startswith("\r\n", self.at):
                self.at += 2
            elif self.text.startswith("\n", self.at):
                self.at += 1
        quotes = self._syntax.quotes[:1]
        marker = self.meets(quotes)
        if marker is None:
            return False
        self.at += len(marker)
        self._quoted = bool(marker)
        if self._streams():
            self.argue('"')
        return self.turn(self._value)

    def _streams(self) -> bool:
        """Whether the value is output as it comes."""
        return self._types == _STRING and not self._wrapper

    def _add(self, text: str) -> None:
        if self._streams():
            self.argue(json.dumps(text, ensure_ascii=False)[1:-1])
        elif text:
            self._held.append(text)

    def _value(self) -> bool:
        while True:
            begin = self.at
            found = (_MAYBE_UNQUOTED if self._quoted else _MAYBE_END).search(self.text, begin)
            self.at = len(self.text) if found is None else found.start()
            self._add(self.text[begin : self.at])
            if found is None:
                return self.last and self._cut_short()
            size = self._unquoting() if self._quoted else self._ending()
            if size is None:
                return False
            if size and self._quoted:
                self._quoted = False
                self.at += size
                continue
            if size >= 0 and not self._quoted:
                self.at += size
                return self._value_ends()
            self._add(found[0])
            self.at += 1

    def _cut_short(self) -> bool:
        """The text has ended within a value: output what there is, without additions."""
        self._unwrap()
        self.argue("".join(self._held))
        self._held.clear()
        return self.turn(self._over)

    def _over(self) -> bool:
        return False

    def _value_ends(self) -> bool:
        text = "".join(self._held)
        if self._streams():
            self.argue('"')
        else:
            value = value_as_json(text, self._types) if self._types else json_or_text(text)
            if self._wrapper:
                self._wrapped = value
            else:
                self.argue(value)
        return self.turn(self._between)

    def _unquoting(self) -> int | None:
        """Number of characters of the quote that ends here; 0: there is none; None: more text
        decides."""
        marker = self.meets(self._syntax.quotes[1:])
        return None if marker is None else len(marker)

    def _ending(self) -> int | None:
        """Number of characters of layout and markup that end the value here; -1: it goes on; None:
        more text decides."""
        syntax = self._syntax
        at = self.at
        line = False
        if syntax.lines:
            at += self.text.startswith("\r", at)
            line = self.text.startswith("\n", at)
            at += line
        if self.text.startswith(("\r", "\n"), at):
            return -1
        unended = syntax.unended == "anywhere" or (line and syntax.unended == "line")
        marker = self.meets((*syntax.value_ends, *((syntax.parameter.begin,) * unended)), at)
        if not marker:
            return None if marker is None else -1
        if marker == syntax.parameter.begin:
            return at - self.at
        if marker == syntax.parameter_end and syntax.sure and self._types == _STRING:
            return at + len(marker) - self.at
        after = at + len(marker)
        blank = (_SPELLED_BLANK if syntax.sure else _BLANK).match(self.text, after)
        # The pattern matches an empty string too.
        assert blank is not None
        follows = syntax.borders if marker == syntax.parameter_end else syntax.confirming
        if len(blank[0]) > _LONGEST_BLANK:
            return -1
        if syntax.sure and not self.last and self.text[blank.end() :] == "\\":
            return None
        if blank.end() == len(self.text):
            proven: str | None = " " if self.last else None
        elif self.ends_in_half(follows, blank.end()):
            proven = " "
        else:
            proven = self.meets(follows, blank.end())
        if not proven:
            return None if proven is None else -1
        return (after if marker == syntax.parameter_end else at) - self.at


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _name_in(head: re.Match[str] | None) -> str:
    """The name that a tag contains; empty if there is none."""
    if head is None or head is _NO_MATCH:
        return ""
    groups = head.groupdict()
    found = groups.get("name") or groups.get("single") or groups.get("bare") or ""
    return str(found).strip()


def _types_of(head: re.Match[str], declared: tuple[str, ...]) -> tuple[str, ...]:
    """Types of a value: by its tag, if that tells them, else by the schema. None: any JSON."""
    if "string" not in head.re.groupindex:
        return declared
    if head["string"] != "true":
        return ()
    return _STRING if "string" in declared else declared
