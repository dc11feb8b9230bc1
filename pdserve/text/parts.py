"""What a model's text is made of once its markup is read: content, reasoning, calls of tools.

The records that parsers of `tools/` and `reasoning.py` give and the frontend writes to clients.
They carry text only; ids of calls are the frontend's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's own; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins; its name is whole."""

    index: int
    """Of the call in this answer, from 0 on."""
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: the fragments of one index add up to a JSON object."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


class PartParser(Protocol):
    """Reads one choice's text as it comes. Whatever borders the text is cut at, the parts add up to
    the same answer, and no marker is ever shown in one."""

    @property
    def in_reasoning(self) -> bool:
        """What comes next belongs to the model's reasoning, as far as can be told."""
        ...

    @property
    def settled(self) -> bool:
        """Nothing is held back, and whatever comes is content as it stands."""
        ...

    def feed(self, text: str) -> list[Part]:
        """Everything that `text` makes certain; what may still be markup is held back."""
        ...

    def finish(self) -> list[Part]:
        """What was held back, once the text has ended. Nothing is fed after it."""
        ...


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbours of one kind joined: what every way of cutting has in common."""
    found: list[Part] = []
    for _, run in groupby(parts, _kind):
        first, *others = run
        if isinstance(first, CallBegin):
            found += [first, *others]
        else:
            texts = [first.text, *(each.text for each in others if not isinstance(each, CallBegin))]
            found.append(replace(first, text="".join(texts)))
    return found


def _kind(part: Part) -> tuple[type[Part], int]:
    """Equal for parts whose texts belong together."""
    return type(part), part.index if isinstance(part, CallArguments) else 0
