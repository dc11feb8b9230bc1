"""Declares the format of Hunyuan's dense models: in a section, the tool's name before a block of
code with the arguments.

    <tool_calls><tool_call>NAME
    ```json
    {...}
    ```</tool_call></tool_calls>
"""

from __future__ import annotations

import re
from typing import Final

from pdserve.text.tool_parsers.named_calls.named_objects import NamedObjects

HUNYUAN: Final = NamedObjects(
    call="<tool_call>",
    call_end="</tool_call>",
    section="<tool_calls>",
    section_end="</tool_calls>",
    header=re.compile(r"\s*(?P<name>[^\s<>`{}]+)\s*(?:`{1,3}\w*)?\s*"),
    header_before="",
    header_after="\n```json\n",
    tail="\n```",
    between="\n",
    around=("<answer>", "</answer>"),
    marks=("<tool_calls>", "```json"),
)
