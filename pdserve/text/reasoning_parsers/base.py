"""Separates a model's reasoning from its answer while the text streams.

A model reasons once, at the start, between two markers; some templates write the first marker into
the prompt. A later marker is content, except an end marker without a start, which is dropped. If
the request has tools, a tool call ends the block too, because models forget the end marker. But a
call that the model only considers is reasoning: text and then the end marker follow it, so a call
in a block is held back until the block or the answer ends. A call's marker that no call follows is
reasoning, too. Whitespace around the reasoning is layout and not shown. A block without an end is
reasoning up to the last character.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.text.incremental_reader import (
    IncrementalReader,
    WhitespaceBuffer,
    partial_marker_length,
)
from pdserve.text.output_parts import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_parts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.text.output_parts import OutputParser, OutputPart

_LONGEST_TRY: Final = 4096
"""Most characters that are read after the start marker of a call, inside of reasoning, to decide
whether a call follows."""

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
    other_starts: tuple[str, ...] = ()
    """Other words for the start."""
    other_ends: tuple[str, ...] = ()
    frame: tuple[str, ...] = ()
    """Markers around the answer, none of which is shown: first those that begin it, then those that
    end it, in pairs."""
    marks: tuple[str, ...] = ()
    """A template of the family has all of these; the end is enough if there are none."""
    any_of: tuple[str, ...] = ()
    """A template of the family has one of these, if there are any."""
    foreign: tuple[str, ...] = ()
    """A template with one of these is not of the family."""

    @property
    def starts(self) -> tuple[str, ...]:
        return self.start, *self.other_starts

    @property
    def ends(self) -> tuple[str, ...]:
        return self.end, *self.other_ends

    @property
    def markers(self) -> tuple[str, ...]:
        return *self.starts, *self.ends, *self.frame

    def detect(self, template: str) -> bool:
        if any(each in template for each in self.foreign):
            return False
        if self.any_of and not any(each in template for each in self.any_of):
            return False
        needed = self.marks or (() if self.any_of else (self.end,))
        return all(each in template for each in needed)

    def opens(self, prompt: str, continued: str) -> bool:
        """Only whitespace follows the start, or `continued` has the start and not the end. A start
        with more after it is part of an earlier turn."""
        if max(map(continued.rfind, self.starts)) > max(map(continued.rfind, self.ends)):
            return True
        return prompt.rstrip().endswith(self.starts)

    def before_answer(self, special: Mapping[str, int]) -> str:
        if not self.frame:
            return ""
        begins = (
            f"<[{special[each]}]>" if each in special else json.dumps(each)
            for each in self.frame[::2]
        )
        return f"({' | '.join(begins)})?"

    def parser(
        self, begun: bool, then: OutputParser | None = None, calls: tuple[str, ...] = ()
    ) -> OutputParser:
        return ReasoningParser(self, begun, then, calls)


class ReasoningParser(IncrementalReader):
    """Returns the block as `ReasoningDelta` and passes all later text to the next parser."""

    __slots__ = (
        "_blank",
        "_called",
        "_drops",
        "_ends",
        "_format",
        "_framed",
        "_layout",
        "_then",
        "_tried",
        "_unmade",
    )

    def __init__(
        self,
        format: MarkedReasoning,
        begun: bool,
        then: OutputParser | None,
        calls: tuple[str, ...] = (),
    ) -> None:
        super().__init__(self._again if begun else self._opening)
        self._format = format
        self._ends = (*format.ends, *calls)
        self._drops = (*format.ends, *format.frame)
        """Markers of which the next one in the answer is dropped."""
        self._framed: WhitespaceBuffer | None = None
        """Whitespace in an answer that a marker has begun."""
        self._then = then
        self._layout = WhitespaceBuffer(bare=True)
        self._blank: list[str] = []
        """Whitespace at the start of the text."""
        self._tried: list[str] = []
        """A call's marker, and the text behind it."""
        self._called: list[OutputPart] = []
        """Calls in the block, until it is known whether the model makes them."""
        self._unmade = 0
        """Number of calls that the model only considered."""

    @property
    def in_reasoning(self) -> bool:
        return self.state in (self._block, self._again)

    @property
    def settled(self) -> bool:
        return self._then is None and self.state == self._answer and not self._drops

    def finish(self) -> list[OutputPart]:
        parts = super().finish()
        return parts if self._then is None else parts + self._numbered(self._then.finish())

    def _opening(self) -> bool:
        """State before the block, if there is one."""
        begin = self.at
        found = self.skip_blank()
        self._blank.append(self.text[begin : self.at])
        marker = self.meets(self._format.starts) if found else None
        if marker:
            self.at += len(marker)
            return self.turn(self._block)
        if marker is None and not self.last:
            return False
        self._pass_on("".join(self._blank))
        return self.turn(self._answer)

    def _again(self) -> bool:
        """State after a start marker in the prompt, which some models repeat."""
        if not self.skip_blank():
            return False
        marker = self.meets(self._format.starts)
        if marker is None:
            return False
        self.at += len(marker)
        return self.turn(self._block)

    def _block(self) -> bool:
        found, end = self._first(self._ends)
        if end:
            self._reason(self._layout.add(self.text[self.at : found]))
            self.at = found + len(end)
            if end in self._format.ends:
                return self._drop(end)
            self._tried.clear()
            return self._try(end) or self.turn(self._attempt)
        stop = len(self.text) - (
            0 if self.last else partial_marker_length(self.text, self._ends, self.at)
        )
        self._reason(self._layout.add(self.text[self.at : stop]))
        self.at = stop
        if self.last:
            self._reason(self._layout.flush())
        return False

    def _attempt(self) -> bool:
        """State after the start marker of a call, until it is known whether a call follows."""
        while self.at < len(self.text):
            end = self.meets(self._format.ends)
            if end is None:
                return False
            if end:
                self.at += len(end)
                self._no_call()
                return self._drop(end)
            self.at += 1
            if self._try(self.text[self.at - 1]):
                return True
        return False

    def _try(self, text: str) -> bool:
        """Let the next parser read more; returns whether it has decided what it is."""
        # Only a parser of tool calls has markers that end a block.
        assert self._then is not None
        parts = self._then.feed(text)
        self._tried.append(text)
        if any(isinstance(each, ToolCallStart) for each in parts):
            self._called += parts
            return self.turn(self._considered)
        if len(self._tried) > _LONGEST_TRY:
            self.parts += parts
            return self.turn(self._answer)
        if not parts:
            return False
        self._reason(self._layout.add("".join(self._tried)))
        return self.turn(self._block)

    def _no_call(self) -> None:
        """The block has ended, so what the next parser holds back is no call."""
        held = self._then.settle() if isinstance(self._then, IncrementalReader) else []
        if any(isinstance(each, ToolCallStart) for each in held):
            self.parts += held
        else:
            self._reason(self._layout.add("".join(self._tried)))

    def _considered(self) -> bool:
        """State inside of calls and after them, while the block of reasoning is open."""
        found, end = self._first(self._format.ends)
        stop = found if end else len(self.text)
        if not end and not self.last:
            stop -= partial_marker_length(self.text, self._format.ends, self.at)
        self._called += self._consider(self.text[self.at : stop])
        self.at = stop
        if not end:
            if self.last:
                self._make()
            return self.last and self.turn(self._answer)
        self.at += len(end)
        parts = self._consider(end)
        self._called += parts
        if end not in _content(parts):
            # It is part of an argument.
            return True
        self._tried.pop()
        if _content(self._called).replace(end, "", 1).strip():
            self._unmake()
        else:
            self._called = [each for each in self._called if not isinstance(each, ContentDelta)]
            self._make()
        return self._drop(end)

    def _consider(self, text: str) -> list[OutputPart]:
        # Only a parser of tool calls has found a call.
        assert self._then is not None
        self._tried.append(text)
        return self._then.feed(text) if text else []

    def _make(self) -> None:
        """The calls are made: no text between them and the end shows them to be considered."""
        self.parts += merge_parts(self._called)
        self._called.clear()

    def _unmake(self) -> None:
        """The calls are reasoning."""
        if isinstance(self._then, IncrementalReader):
            self._called += self._then.settle()
        self._unmade = sum(isinstance(each, ToolCallStart) for each in self._called)
        self._called.clear()
        self._reason(self._layout.add("".join(self._tried)))

    def _numbered(self, parts: list[OutputPart]) -> list[OutputPart]:
        """Number calls as if those that were not made did not exist."""
        if not self._unmade:
            return parts
        return [
            replace(each, index=each.index - self._unmade)
            if isinstance(each, ToolCallStart | ToolCallArguments)
            else each
            for each in parts
        ]

    def _first(self, markers: tuple[str, ...]) -> tuple[int, str]:
        """Position of the first marker, and the marker; -1 and "" if there is none yet."""
        places = ((self.text.find(each, self.at), each) for each in markers)
        return min((each for each in places if each[0] >= 0), default=(-1, ""))

    def _gap(self) -> bool:
        """State between the block and the answer, or the answer's frame and its text."""
        return self.skip_blank() and self.turn(self._answer)

    def _answer(self) -> bool:
        """State in the answer. The first marker of its frame, and the first end of a block that was
        not begun, are dropped."""
        found, marker = self._first(self._drops)
        if marker:
            self._pass_on(self.text[self.at : found])
            self.at = found + len(marker)
            return self._drop(marker)
        stop = len(self.text) - (
            0 if self.last else partial_marker_length(self.text, self._drops, self.at)
        )
        self._pass_on(self.text[self.at : stop])
        self.at = stop
        return False

    def _drop(self, marker: str) -> bool:
        """Continue behind a marker that is not shown."""
        ends, frame = self._format.ends, self._format.frame
        gone = (*ends, marker) if marker in ends else (marker,)
        self._drops = tuple(each for each in self._drops if each not in gone)
        begins = marker in frame[::2]
        if marker in frame:
            self._framed = self._framed or WhitespaceBuffer(bare=True)
            self._framed.markup(first=begins)
        return self.turn(self._gap if begins or self.state != self._answer else self._answer)

    def _reason(self, text: str) -> None:
        if text:
            self.parts.append(ReasoningDelta(text))

    def _pass_on(self, text: str) -> None:
        if self._framed is not None:
            text = self._framed.add(text)
        if not text:
            return
        if self._then is None:
            self.parts.append(ContentDelta(text))
        else:
            self.parts += self._numbered(self._then.feed(text))


def _content(parts: list[OutputPart]) -> str:
    return "".join(each.text for each in parts if isinstance(each, ContentDelta))
