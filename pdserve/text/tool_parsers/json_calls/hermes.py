"""Declares the Hermes format (Hermes, Qwen 2.5 and 3): JSON between `<tool_call>` and
`</tool_call>`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pdserve.text.tool_parsers.json_calls.marked_objects import MarkedObjects

START: Final = "<tool_call>"
END: Final = "</tool_call>"
_NAME_KEY: Final = re.compile(r"""\\?["']name\\?["']\s*:""")
_ARGUMENTS_KEY: Final = re.compile(r"""\\?["']arguments\\?["']\s*:""")
_WHOLE_CALL: Final = re.compile(r"\btool_call(\.function)?\s*\|\s*tojson")


@dataclass(frozen=True)
class Hermes(MarkedObjects):
    """One object for each pair of markers."""

    start: str = START
    end: str = END
    head: str = "\n"
    joint: str = ""
    tail: str = "\n"

    def detect(self, template: str) -> bool:
        """An object with a name and arguments, or a call printed as JSON, follows the marker. The
        words alone are in every template that prints calls."""
        if START not in template or "<function=" in template:
            return False
        behind = template[template.index(START) :]
        keys = _NAME_KEY.search(behind) and _ARGUMENTS_KEY.search(behind)
        return bool(keys or _WHOLE_CALL.search(behind)) and super().detect(template)


class Granite4(Hermes):
    """Granite 4, which writes the same."""

    def detect(self, template: str) -> bool:
        return "<|start_of_role|>" in template and super().detect(template)
