"""Reads reasoning and answers of Cohere's Command R7B and Command A.

Both may cite tool results and documents, `<co>text</co: 0:[1]>`: the text is shown, the marks are
not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pdserve.text.output_parts import ContentDelta, ReasoningDelta, merge_parts
from pdserve.text.reasoning_parsers.base import MarkedReasoning, ReasoningParser

if TYPE_CHECKING:
    from pdserve.text.output_parts import OutputParser, OutputPart

__all__ = ["COHERE"]

_MARK: Final = re.compile(r"<co>|</co:[^<>]{0,200}>")
_PARTIAL: Final = re.compile(r"<(?:c|co|/|/c|/co|/co:[^<>]{0,200})?\Z")


class CohereReasoning(MarkedReasoning):
    __slots__ = ()

    def parser(
        self, begun: bool, then: OutputParser | None = None, calls: tuple[str, ...] = ()
    ) -> OutputParser:
        return _Parser(self, begun, then, calls)


class _Parser(ReasoningParser):
    """The usual parser, whose texts lose their marks of citations."""

    __slots__ = ("_content_marks", "_reasoning_marks")

    def __init__(
        self,
        format: MarkedReasoning,
        begun: bool,
        then: OutputParser | None,
        calls: tuple[str, ...],
    ) -> None:
        super().__init__(format, begun, then, calls)
        self._content_marks = _MarkFilter()
        self._reasoning_marks = _MarkFilter()

    @property
    def settled(self) -> bool:
        return False

    def feed(self, text: str) -> list[OutputPart]:
        return self._without_marks(super().feed(text))

    def finish(self) -> list[OutputPart]:
        reasoning = ReasoningDelta(self._reasoning_marks.held)
        self._reasoning_marks.held = ""
        parts = self._without_marks(super().finish())
        content = ContentDelta(self._content_marks.held)
        return merge_parts([each for each in (reasoning, *parts, content) if _has_text(each)])

    def _without_marks(self, parts: list[OutputPart]) -> list[OutputPart]:
        found: list[OutputPart] = []
        for part in parts:
            match part:
                case ContentDelta(text):
                    found.append(ContentDelta(self._content_marks.add(text)))
                case ReasoningDelta(text):
                    found.append(ReasoningDelta(self._reasoning_marks.add(text)))
                case _:
                    found.append(part)
        return [each for each in found if _has_text(each)]


class _MarkFilter:
    """Drops marks of citations from a text that comes in pieces."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = ""
        """The end of the text, which may be part of a mark."""

    def add(self, text: str) -> str:
        text = _MARK.sub("", self.held + text)
        partial = _PARTIAL.search(text)
        end = len(text) if partial is None else partial.start()
        self.held = text[end:]
        return text[:end]


def _has_text(part: OutputPart) -> bool:
    return not isinstance(part, ContentDelta | ReasoningDelta) or bool(part.text)


COHERE: Final = CohereReasoning(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    marks=("<|START_THINKING|>",),
)
