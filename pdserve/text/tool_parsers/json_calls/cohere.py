"""Declares the format of Cohere's Command R7B and A: a list between `<|START_ACTION|>` and
`<|END_ACTION|>`.

An object has `tool_call_id`, a number that counts the calls, `tool_name` and `parameters`. Text
stands between markers, too. Command R and R+ write the list as a block of code behind `Action:`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.json_calls.marked_objects import MarkedObjects
from pdserve.text.tool_parsers.tool_call_grammar import lark_string

if TYPE_CHECKING:
    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.tool_call_grammar import ToolCallGrammar


@dataclass(frozen=True)
class Cohere(MarkedObjects):
    start: str = "<|START_ACTION|>"
    end: str = "<|END_ACTION|>"
    head: str = "[\n    "
    joint: str = ",\n    "
    tail: str = "\n]"
    around: tuple[str, ...] = (
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
        "<|END_OF_TURN_TOKEN|>",
    )
    name_key: str = "tool_name"
    arguments_key: str = "parameters"

    def call_term(self, grammar: ToolCallGrammar, tool: Tool) -> str:
        grammar.terminal("CALL_INDEX: /[0-9]{1,3}/")
        name = f'", "tool_name": {json.dumps(tool.function.name)}, "parameters": '
        arguments = grammar.arguments(tool)
        return f'"{{\\"tool_call_id\\": \\"" CALL_INDEX {lark_string(name)} {arguments} "}}"'


class _CommandR(MarkedObjects):
    def detect(self, template: str) -> bool:
        """The words are in templates of the later models as well."""
        words = ("Action:", "```json", '"tool_name"', "directly-answer")
        return all(each in template for each in words) and "<|START_ACTION|>" not in template


COMMAND_R: Final = _CommandR(
    "Action:\n```json",
    head="\n[\n    ",
    joint=",\n    ",
    tail="\n]\n```",
    bare_starts=("Action:\n```json", "Action: ```json", "Action:```json", "```json"),
    around=("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    name_key="tool_name",
    arguments_key="parameters",
)
