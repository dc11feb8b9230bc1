"""Separates a model's reasoning from its answer while the text streams.

A model reasons once, at the start, between two markers; some templates write the first marker into
the prompt. A later marker is content, except an end marker without a start, which is dropped. If
the request has tools, the marker of a tool call ends the block too, because models forget the end
marker. Whitespace around the reasoning is layout and not shown. A block without an end is reasoning
up to the last character.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.text.incremental_reader import (
    IncrementalReader,
    WhitespaceBuffer,
    partial_marker_length,
)
from pdserve.text.output_parts import ContentDelta, ReasoningDelta

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.text.output_parts import OutputParser, OutputPart

__all__ = ["MarkedReasoning", "ReasoningFormat", "ReasoningParser"]


class ReasoningFormat(Protocol):
    """How a model family marks its reasoning."""

    @property
    def start(self) -> str:
        """Text that begins a block."""
        ...

    @property
    def end(self) -> str:
        """Text that ends a block, and with which a thinking budget ends it."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers; where they are special tokens, the detokenizer must show them."""
        ...

    def detect(self, template: str) -> bool:
        """Return True if a model with this chat template marks its reasoning so."""
        ...

    def opens(self, prompt: str, continued: str) -> bool:
        """Return True if the rendered prompt ends inside of a block.

        `continued`: the text of the message to continue, at the end of the prompt; may be empty.
        """
        ...

    def before_answer(self, special: Mapping[str, int]) -> str:
        """Return a Lark term for markup that begins an answer, before what a grammar describes.

        Empty: there is none. `special`: ids of those markers that are special tokens.
        """
        ...

    def parser(
        self, begun: bool, then: OutputParser | None = None, calls: tuple[str, ...] = ()
    ) -> OutputParser:
        """Create the parser of one choice.

        `begun`: the prompt has opened the block. `then` parses the text after the block; without
        it that text is content. `calls`: markers of tool calls for `then`; they end the block.
        """
        ...


@dataclass(frozen=True, slots=True)
class MarkedReasoning:
    """Reasoning in one block between two markers."""

    start: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start, self.end

    def detect(self, template: str) -> bool:
        return self.end in template

    def opens(self, prompt: str, continued: str) -> bool:
        """Only whitespace follows the start, or `continued` has the start and not the end. A start
        with more after it is part of an earlier turn."""
        if continued.rfind(self.start) > continued.rfind(self.end):
            return True
        return prompt.rstrip().endswith(self.start)

    def before_answer(self, special: Mapping[str, int]) -> str:
        return ""

    def parser(
        self, begun: bool, then: OutputParser | None = None, calls: tuple[str, ...] = ()
    ) -> OutputParser:
        return ReasoningParser(self, begun, then, calls)


class ReasoningParser(IncrementalReader):
    """Returns the block as `ReasoningDelta` and passes all later text to the next parser."""

    __slots__ = ("_blank", "_ends", "_format", "_layout", "_then")

    def __init__(
        self,
        format: MarkedReasoning,
        begun: bool,
        then: OutputParser | None,
        calls: tuple[str, ...] = (),
    ) -> None:
        super().__init__(self._again if begun else self._opening)
        self._format = format
        self._ends = (format.end, *calls)
        self._then = then
        self._layout = WhitespaceBuffer(bare=True)
        self._blank: list[str] = []
        """Whitespace at the start of the text."""

    @property
    def in_reasoning(self) -> bool:
        return self.state in (self._block, self._again)

    @property
    def settled(self) -> bool:
        return self._then is None and self.state == self._answer

    def finish(self) -> list[OutputPart]:
        parts = super().finish()
        return parts if self._then is None else parts + self._then.finish()

    def _opening(self) -> bool:
        """State before the block, if there is one."""
        begin = self.at
        found = self.skip_blank()
        self._blank.append(self.text[begin : self.at])
        marker = self.meets((self._format.start,)) if found else None
        if marker:
            self.at += len(marker)
            return self.turn(self._block)
        if marker is None and not self.last:
            return False
        self._pass_on("".join(self._blank))
        return self.turn(self._stray)

    def _again(self) -> bool:
        """State after a start marker in the prompt, which some models repeat."""
        if not self.skip_blank():
            return False
        marker = self.meets((self._format.start,))
        if marker is None:
            return False
        self.at += len(marker)
        return self.turn(self._block)

    def _block(self) -> bool:
        found, end = self._first_end()
        if end:
            self._reason(self._layout.add(self.text[self.at : found]))
            self.at = found
            # A tool call ends the block as well; an end marker that comes after it is stray.
            if end != self._format.end:
                return self.turn(self._stray)
            self.at += len(end)
            return self.turn(self._gap)
        stop = len(self.text) - (
            0 if self.last else partial_marker_length(self.text, self._ends, self.at)
        )
        self._reason(self._layout.add(self.text[self.at : stop]))
        self.at = stop
        if self.last:
            self._reason(self._layout.flush())
        return False

    def _first_end(self) -> tuple[int, str]:
        """Position of the block's end and its marker; -1 and "" if there is none yet."""
        places = ((self.text.find(end, self.at), end) for end in self._ends)
        return min((each for each in places if each[0] >= 0), default=(-1, ""))

    def _gap(self) -> bool:
        """State between the block and the answer."""
        return self.skip_blank() and self.turn(self._answer)

    def _stray(self) -> bool:
        """State in an answer without a block: the first end marker in it is dropped."""
        end = self._format.end
        found = self.text.find(end, self.at)
        if found >= 0:
            self._pass_on(self.text[self.at : found])
            self.at = found + len(end)
            return self.turn(self._answer)
        stop = len(self.text) - (
            0 if self.last else partial_marker_length(self.text, (end,), self.at)
        )
        self._pass_on(self.text[self.at : stop])
        self.at = stop
        return False

    def _answer(self) -> bool:
        self._pass_on(self.text[self.at :])
        self.at = len(self.text)
        return False

    def _reason(self, text: str) -> None:
        if text:
            self.parts.append(ReasoningDelta(text))

    def _pass_on(self, text: str) -> None:
        if not text:
            return
        if self._then is None:
            self.parts.append(ContentDelta(text))
        else:
            self.parts += self._then.feed(text)
