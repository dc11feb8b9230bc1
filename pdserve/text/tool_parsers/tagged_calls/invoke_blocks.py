"""Formats with a tag `invoke` for each call and `parameter` for each argument, in one block.

    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>

DeepSeek's tags (DSML) say of each value whether it is a string: `string="true"`. What is none is
JSON. Step 3 marks each call with tokens and writes one in a block.
"""

from __future__ import annotations

import re
from typing import Final

from pdserve.text.tool_parsers.tagged_calls.tag_reader import TaggedFormat
from pdserve.text.tool_parsers.tagged_calls.tag_syntax import (
    ATTRIBUTE_VALUE,
    Tag,
    TagLayout,
    TagSyntax,
)

__all__ = ["DeepSeekV4", "DeepSeekV32", "DeepSeekV41", "MiniMaxM2", "Step3"]

_NAMED: Final = re.compile(ATTRIBUTE_VALUE)
_TYPED: Final = re.compile(rf"""{ATTRIBUTE_VALUE}(?:string\s*=\s*["']?(?P<string>\w*)["']?\s*)?""")
_NEVER: Final = r"[<\r\n]"
_DSML: Final = "｜DSML｜"


def _invokes(
    starts: tuple[str, ...],
    ends: tuple[str, ...],
    prefix: str,
    *,
    typed: bool = False,
    token: str = "",
) -> TagSyntax:
    """`prefix`: what stands before `invoke` and `parameter`. `token`: the part of it that is one
    token."""
    invoke, parameter = f"<{prefix}invoke", f"<{prefix}parameter"
    string = ' string="{string}"' if typed else ""
    return TagSyntax(
        starts=starts,
        ends=ends,
        call=Tag(f"{invoke} name=", ">", _NAMED, _NEVER),
        call_end=f"</{prefix}invoke>",
        parameter=Tag(f"{parameter} name=", ">", _TYPED if typed else _NAMED, _NEVER),
        parameter_end=f"</{prefix}parameter>",
        sure=bool(token),
        wrappers=("arguments", "input") if typed else (),
        unended="anywhere",
        tokens=(token,) if token else (),
        leads=(f"<{token}", f"</{token}") if token else (),
        layout=TagLayout(
            block="\n",
            call=f'{invoke} name="{{name}}">\n',
            parameter=f'{parameter} name="{{name}}"{string}>',
            value_end=f"</{prefix}parameter>\n",
            call_end=f"</{prefix}invoke>",
            block_end="\n",
            between="\n",
            between_calls="\n",
        ),
    )


class MiniMaxM2(TaggedFormat):
    syntaxes = (_invokes(("<minimax:tool_call>",), ("</minimax:tool_call>",), ""),)

    def detect(self, template: str) -> bool:
        return "<minimax:tool_call>" in template and "<invoke" in template


def _dsml(*words: str, space: str = "") -> TagSyntax:
    prefix = f"{_DSML}{space}"
    return _invokes(
        tuple(f"<{prefix}{word}>" for word in words),
        tuple(f"</{prefix}{word}>" for word in words),
        prefix,
        typed=True,
        token=_DSML,
    )


class DeepSeekV32(TaggedFormat):
    syntaxes = (_dsml("function_calls", "tool_calls", "toolcalls", "tool"),)

    def detect(self, template: str) -> bool:
        return _DSML in template and "function_calls" in template


class DeepSeekV4(TaggedFormat):
    syntaxes = (_dsml("tool_calls", "function_calls", "toolcalls", "tool"),)

    def detect(self, template: str) -> bool:
        return _DSML in template and "tool_calls>" in template


class DeepSeekV41(TaggedFormat):
    syntaxes = (_dsml("calls", space=" "), *DeepSeekV4.syntaxes)

    def detect(self, template: str) -> bool:
        return f"{_DSML} " in template


class Step3(TaggedFormat):
    syntaxes = (
        TagSyntax(
            starts=("<｜tool_call_begin｜>", "<｜tool_call_begin>｜>"),
            ends=("<｜tool_call_end｜>",),
            wraps=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
            prelude="function<｜tool_sep｜>",
            call=Tag("<steptml:invoke name=", ">", _NAMED, _NEVER),
            call_end="</steptml:invoke>",
            parameter=Tag("<steptml:parameter name=", ">", _NAMED, _NEVER),
            parameter_end="</steptml:parameter>",
            unended="anywhere",
            tokens=("<｜tool_sep｜>",),
            layout=TagLayout(
                block="function<｜tool_sep｜>",
                call='<steptml:invoke name="{name}">',
                parameter='<steptml:parameter name="{name}">',
                value_end="</steptml:parameter>",
                call_end="</steptml:invoke>",
                block_end="",
                between="\n",
            ),
        ),
    )

    def detect(self, template: str) -> bool:
        return "<steptml:invoke" in template
