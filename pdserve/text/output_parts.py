"""Defines the parts of a model's parsed output: content, reasoning and tool calls.

Parsers in `tool_parsers/` and `reasoning_parser.py` return these records; the frontend writes them
to clients. They carry text only; the frontend makes the ids of tool calls that have none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of content; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of reasoning; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a tool call, with its complete name."""

    index: int
    """Index of the call in this answer, from 0."""
    name: str
    id: str = ""
    """The id that the model wrote, if its templates need the same one again; no other call of this
    answer has it."""


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments; the pieces of one index add up to a JSON object."""

    index: int
    text: str


OutputPart = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Parses the text of one choice as it arrives. However the text is cut, the parts add up to
    the same answer, and no part contains a marker."""

    @property
    def in_reasoning(self) -> bool:
        """True while the next text is reasoning, as far as known."""
        ...

    @property
    def settled(self) -> bool:
        """True if no text is held back and all further text is plain content."""
        ...

    def feed(self, text: str) -> list[OutputPart]:
        """Add text; return the parts that are certain now. Possible markup is held back."""
        ...

    def finish(self) -> list[OutputPart]:
        """End the text; return what was held back. Do not call `feed` afterwards."""
        ...


def merge_parts(parts: Iterable[OutputPart]) -> list[OutputPart]:
    """Join neighbouring parts of one kind; the result does not depend on how text was cut."""
    found: list[OutputPart] = []
    for _, run in groupby(parts, _kind):
        first, *others = run
        if isinstance(first, ToolCallStart):
            found += [first, *others]
        else:
            texts = [
                first.text,
                *(each.text for each in others if not isinstance(each, ToolCallStart)),
            ]
            found.append(replace(first, text="".join(texts)))
    return found


def _kind(part: OutputPart) -> tuple[type[OutputPart], int]:
    """A key that is equal for parts whose texts can be joined."""
    return type(part), part.index if isinstance(part, ToolCallArguments) else 0
