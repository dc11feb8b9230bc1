"""Feeding parsers in every way a text can be cut, and looking at what they say."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

from pdserve.text.output_parts import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_parts,
)
from tests.text.golden.samples import Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.text.output_parts import OutputParser, OutputPart
    from tests.text.golden.samples import Call


def read(make: Callable[[], OutputParser], pieces: Iterable[str]) -> list[OutputPart]:
    """All parts, joined; every one has been checked for what must hold of each."""
    parser = make()
    parts: list[OutputPart] = []
    for piece in pieces:
        parts += parser.feed(piece)
    parts += parser.finish()
    began = 0
    for part in parts:
        match part:
            case ContentDelta(text) | ReasoningDelta(text) | ToolCallArguments(_, text):
                assert text, "an empty part"
        match part:
            case ToolCallStart(index, name):
                assert index == began
                assert name
                began += 1
            case ToolCallArguments(index, _):
                assert index == began - 1, "arguments of another call than the last"
    return merge_parts(parts)


def cut(text: str, borders: Sequence[int]) -> list[str]:
    places = [0, *sorted(borders), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


def content(parts: Sequence[OutputPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ContentDelta))


def reasoning(parts: Sequence[OutputPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ReasoningDelta))


def calls(parts: Sequence[OutputPart]) -> list[tuple[str, str]]:
    names = [part.name for part in parts if isinstance(part, ToolCallStart)]
    texts = [""] * len(names)
    for part in parts:
        if isinstance(part, ToolCallArguments):
            texts[part.index] += part.text
    return list(zip(names, texts, strict=True))


def decoded(found: Sequence[tuple[str, str]], like: Sequence[Call]) -> list[Call]:
    """Arguments as values, except where their very text is asked for."""
    cuts = [isinstance(each, Cut) for _, each in like] + [False] * len(found)
    return [
        (name, Cut(text) if raw else json.loads(text))
        for (name, text), raw in zip(found, cuts, strict=False)
    ]
