"""Formats like Qwen3-Coder's: `<function=NAME>` and `<parameter=KEY>` inside of a block.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A line break at either end of a value is layout. Seed-OSS has another tag around it.
"""

from __future__ import annotations

import re
from typing import Final

from pdserve.text.tool_parsers.tagged_calls.tag_reader import TaggedFormat
from pdserve.text.tool_parsers.tagged_calls.tag_syntax import Tag, TagLayout, TagSyntax

__all__ = ["Qwen3Coder", "SeedOss"]

_HEAD: Final = re.compile(r"(?P<name>.*)")
_NEVER: Final = r"[<\r\n]"


def _in_block(start: str, end: str) -> TagSyntax:
    return TagSyntax(
        starts=(start,),
        ends=(end,),
        call=Tag("<function=", ">", _HEAD, _NEVER),
        call_end="</function>",
        parameter=Tag("<parameter=", ">", _HEAD, _NEVER),
        parameter_end="</parameter>",
        lines=True,
        unended="line",
        layout=TagLayout(
            block="\n",
            call="<function={name}>\n",
            parameter="<parameter={name}>\n",
            value_end="\n</parameter>\n",
            call_end="</function>",
            block_end="\n",
            between="\n",
        ),
    )


class Qwen3Coder(TaggedFormat):
    syntaxes = (_in_block("<tool_call>", "</tool_call>"),)

    def detect(self, template: str) -> bool:
        return all(each in template for each in ("<tool_call>", "<function=", "<parameter="))


class SeedOss(TaggedFormat):
    syntaxes = (_in_block("<seed:tool_call>", "</seed:tool_call>"),)

    def detect(self, template: str) -> bool:
        return "<seed:tool_call>" in template
