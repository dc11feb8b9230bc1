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


def _elements(blank: str) -> TagSyntax:
    """The syntax, with `blank` between the words of a tag."""
    call, parameter = f"<function{blank}name=", f"<param{blank}name="
    return TagSyntax(
        starts=(call,),
        ends=("</function>",),
        call=Tag("", ">", _HEAD, _NEVER),
        parameter=Tag(parameter, ">", _HEAD, _NEVER),
        parameter_end="</param>",
        unended="anywhere",
        wrappers=("arguments", "properties"),
        quotes=("<![CDATA[", "]]>"),
        layout=TagLayout(
            block="",
            call='"{name}">',
            parameter=f'{parameter}"{{name}}">',
            value_end="</param>",
            call_end="",
            block_end="",
            between="\n",
        ),
    )


class MiniCpm5(TaggedFormat):
    syntaxes = (_elements(" "), _elements(""), _elements("\u0120"))
    """As the family writes it; then without the blank, which the tags' own tokens lack, and with
    the sign that stands for a blank in the vocabulary."""

    def detect(self, template: str) -> bool:
        return "<function name=" in template and "<param name=" in template
