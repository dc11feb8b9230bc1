"""Formats like GLM's: the name, then pairs of `<arg_key>` and `<arg_value>`.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

GLM 4.7 and later write no line breaks. Hy3 puts `<tool_sep>` behind the name and `<tool_calls>`
around all calls; every tag of a released checkpoint ends in `:opensource`. In LongCat's tags
every name begins with `longcat_`.
"""

from __future__ import annotations

import re
from typing import Final

from pdserve.text.tool_parsers.tagged_calls.tag_reader import TaggedFormat
from pdserve.text.tool_parsers.tagged_calls.tag_syntax import Tag, TagLayout, TagSyntax

__all__ = ["Glm45", "Glm47", "HyV3", "LongcatPairs"]

_NAME: Final = re.compile(r"\s*(?P<name>[^\s<>(){}\[\]\\]+)(?:[ \t]|\\n)*")
"""A name, and blanks. Models sometimes write a line break as a backslash and `n`."""


def _pairs(
    *, prefix: str = "", suffix: str = "", line: str = "\n", separator: str = "", wrap: str = ""
) -> TagSyntax:
    """`line`: what the family writes between tags. `separator` and `wrap`: names of its tags."""

    def tag(name: str, slash: str = "") -> str:
        return f"<{slash}{prefix}{name}{suffix}>"

    start, end = tag("tool_call"), tag("tool_call", "/")
    key, key_end = tag("arg_key"), tag("arg_key", "/")
    value, value_end = tag("arg_value"), tag("arg_value", "/")
    after = tag(separator) if separator else ""
    never = "|".join(map(re.escape, (start, end, key, value_end)))
    blank = r"(?:\s|\\n)*"
    head = re.compile(rf"{blank}(?P<name>.*?){blank}(?:{re.escape(key_end)})?{blank}", re.DOTALL)
    return TagSyntax(
        starts=(start,),
        ends=(end,),
        wraps=(tag(wrap), tag(wrap, "/")) if wrap else (),
        call=Tag("", "", _NAME, r"(?!)"),
        separator=after,
        parameter=Tag(key, value, head, never),
        parameter_end=value_end,
        sure=True,
        tokens=(key, key_end, value, value_end),
        layout=TagLayout(
            block="",
            call=f"{{name}}{after}{line}",
            parameter=f"{key}{{name}}{key_end}{line}{value}",
            value_end=f"{value_end}{line}",
            call_end="",
            block_end="",
            between=line,
        ),
    )


class Glm45(TaggedFormat):
    syntaxes = (_pairs(),)

    def detect(self, template: str) -> bool:
        return all(each in template for each in ("<tool_call>", "<arg_key>", "<arg_value>"))


class Glm47(Glm45):
    syntaxes = (_pairs(line=""),)

    def detect(self, template: str) -> bool:
        return super().detect(template) and "</arg_key><arg_value>" in template


class HyV3(TaggedFormat):
    syntaxes = tuple(
        _pairs(suffix=each, separator="tool_sep", wrap="tool_calls") for each in (":opensource", "")
    )

    def detect(self, template: str) -> bool:
        return "<tool_sep" in template and "<arg_key" in template


class LongcatPairs(TaggedFormat):
    syntaxes = (_pairs(prefix="longcat_"),)

    def detect(self, template: str) -> bool:
        return "<longcat_arg_key>" in template
