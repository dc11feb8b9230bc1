"""Defines what all tool-call formats share: the `ToolFormat` protocol and the base of the parsers.

Each text is read once, as it comes. Text that turns out to hold no call becomes content, without
the markers around it. A call that was started cannot be taken back, so a parser starts it only when
its name and the first character of its arguments are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from pdserve.text.incremental_reader import IncrementalReader, WhitespaceBuffer
from pdserve.text.output_parts import ContentDelta, ToolCallArguments, ToolCallStart, merge_parts

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.incremental_reader import State
    from pdserve.text.output_parts import OutputParser, OutputPart

ToolChoiceMode = Literal["auto", "required"] | str
"""`auto`: the model decides; `required`: at least one call; else: the name of the tool to call."""


class ToolFormat(Protocol):
    """Tool-call format of a model family: its markers, parser and grammar."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers. The detokenizer must show those that are special tokens."""
        ...

    @property
    def starts(self) -> tuple[str, ...]:
        """Markers that begin a call; they end open reasoning. The engine looks for the first."""
        ...

    def detect(self, template: str) -> bool:
        """Return True if a chat template writes calls in this format. It is asked only for
        templates with calls, and only if no earlier format claimed the template."""
        ...

    def check(self, tools: Sequence[Tool]) -> None:
        """Check the tools' schemas. Raises `InvalidRequest` for a schema that makes parsing too
        slow."""
        ...

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """Create the parser of one choice for a request with these tools."""
        ...

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        """Return a Lark grammar for llguidance of all output that is allowed.

        `choice`: "required" or a tool's name: nothing but calls. "auto": free text too, but a call
        once begun is enforced. `parallel`: more than one call. `special`: ids of the tokenizer's
        special tokens; a marker among them is enforced as that token, others as text. Errors:
        `InvalidRequest` for schemas that take too much work, `ValueError`, `RecursionError`.
        """
        ...

    def call_id(self) -> str:
        """Return a new call id in the form that the family's templates accept."""
        ...


class SchemaFree:
    """Part of a format whose calls are parsed without the tools' schemas."""

    __slots__ = ()

    def check(self, tools: Sequence[Tool]) -> None:
        """Accept all tools."""


class ToolCallReader(IncrementalReader):
    """Base of tool-call parsers: a reader that outputs content and calls."""

    __slots__ = ("_layout", "_shown", "calls")

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.calls = 0
        self._layout = WhitespaceBuffer(bare=False)
        self._shown = False

    def say(self, text: str) -> None:
        """Output content."""
        shown = self._layout.add(text)
        if shown:
            self._shown = True
            self.parts.append(ContentDelta(shown))

    def say_raw(self, text: str, markers: re.Pattern[str]) -> None:
        """Output text as content that turned out not to be a call."""
        self.say(markers.sub("", text))

    def say_blank(self) -> bool:
        """Skip whitespace, which may be content; returns whether other text follows."""
        begin = self.at
        found = self.skip_blank()
        self.say(self.text[begin : self.at])
        return found

    def mark(self) -> None:
        """Note that markup was read: whitespace next to it is layout."""
        self._layout.markup(first=not self._shown)

    def begin(self, name: str, id: str = "") -> None:
        """Start a call. `id`: the model's own id, if the family's templates need it."""
        self.mark()
        self.parts.append(ToolCallStart(self.calls, name, id))
        self.calls += 1

    def seek_call(self, pattern: re.Pattern[str], markers: Iterable[str]) -> str:
        """Output content up to one of `markers`, which `pattern` matches; returns the marker, if
        any."""
        text, marker = self.seek(pattern, markers)
        self.say(text)
        if marker:
            self.mark()
        return marker

    def argue(self, text: str) -> None:
        """Output more arguments of the current call."""
        if text:
            self.parts.append(ToolCallArguments(self.calls - 1, text))

    def feed(self, text: str) -> list[OutputPart]:
        parts = super().feed(text)
        return merge_parts(parts) if len(parts) > 1 else parts

    def finish(self) -> list[OutputPart]:
        parts = super().finish()
        space = self._layout.flush()
        return merge_parts([*parts, ContentDelta(space)] if space else parts)
