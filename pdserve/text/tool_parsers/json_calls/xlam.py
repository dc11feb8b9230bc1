"""Declares the format of xLAM 2: an answer that is a list of calls, `[{"name": ..., "arguments":
{...}}, ...]`.

Only names tell the list from other JSON, so a call has to name a tool of the request, except behind
markers of other families, which the models also write. The list may stand in a block of code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.text.tool_parsers.json_calls.marked_objects import MarkedObjects
from pdserve.text.tool_parsers.tool_call_grammar import ToolCallGrammar, lark_string

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolChoiceMode


@dataclass(frozen=True)
class XLam(MarkedObjects):
    start: str = "[TOOL_CALLS]"
    other_starts: tuple[str, ...] = ("<tool_call>",)
    around: tuple[str, ...] = ("</tool_call>",)
    bare_starts: tuple[str, ...] = ("```json", "```", "[")

    def detect(self, template: str) -> bool:
        """The templates print the list as it is, and name the family or describe the list."""
        if "<tool_call>" in template:
            return False
        return "xLAM" in template or '[{"name": "tool_call_name", "arguments"' in template

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        """The grammar. In free text a call begins with a bracket."""
        grammar = ToolCallGrammar(tools, choice, parallel, special)
        calls = grammar.any_call(self.call_term(grammar, tool) for tool in grammar.tools)
        listed = grammar.sequence(calls, lark_string(self.joint))
        return grammar.whole("[", f'"[" {listed} "]"', tag=self.start)
