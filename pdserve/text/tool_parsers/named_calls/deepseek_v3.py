"""Declares the formats of DeepSeek V3 and R1, and of V3.1: calls between `<｜tool▁calls▁begin｜>`
and `<｜tool▁calls▁end｜>`.

V3 writes the kind of the tool before its name, and the arguments as a block of code; V3.1 writes
`NAME<｜tool▁sep｜>{...}`.
"""

from __future__ import annotations

import re
from typing import Final

from pdserve.text.tool_parsers.named_calls.named_objects import NamedObjects

_CALL: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_SECTION: Final = "<｜tool▁calls▁begin｜>"
_SECTION_END: Final = "<｜tool▁calls▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_OTHER_SECTIONS: Final = (
    "<｜tool▁calls｜>",
    "<｜tool calls begin｜>",
    "<｜tool\\_calls\\_begin｜>",
)
"""What distilled models write, whose tokenizers lack the marker."""
_AROUND: Final = ("<｜end▁of▁sentence｜>",)

DEEPSEEK_V3: Final = NamedObjects(
    call=_CALL,
    call_end=_CALL_END,
    section=_SECTION,
    section_end=_SECTION_END,
    other_sections=_OTHER_SECTIONS,
    header=re.compile(rf"\s*\w*\s*{_SEPARATOR}(?P<name>[^\s<>`{{}}]+)\s*(?:`{{1,3}}\w*)?\s*"),
    header_before=f"function{_SEPARATOR}",
    header_after="\n```json\n",
    tail="\n```",
    between="\n",
    separators=(_SEPARATOR,),
    around=_AROUND,
    loose=True,
    marks=(_SECTION, "```json"),
)
DEEPSEEK_V31: Final = NamedObjects(
    call=_CALL,
    call_end=_CALL_END,
    section=_SECTION,
    section_end=_SECTION_END,
    header=re.compile(rf"\s*(?P<name>[^\s<>`{{}}]+)\s*{_SEPARATOR}\s*(?:`{{1,3}}\w*)?\s*"),
    header_before="",
    header_after=_SEPARATOR,
    separators=(_SEPARATOR,),
    around=_AROUND,
    marks=(_SECTION,),
    foreign=("```json", "<tool_call>"),
)
