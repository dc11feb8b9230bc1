"""Declares the format of Kimi K2: calls in a section, each with an id that has the tool's name.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>
    {...}<|tool_call_end|><|tool_calls_section_end|>

The templates write the call's id as it came, and the model reads the name from it. So the client
gets the model's own ids, and sends them back.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.named_calls.named_objects import NamedObjects
from pdserve.text.tool_parsers.tool_call_grammar import lark_string

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.tool_call_grammar import ToolCallGrammar

_SEPARATOR: Final = "<|tool_call_argument_begin|>"


class _KimiK2(NamedObjects):
    """The name stands in the call's id. A bare number stands for the only tool, if there is one;
    another id without a name, such as one that a client made up, for the tool whose arguments
    follow."""

    def name_of(self, header: re.Match[str], tools: Sequence[Tool]) -> str:
        names = [tool.function.name for tool in tools]
        name = header["name"] or ""
        if header["index"] is not None or name in names:
            return name
        return names[0] if len(names) == 1 and header["id"].isdecimal() else ""

    def infers(self, header: re.Match[str]) -> bool:
        return not header["id"].startswith("functions.")

    def header_term(self, grammar: ToolCallGrammar, tool: Tool) -> str:
        grammar.terminal("CALL_INDEX: /[0-9]{1,4}/")
        before = lark_string(f"functions.{tool.function.name}:")
        return f"{before} CALL_INDEX {grammar.marker(_SEPARATOR)}"


KIMI_K2: Final = _KimiK2(
    call="<|tool_call_begin|>",
    call_end="<|tool_call_end|>",
    section="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    other_sections=("<|tool_call_section_begin|>",),
    around=("<|tool_call_section_end|>",),
    header=re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<>{}]+?)(?::(?P<index>\d+))?)\s*"
        rf"(?:{re.escape(_SEPARATOR)})?\s*"
    ),
    header_before="functions.",
    header_after=":0" + _SEPARATOR,
    separators=(_SEPARATOR,),
)
