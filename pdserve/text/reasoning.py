"""Where a model's reasoning ends and its answer begins.

A family that reasons does so once, before anything else, between two markers; some templates write
the first of them into the prompt. So a block is looked for at the very start of the answer only:
what looks like a marker later on is what the model says about markers. The one exception is an end
that nothing began, which is dropped: it can only be markup.

Blank space at both ends of the reasoning, and before the answer that follows it, is layout and is
not shown. A block that the text leaves open is reasoning to its last character.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.text.markup import Layout, Reader, overlap
from pdserve.text.parts import Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.text.parts import Part, PartParser

__all__ = [
    "REASONING_FORMATS",
    "ReasoningFormat",
    "ReasoningParser",
    "detect",
    "opens_reasoning",
]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family marks its reasoning."""

    name: str
    start: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        """Must stay visible in the text, where they are special tokens."""
        return self.start, self.end

    def parser(self, begun: bool, then: PartParser | None = None) -> PartParser:
        """`begun`: the prompt has opened the block. `then` reads what follows it; without one, that
        is content."""
        return ReasoningParser(self, begun, then)


REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "think": ReasoningFormat("think", "<think>", "</think>"),
    "mistral": ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
}


def detect(template: str | None) -> str:
    """The name of the format that a chat template speaks of; empty if of none."""
    if template is None:
        return ""
    return next((each.name for each in REASONING_FORMATS.values() if each.end in template), "")


def opens_reasoning(prompt: str, format: ReasoningFormat, continued: str = "") -> bool:
    """The rendered prompt ends inside of a block: nothing but blank space follows its start, or it
    is in `continued`, the message that the model is to go on with, and its end is not.

    A start with more after it is part of an earlier turn.
    """
    if continued.rfind(format.start) > continued.rfind(format.end):
        return True
    return prompt.rstrip().endswith(format.start)


class ReasoningParser(Reader):
    """Gives the block as `Reasoning` and everything after it to the next parser."""

    __slots__ = ("_blank", "_format", "_layout", "_then")

    def __init__(self, format: ReasoningFormat, begun: bool, then: PartParser | None) -> None:
        super().__init__(self._again if begun else self._opening)
        self._format = format
        self._then = then
        self._layout = Layout(bare=True)
        self._blank: list[str] = []
        """Blank space that the text begins with."""

    @property
    def in_reasoning(self) -> bool:
        return self.state in (self._block, self._again)

    @property
    def settled(self) -> bool:
        return self._then is None and self.state == self._answer

    def finish(self) -> list[Part]:
        parts = super().finish()
        return parts if self._then is None else parts + self._then.finish()

    def _opening(self) -> bool:
        """Before the block, if there is one."""
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
        """The prompt has opened the block; some models do so once more."""
        if not self.skip_blank():
            return False
        marker = self.meets((self._format.start,))
        if marker is None:
            return False
        self.at += len(marker)
        return self.turn(self._block)

    def _block(self) -> bool:
        end = self._format.end
        found = self.text.find(end, self.at)
        if found >= 0:
            self._reason(self._layout.add(self.text[self.at : found]))
            self.at = found + len(end)
            return self.turn(self._gap)
        stop = len(self.text) - (0 if self.last else overlap(self.text, (end,), self.at))
        self._reason(self._layout.add(self.text[self.at : stop]))
        self.at = stop
        if self.last:
            self._reason(self._layout.flush())
        return False

    def _gap(self) -> bool:
        """Between the block and the answer."""
        return self.skip_blank() and self.turn(self._answer)

    def _stray(self) -> bool:
        """An answer without a block: the first end in it is markup that nothing began."""
        end = self._format.end
        found = self.text.find(end, self.at)
        if found >= 0:
            self._pass_on(self.text[self.at : found])
            self.at = found + len(end)
            return self.turn(self._answer)
        stop = len(self.text) - (0 if self.last else overlap(self.text, (end,), self.at))
        self._pass_on(self.text[self.at : stop])
        self.at = stop
        return False

    def _answer(self) -> bool:
        self._pass_on(self.text[self.at :])
        self.at = len(self.text)
        return False

    def _reason(self, text: str) -> None:
        if text:
            self.parts.append(Reasoning(text))

    def _pass_on(self, text: str) -> None:
        if not text:
            return
        if self._then is None:
            self.parts.append(Content(text))
        else:
            self.parts += self._then.feed(text)
