"""The base of parsers that read everything a model writes: reasoning, content and calls, each on a
channel of its own. It does not know how channels are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.text.incremental_reader import WhitespaceBuffer
from pdserve.text.output_parts import ReasoningDelta
from pdserve.text.tool_parsers.base import ToolCallReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.incremental_reader import State

__all__ = ["ChannelReader"]


class ChannelReader(ToolCallReader):
    __slots__ = ("_calls", "_known", "_thought")

    def __init__(self, state: State, tools: Sequence[Tool], *, calls: bool) -> None:
        """`calls`: the request has tools; otherwise what looks like a call is content."""
        super().__init__(state)
        self._calls = calls
        self._known = {tool.function.name: tool for tool in tools}
        self._thought = WhitespaceBuffer(bare=True)

    def reason(self, text: str) -> None:
        """Output reasoning, without whitespace at both its ends."""
        shown = self._thought.add(text)
        if shown:
            self.parts.append(ReasoningDelta(shown))
