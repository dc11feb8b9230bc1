"""Parses tool calls of Qwen3-Coder: each argument is plain text between tags of its own.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The tool's schema decides the type of a value: `qwen3_values.py`. Strings are output as they come,
other values when they are complete. A line break at either end of a value is layout.

Values are not escaped, so one may contain text that looks like a tag. An end tag counts only if
more markup of the call follows it. A missing end tag is assumed where the next parameter or the end
of the call begins. Without `<tool_call>`, `<function=` makes a call only if it names a tool of the
request.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.base import ToolCallReader
from pdserve.text.tool_parsers.partial_json import CallObject
from pdserve.text.tool_parsers.tagged_calls.qwen3_grammar import qwen3_grammar
from pdserve.text.tool_parsers.tool_call_grammar import call_id
from pdserve.text.tool_parsers.typed_values import ParameterTypes, check_parameters, value_as_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.output_parts import OutputParser
    from pdserve.text.tool_parsers.base import ToolChoiceMode

START: Final = "<tool_call>"
END: Final = "</tool_call>"
FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"
_MARKER: Final = re.compile(f"{START}|{END}|{FUNCTION}")
_NAME: Final = re.compile(r"[^<>\r\n]*")
_MAYBE_END: Final = re.compile(r"[\r\n<]")
_BLANK: Final = re.compile(r"\s{0,65}")
_LONGEST_BLANK: Final = 64
"""Most whitespace characters between an end tag and the markup that confirms it."""
_LONGEST_NAME: Final = 256


class Qwen3Coder:
    markers: Final = (START, END)
    starts: Final = (START,)

    def detect(self, template: str) -> bool:
        return all(each in template for each in (START, FUNCTION, PARAMETER))

    def check(self, tools: Sequence[Tool]) -> None:
        check_parameters(tools)

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """Create the parser of one choice. It raises nothing while it reads if `check` accepts the
        tools."""
        return _Parser(tools)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        return qwen3_grammar(tools, choice, parallel, special)

    def call_id(self) -> str:
        return call_id()


class _Parser(ToolCallReader):
    __slots__ = (
        "_call",
        "_held",
        "_junk",
        "_known",
        "_name",
        "_object",
        "_parameters",
        "_schemas",
        "_tagged",
        "_types",
    )

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(self._content)
        self._known = {tool.function.name: tool for tool in tools}
        self._schemas: dict[str, ParameterTypes] = {}
        """Schemas of the functions called so far, since a model may call one repeatedly."""
        self._tagged = False
        """`<tool_call>` stands before the function."""
        self._name = ""
        """Name of a function or a parameter, as far as it has come."""
        self._call: ParameterTypes | None = None
        """Parameters of the function that is called."""
        self._parameters = 0
        self._types: tuple[str, ...] = ()
        """Types of the value that is read."""
        self._held: list[str] = []
        """The value, unless it is a string."""
        self._junk: list[str] = []
        """Text between parameters, which is content after the call."""
        self._object = CallObject()

    def _content(self) -> bool:
        marker = self.seek_call(_MARKER, (START, END, FUNCTION))
        if marker == START:
            return self.turn(self._block)
        if marker == FUNCTION:
            self._tagged = False
            self._name = ""
            return self.turn(self._function)
        return bool(marker)

    def _block(self) -> bool:
        if not self.say_blank():
            return False
        marker = self.meets((FUNCTION,))
        if marker is None:
            return False
        self.drop_half((FUNCTION, END, START))
        if self.at == len(self.text):
            return False
        if marker:
            self.at += len(marker)
            self._tagged = True
            self._name = ""
            return self.turn(self._function)
        if self.text[self.at] == "{":
            # The family's other models write a call as a JSON object.
            self._object = CallObject((START, END))
            return self.turn(self._json)
        return self.turn(self._content)

    def _json(self) -> bool:
        if not self._object.read(self):
            return False
        if self._object.failed:
            self.say_raw(self._object.raw, _MARKER)
            return self.turn(self._content)
        return self.turn(self._block_ends)

    def _block_ends(self) -> bool:
        """State after a call, up to the end of its block, which may be missing."""
        if not self.say_blank():
            return False
        self.drop_half((END, START, FUNCTION))
        if self.meets((END,)) is None or self.at == len(self.text):
            return False
        return self.turn(self._content)

    def _read_name(self) -> bool | None:
        """Continue a name; returns whether it is complete (then `at` is past its end); None: not
        yet."""
        found = _NAME.match(self.text, self.at)
        # The pattern matches an empty string too.
        assert found is not None
        self._name += found[0]
        self.at = found.end()
        if len(self._name) > _LONGEST_NAME:
            return False
        if self.at == len(self.text):
            return False if self.last else None
        if self.text[self.at] != ">" or not self._name.strip():
            return False
        self.at += 1
        return True

    def _function(self) -> bool:
        whole = self._read_name()
        if whole is None:
            return False
        name = self._name.strip()
        if not whole or not (self._tagged or name in self._known):
            before = "" if self._tagged else FUNCTION
            self.say(before + self._name + (">" if whole else ""))
            return self.turn(self._content)
        self.begin(name)
        if name not in self._schemas:
            self._schemas[name] = ParameterTypes(self._known.get(name))
        self._call = self._schemas[name]
        self._parameters = 0
        return self.turn(self._between)

    def _between(self) -> bool:
        """State before a parameter, or before the end of the call."""
        if not self.skip_blank():
            return self.last and self._close(cut_short=True)
        markers = (PARAMETER, FUNCTION_END, END, START, FUNCTION)
        marker = self.meets(markers)
        if marker is None:
            return False
        self.drop_half(markers)
        if self.at == len(self.text):
            return self._close(cut_short=True)
        if marker == PARAMETER:
            self.at += len(marker)
            self._name = ""
            return self.turn(self._parameter)
        if marker:
            self.at += len(marker) if marker == FUNCTION_END else 0
            return self._close()
        self._junk.append(self.text[self.at])
        self.at += 1
        return self.turn(self._words)

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
        if self._parameters:
            self.argue("}")
        elif not cut_short:
            self.argue("{}")
        if self._junk:
            self.say("".join(self._junk))
            self._junk.clear()
        return self.turn(self._block_ends)

    def _parameter(self) -> bool:
        whole = self._read_name()
        if whole is None:
            return False
        if not whole:
            # At the end of the text the name belongs to a call that was cut short.
            if self.at < len(self.text):
                self._junk.append(self._name)
            return self.turn(self._between)
        assert self._call is not None
        name = self._name.strip()
        self._types = self._call.types(name)
        before = ", " if self._parameters else "{"
        self.argue(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        self._parameters += 1
        self._held.clear()
        return self.turn(self._value_begins)

    def _value_begins(self) -> bool:
        if self.text.startswith("\r\n", self.at):
            self.at += 2
        elif self.text.startswith("\n", self.at):
            self.at += 1
        elif self.at == len(self.text) or (self.text[self.at :] == "\r" and not self.last):
            return False
        if self._is_string():
            self.argue('"')
        return self.turn(self._value)

    def _is_string(self) -> bool:
        return self._types == ("string",)

    def _add(self, text: str) -> None:
        if self._is_string():
            self.argue(json.dumps(text, ensure_ascii=False)[1:-1])
        elif text:
            self._held.append(text)

    def _value(self) -> bool:
        while True:
            begin = self.at
            found = _MAYBE_END.search(self.text, begin)
            self.at = len(self.text) if found is None else found.start()
            self._add(self.text[begin : self.at])
            if found is None:
                return self.last and self._cut_short()
            size = self._ending()
            if size is None:
                return False
            if size >= 0:
                self.at += size
                return self._value_ends()
            self._add(found[0])
            self.at += 1

    def _cut_short(self) -> bool:
        """The text has ended within a value: output what there is, without additions."""
        self.argue("".join(self._held))
        self._held.clear()
        return self.turn(self._over)

    def _over(self) -> bool:
        return False

    def _value_ends(self) -> bool:
        if self._is_string():
            self.argue('"')
        else:
            self.argue(value_as_json("".join(self._held), self._types))
        return self.turn(self._between)

    def _ending(self) -> int | None:
        """Number of characters of layout and markup that end the value here; -1: it goes on; None:
        more text decides."""
        at = self.at
        at += self.text.startswith("\r", at)
        line = self.text.startswith("\n", at)
        at += line
        if self.text.startswith(("\r", "\n"), at):
            return -1
        marker = self.meets((PARAMETER_END, FUNCTION_END, *((PARAMETER,) if line else ())), at)
        if not marker:
            return None if marker is None else -1
        if marker == PARAMETER:
            return at - self.at
        after = at + len(marker)
        blank = _BLANK.match(self.text, after)
        # The pattern matches an empty string too.
        assert blank is not None
        follows = self._followers(marker)
        if len(blank[0]) > _LONGEST_BLANK:
            return -1
        if blank.end() == len(self.text):
            proven: str | None = " " if self.last else None
        elif self.ends_in_half(follows, blank.end()):
            proven = " "
        else:
            proven = self.meets(follows, blank.end())
        if not proven:
            return None if proven is None else -1
        return (after if marker == PARAMETER_END else at) - self.at

    def _followers(self, marker: str) -> tuple[str, ...]:
        """Markup that must follow an end tag for it to count."""
        if marker == FUNCTION_END:
            return (END,)
        return (PARAMETER, FUNCTION_END, END, START, FUNCTION)
