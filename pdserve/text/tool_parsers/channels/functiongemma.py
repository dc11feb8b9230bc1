"""Parses calls of FunctionGemma, which are Gemma 4's with other markers.

    <start_function_call>call:NAME{KEY:<escape>text<escape>,count:3}<end_function_call>

Its markers are turned into Gemma 4's before they are read.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from pdserve.text.incremental_reader import partial_marker_length
from pdserve.text.tool_parsers.channels.gemma4 import CALL, CALL_END, QUOTE, Gemma4, Gemma4Reader
from pdserve.text.tool_parsers.tool_call_grammar import call_id
from pdserve.text.tool_parsers.typed_values import check_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.output_parts import OutputPart
    from pdserve.text.tool_parsers.base import ToolChoiceMode

__all__ = ["FunctionGemma"]

_OWN: Final = {
    "<start_function_call>": CALL,
    "<end_function_call>": CALL_END,
    "<escape>": QUOTE,
    "<start_function_response>": "<|tool_response>",
}
"""Marker -> Gemma 4's marker."""
_ANY: Final = re.compile("|".join(map(re.escape, _OWN)))


class FunctionGemma:
    markers: Final = tuple(_OWN)
    starts: Final = ("<start_function_call>",)

    def detect(self, template: str) -> bool:
        return "<start_function_call>" in template and "<escape>" in template

    def check(self, tools: Sequence[Tool]) -> None:
        check_parameters(tools)

    def parser(self, tools: Sequence[Tool]) -> Gemma4Reader:
        return FunctionGemmaReader(tools)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        tokens = {_OWN[marker]: id for marker, id in (special or {}).items()}
        grammar = Gemma4().grammar(tools, choice, parallel, tokens)
        for marker, other in _OWN.items():
            grammar = grammar.replace(json.dumps(other)[1:-1], marker)
        return grammar

    def call_id(self) -> str:
        return call_id()


class FunctionGemmaReader(Gemma4Reader):
    __slots__ = ("_half",)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._half = ""
        """The end of the text, which may be the beginning of a marker."""

    def feed(self, text: str) -> list[OutputPart]:
        text = self._half + text
        stop = len(text) - partial_marker_length(text, _OWN)
        self._half = text[stop:]
        return super().feed(_ANY.sub(_turned, text[:stop]))

    def finish(self) -> list[OutputPart]:
        half = "" if _drops(self._half) else self._half
        return super().feed(half) + super().finish()


def _turned(found: re.Match[str]) -> str:
    return _OWN[found[0]]


def _drops(half: str) -> bool:
    """Whether the text is certainly the beginning of a marker."""
    return half.startswith(("<start_f", "<end_f", "<escap"))
