"""Parses Harmony, the format of GPT-OSS: messages on channels, each with a header.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.F <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>ANSWER<|return|>

The recipient may also stand before the channel. `analysis` is reasoning; `commentary` without a
recipient and `final` are content; a message to any recipient is a call, whose name has no prefix
`functions.`; one to `assistant` is dropped. Arguments that are no JSON object, such as code, are
the text of the tool's only parameter, or a string. Messages of one kind are joined by a line break.
A prompt ends after `<|start|>assistant`, so an answer begins within a header.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.base import SchemaFree
from pdserve.text.tool_parsers.channels.channel_reader import ChannelReader
from pdserve.text.tool_parsers.partial_json import JsonValue
from pdserve.text.tool_parsers.tool_call_grammar import (
    ToolCallGrammar,
    call_id,
    lark_string,
    text_without,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolChoiceMode

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
MARKERS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_ENDS: Final = (START, CHANNEL, END, CALL, RETURN)
"""Markers that end a message's body."""
_ANY: Final = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")
_LONGEST_HEADER: Final = 128
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_WORDS: Final = ("assistant", "commentary", "analysis", "final")
"""Words that may stand between two messages without a marker."""
_HEADER: Final = re.compile(
    r" ?(?:assistant)? ?(?:to=\S*+ ?)?(?:\w* ?(?:to=\S*+)? ?(?:json)?)? ?", re.ASCII
)
"""What stands in a header, markers left out and each run of blanks one space."""
_BLANKS: Final = re.compile(r"\s+", re.ASCII)


class Harmony(SchemaFree):
    markers: Final = MARKERS
    starts: Final = (CHANNEL,)

    def detect(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def parser(self, tools: Sequence[Tool]) -> HarmonyReader:
        return HarmonyReader(tools)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        """The grammar. A call ends the answer, so there is one, parallel or not."""
        grammar = ToolCallGrammar(tools, choice, parallel, special)
        commentary = f'{grammar.marker(CHANNEL)} "commentary"'
        calls = grammar.any_call(
            f"{lark_string(f' to=functions.{tool.function.name} ')} {grammar.marker(CONSTRAIN)} "
            f'"json" {grammar.marker(MESSAGE)} {grammar.arguments(tool)}'
            for tool in grammar.tools
        )
        again = f'({grammar.marker(START)} "assistant")?'
        if not grammar.free:
            return grammar.text(f"{again} {commentary} {calls}")
        texts = [each for each in MARKERS if not grammar.is_special(each)]
        grammar.terminal(f"FREE: {text_without(texts)}")
        message = grammar.marker(MESSAGE)
        said = grammar.rule("said", f'{grammar.marker(CHANNEL)} "final" {message} FREE')
        ended = f'{grammar.marker(END)} {grammar.marker(START)} "assistant"'
        before = grammar.rule("before", f"{commentary} {message} FREE {ended}")
        return grammar.text(f"FREE ({again} ({said} | {before}? {commentary} {calls}))?")

    def call_id(self) -> str:
        return call_id()


def before_answer(special: Mapping[str, int]) -> str:
    """A Lark term for the header of an answer that follows a grammar."""

    def marker(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else lark_string(text)

    return (
        f'({marker(START)} "assistant")? {marker(CHANNEL)} "final" '
        f'(" " {marker(CONSTRAIN)} "json")? {marker(MESSAGE)}'
    )


class HarmonyReader(ChannelReader):
    """Reads all channels: reasoning, content and calls."""

    __slots__ = (
        "_arguments",
        "_header",
        "_name",
        "_said",
        "_text_end",
        "_thoughts",
    )

    def __init__(self, tools: Sequence[Tool] = (), *, calls: bool = True) -> None:
        super().__init__(self._first, tools, calls=calls)
        self._header = ""
        self._name = ""
        self._text_end = ""
        """What completes arguments that are text."""
        self._arguments = JsonValue()
        self._said = False
        """A message with content has ended: a line break parts it from the next."""
        self._thoughts = 0

    @property
    def in_reasoning(self) -> bool:
        return self.state == self._think

    def begin_reasoning(self) -> None:
        """The prompt has opened a message of reasoning. Call it before any text."""
        self.state = self._think

    # ------------------------------------------------------------------ headers

    def _first(self) -> bool:
        """State at the beginning: within a header, unless plain text comes."""
        if not self.say_blank():
            return False
        marker = self.meets((*MARKERS, "to="))
        if marker is None:
            return False
        if marker in (START, CHANNEL, CONSTRAIN, MESSAGE, "to="):
            return self.turn(self._head)
        return self.turn(self._content)

    def _head(self) -> bool:
        """State in a header, up to the message."""
        text, marker = self.seek(_ANY, MARKERS)
        self._header += text
        over = len(self._header) - _LONGEST_HEADER
        if over > 0:
            over = min(over, len(text))
            # The rest is read again as content, so that it does not matter where the text is cut.
            self.at -= over + len(marker)
            self._header = self._header[: len(self._header) - over]
            return self._no_header("")
        if not marker:
            if self.last:
                self._no_header("")
            return False
        if marker == MESSAGE:
            return self._open()
        if marker in (START, END, CALL, RETURN):
            return self._no_header(marker)
        self._header += marker
        return True

    def _no_header(self, marker: str) -> bool:
        """The text was no header, or one without a message: words that no header has are shown."""
        bare = _ANY.sub("", self._header)
        if not _HEADER.fullmatch(_BLANKS.sub(" ", bare)):
            self._part()
            self.say(bare)
        self._header = ""
        return self.turn(self._head if marker in (START, CHANNEL) else self._content)

    def _open(self) -> bool:
        header, self._header = self._header, ""
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        self.mark()
        if recipient is not None and recipient[1] == "assistant":
            return self.turn(self._result)
        if recipient is not None and self._calls:
            self._name = recipient[1].removeprefix("functions.")
            if self._name:
                return self.turn(self._call)
        if channel is not None and channel[1] == "analysis":
            self._part_thoughts()
            return self.turn(self._think)
        self._part()
        return self.turn(self._content)

    # ------------------------------------------------------------------ bodies

    def _part(self) -> None:
        """Part the content that follows from the content before."""
        if self._said:
            self.say("\n")
        self._said = True

    def _part_thoughts(self) -> None:
        if self._thoughts:
            self.reason("\n")
        self._thoughts += 1

    def _end_of_body(self, marker: str) -> bool:
        if marker == CHANNEL:
            self._header = marker
        return self.turn(self._head if marker in (START, CHANNEL) else self._between)

    def _between(self) -> bool:
        """State after a message: another header follows, or text that has none."""
        if not self.skip_blank():
            return False
        marker = self.meets((*MARKERS, *_WORDS))
        if marker is None:
            return False
        if marker in _WORDS:
            self._header = marker
            self.at += len(marker)
            return self.turn(self._word)
        if not marker:
            self._part()
            return self.turn(self._content)
        self.mark()
        self.at += len(marker)
        self._header = marker if marker == CHANNEL else ""
        return self.turn(self._head) if marker in (START, CHANNEL) else True

    def _word(self) -> bool:
        """State behind a word of a header that no marker began: a header follows it, or it was
        text."""
        marker = self.meets((*MARKERS, " to="))
        if marker is None:
            return False
        if marker:
            self.mark()
            return self.turn(self._head if marker not in _ENDS else self._between)
        self._part()
        self.say(self._header)
        self._header = ""
        return self.turn(self._content)

    def _content(self) -> bool:
        text, marker = self.seek(_ANY, MARKERS)
        self._said = self._said or bool(text)
        self.say(text)
        if not marker:
            return False
        self.mark()
        return self._end_of_body(marker) if marker in _ENDS else True

    def _think(self) -> bool:
        text, marker = self.seek(_ANY, MARKERS)
        self._thoughts = self._thoughts or 1
        self.reason(text)
        if not marker:
            return False
        return self._end_of_body(marker) if marker in _ENDS else True

    def _result(self) -> bool:
        """State in a message to the model itself: a tool's result that it made up, which is
        dropped."""
        _, marker = self.seek(_ANY, MARKERS)
        return bool(marker) and (self._end_of_body(marker) if marker in _ENDS else True)

    def _call(self) -> bool:
        """State between a call's header and its arguments."""
        if not self.skip_blank():
            if self.last:
                self.begin(self._name)
            return False
        if self.text[self.at] == "{":
            self._arguments = JsonValue(MARKERS)
            self.begin(self._name)
            return self.turn(self._object)
        marker = self.meets(MARKERS)
        if marker is None:
            return False
        self.begin(self._name)
        if marker:
            self.argue("{}")
            return self.turn(self._rest)
        name = self._only_parameter()
        self.argue('"' if name is None else f'{{{json.dumps(name, ensure_ascii=False)}: "')
        self._text_end = '"' if name is None else '"}'
        return self.turn(self._words)

    def _only_parameter(self) -> str | None:
        """The parameter of a tool that has no other; None if there is none such."""
        tool = self._known.get(self._name)
        schema = None if tool is None else tool.function.parameters
        properties = (schema or {}).get("properties")
        if not isinstance(properties, dict) or len(properties) != 1:
            return None
        return str(next(iter(properties)))

    def _object(self) -> bool:
        self.argue(self._arguments.take(self))
        ended = self._arguments.done or self._arguments.broken
        return ended and self.turn(self._rest)

    def _words(self) -> bool:
        """State in arguments that are no JSON object, such as code."""
        text, marker = self.seek(_ANY, MARKERS)
        self.argue(json.dumps(text, ensure_ascii=False)[1:-1])
        if not marker:
            return False
        self.argue(self._text_end)
        return self._end_of_body(marker)

    def _rest(self) -> bool:
        """State after the arguments, up to the end of the message; a surplus bracket is ignored."""
        if not self.skip_blank():
            return False
        if self.text[self.at] == "}":
            self.at += 1
            return True
        if self.meets((*MARKERS, *_WORDS)) is None:
            return False
        return self.turn(self._between)
