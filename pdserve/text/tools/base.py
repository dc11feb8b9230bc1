"""What all formats of tool calls have in common.

What a model writes is read once, as it comes. Text in which no call can be made out is never lost:
it becomes content, without the markers around it. A call that has begun cannot be taken back, so
it begins when its name and the first character of its arguments are known, not earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from pdserve.text.markup import Layout, Reader
from pdserve.text.parts import CallArguments, CallBegin, Content, merged

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Mapping, Sequence

    from pdserve.openai.schema import Tool
    from pdserve.text.markup import State
    from pdserve.text.parts import Part, PartParser

Choice = Literal["auto", "required"] | str
"""Which tool must be called: as the model likes, any, or the one of this name."""


class ToolFormat(Protocol):
    """How a family of models writes calls of tools."""

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Must stay visible in the text where they are special tokens."""
        ...

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        """Reads one choice of an answer to a request with these tools."""
        ...

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        """A Lark grammar for llguidance of what the model may write.

        `choice`: "required" or a tool's name: nothing but calls. "auto": free text too, but a call
        once begun is enforced. `parallel`: more than one call. `special`: ids of the tokenizer's
        special tokens; a marker among them is enforced as that token, others as text.
        """
        ...

    def call_id(self) -> str:
        """A fresh id of a call, in the form that the family's templates accept."""
        ...


class CallReader(Reader):
    """A reader whose parts are content and calls."""

    __slots__ = ("_layout", "_shown", "calls")

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.calls = 0
        self._layout = Layout(bare=False)
        self._shown = False

    def say(self, text: str) -> None:
        """Content."""
        shown = self._layout.add(text)
        if shown:
            self._shown = True
            self.parts.append(Content(shown))

    def say_raw(self, text: str, markers: re.Pattern[str]) -> None:
        """As content, what has turned out not to be a call."""
        self.say(markers.sub("", text))

    def say_blank(self) -> bool:
        """Pass over blank space, which may be content; whether anything follows it."""
        begin = self.at
        found = self.skip_blank()
        self.say(self.text[begin : self.at])
        return found

    def mark(self) -> None:
        """Markup was read: blank space beside it is layout."""
        self._layout.markup(first=not self._shown)

    def begin(self, name: str) -> None:
        self.mark()
        self.parts.append(CallBegin(self.calls, name))
        self.calls += 1

    def seek_call(self, pattern: re.Pattern[str], markers: Iterable[str]) -> str:
        """Give out content up to one of `markers`, which `pattern` matches; the marker, if any."""
        text, marker = self.seek(pattern, markers)
        self.say(text)
        if marker:
            self.mark()
        return marker

    def argue(self, text: str) -> None:
        """More arguments of the call that began last."""
        if text:
            self.parts.append(CallArguments(self.calls - 1, text))

    def feed(self, text: str) -> list[Part]:
        parts = super().feed(text)
        return merged(parts) if len(parts) > 1 else parts

    def finish(self) -> list[Part]:
        parts = super().finish()
        space = self._layout.flush()
        return merged([*parts, Content(space)] if space else parts)
