"""MiniCPM 5's calls: an element for each, without a block around them.

    <function name="NAME"><param name="KEY">VALUE</param></function>

A value with markup in it stands in `<![CDATA[` and `]]>`, which are no part of it.
"""

from __future__ import annotations

import re

from pdserve.text.tool_parsers.tagged_calls.tag_reader import TaggedFormat
from pdserve.text.tool_parsers.tagged_calls.tag_syntax import (
    ATTRIBUTE_VALUE,
    Tag,
    TagLayout,
    TagSyntax,
)

__all__ = ["MiniCpm5"]

_HEAD = re.compile(ATTRIBUTE_VALUE)
_NEVER = r"[<\r\n]"


class MiniCpm5(TaggedFormat):
    syntaxes = (
        TagSyntax(
            starts=("<function name=",),
            ends=("</function>",),
            call=Tag("", ">", _HEAD, _NEVER),
            parameter=Tag("<param name=", ">", _HEAD, _NEVER),
            parameter_end="</param>",
            unended="anywhere",
            quotes=("<![CDATA[", "]]>"),
            layout=TagLayout(
                block="",
                call='"{name}">',
                parameter='<param name="{name}">',
                value_end="</param>",
                call_end="",
                block_end="",
                between="\n",
            ),
        ),
    )

    def detect(self, template: str) -> bool:
        return "<function name=" in template and "<param name=" in template
