"""How families of models write calls of tools: one file each, read as text comes, without I/O.

`docs/tools.md` tells how each is recognised and what becomes of malformed markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.text.tools.hermes import Hermes
from pdserve.text.tools.llama3_json import Llama3Json
from pdserve.text.tools.mistral import Mistral
from pdserve.text.tools.pythonic import Pythonic
from pdserve.text.tools.qwen3_coder import Qwen3Coder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.text.tools.base import ToolFormat

__all__ = ["TOOL_FORMATS", "detect"]

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    each.name: each for each in (Hermes(), Qwen3Coder(), Llama3Json(), Pythonic(), Mistral())
}


def detect(template: str | None) -> str:
    """The name of the format that a chat template asks for; empty if it knows of no tools."""
    if template is None or "tools" not in template:
        return ""
    if "<tool_call>" in template:
        if "<arg_key>" in template:  # a form of its own
            return ""
        coder = "<function=" in template and "<parameter=" in template
        return "qwen3_coder" if coder else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_start|>" in template or "[func_name1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or _is_llama3(template):
        return "llama3_json"
    return ""


def _is_llama3(template: str) -> bool:
    return "<|start_header_id|>" in template and '"parameters": ' in template
