"""Parses and constrains tool calls in the format of each model family: one file per format, no I/O.

`docs/tools.md` says how each format is recognised and what happens to malformed markup.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.hermes import Hermes
from pdserve.text.tool_parsers.llama3_json import Llama3Json
from pdserve.text.tool_parsers.mistral import Mistral
from pdserve.text.tool_parsers.pythonic import Pythonic
from pdserve.text.tool_parsers.qwen3_coder import Qwen3Coder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.text.tool_parsers.base import ToolFormat

__all__ = ["TOOL_FORMATS", "detect_tool_format"]

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    each.name: each for each in (Hermes(), Qwen3Coder(), Llama3Json(), Pythonic(), Mistral())
}


_UNREAD: Final = (
    "]<]minimax[>[",  # MiniMax M3
    "minimax:tool_call",  # MiniMax M2
    "<arg_key>",  # GLM
    "<tool_calls>",  # Apriel, Nemotron
    "<TOOLCALL>",  # Nemotron
    "<function=name>",  # Functionary
    "<function=example_function_name>{",  # Functionary
    "<|tool_calls_section_begin|>",  # Kimi
    "<|tool_call_start|>",  # LFM2
    "<｜tool▁calls▁begin｜>",  # DeepSeek
    "<｜DSML｜",  # DeepSeek
    "<|channel|>",  # GPT-OSS
    "<seed:tool_call>",  # Seed-OSS
    "<|START_ACTION|>",  # Cohere
    "<function_calls>",  # OLMo
    "functools[",  # Phi
)
"""Marks of model families whose format has no parser here. No format is detected for them, even if
their templates contain the words of another family."""


def detect_tool_format(template: str | None) -> str:
    """Return the name of the format that a chat template uses; empty if none is certain.

    A format is chosen by the structure of its calls, not by one word. The wrong parser would show
    markup to clients; without a parser, a request with `tools` is refused with a remedy.
    """
    if template is None or "tools" not in template:
        return ""
    if any(mark in template for mark in _UNREAD):
        return ""
    if "<tool_call>" in template:
        if "<function=" in template:
            return "qwen3_coder" if "<parameter=" in template else ""
        return "hermes" if _writes_json_calls(template) else ""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_start|>" in template or "[func_name1(" in template:
        return "pythonic"
    if "<function=" in template:
        return ""
    if "<|python_tag|>" in template or _is_llama3(template):
        return "llama3_json"
    return ""


_NAME_KEY: Final = re.compile(r"""\\?["']name\\?["']\s*:""")
_ARGUMENTS_KEY: Final = re.compile(r"""\\?["']arguments\\?["']\s*:""")
_WHOLE_CALL: Final = re.compile(r"\btool_call(\.function)?\s*\|\s*tojson")


def _writes_json_calls(template: str) -> bool:
    """Whether an object with a name and arguments, or a call printed as JSON, follows the marker.
    The words alone are in every template that prints calls."""
    behind = template[template.index("<tool_call>") :]
    keys = _NAME_KEY.search(behind) and _ARGUMENTS_KEY.search(behind)
    return bool(keys or _WHOLE_CALL.search(behind))


def _is_llama3(template: str) -> bool:
    return "<|start_header_id|>" in template and '"parameters": ' in template
