"""Parses calls of MiniMax M3: elements in elements, and a mark before each tag.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="NAME">]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>
    ]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

Without the mark, text is never a tag, so values need no escapes. An argument that can only be a
string is output as it comes. Others are output when the next one begins, since an argument that
is written repeatedly is a list.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.tagged_calls.element_grammar import ElementGrammar
from pdserve.text.tool_parsers.tagged_calls.element_values import Element, ElementValues
from pdserve.text.tool_parsers.tagged_calls.tag_reader import TaggedFormat, TagReader
from pdserve.text.tool_parsers.tagged_calls.tag_syntax import (
    ATTRIBUTE_VALUE,
    LONGEST_HEAD,
    Tag,
    TagLayout,
    TagSyntax,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.output_parts import OutputParser
    from pdserve.text.tool_parsers.base import ToolChoiceMode

__all__ = ["MiniMaxM3"]

MARK: Final = "]<]minimax[>["
INVOKE: Final = f"{MARK}<invoke name="
_DEEPEST: Final = 64
"""Most elements in each other; a tag that lies deeper is text."""
_NONE: Final = re.compile(r"(?!)")
_SYNTAX: Final = TagSyntax(
    starts=(f"{MARK}<tool_call>",),
    ends=(f"{MARK}</tool_call>",),
    call=Tag(INVOKE, ">", re.compile(ATTRIBUTE_VALUE), r"[<\r\n]"),
    call_end=f"{MARK}</invoke>",
    parameter=Tag(f"{MARK}<", ">", _NONE, r"(?!)"),
    parameter_end=f"{MARK}</",
    tokens=(MARK,),
    leads=(MARK,),
    json=False,
    layout=TagLayout(
        block="\n",
        call=f'{INVOKE}"{{name}}">',
        parameter=f"{MARK}<{{name}}>",
        value_end="",
        call_end=f"{MARK}</invoke>",
        block_end="\n",
        between="\n",
        between_calls="\n",
    ),
)


class MiniMaxM3(TaggedFormat):
    syntaxes = (_SYNTAX,)

    def detect(self, template: str) -> bool:
        return MARK in template and "<invoke" in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return ElementReader((_SYNTAX,), tools)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        return ElementGrammar(_SYNTAX, MARK, tools, choice, parallel, special).text()


class ElementReader(TagReader):
    __slots__ = ("_done", "_open", "_values")

    def __init__(self, syntaxes: Sequence[TagSyntax], tools: Sequence[Tool]) -> None:
        super().__init__(syntaxes, tools)
        self._values = ElementValues(None)
        self._open: list[Element] = []
        """The argument that is read, and the elements in it that have not ended."""
        self._done: list[Element] = []
        """Complete elements of one argument, which may go on."""

    def _begins(self) -> bool:
        self._values = ElementValues(self._known.get(self._name))
        self._done.clear()
        return super()._begins()

    def _tag(self) -> str | None:
        """The inside of the tag behind the mark at `at`; empty if there is none; None: not yet."""
        begin = self.at + len(MARK)
        text = self.text
        if begin < len(text) and text[begin] != "<":
            return ""
        end = text.find(">", begin, begin + LONGEST_HEAD)
        if end < 0:
            return None if len(text) < begin + LONGEST_HEAD and not self.last else ""
        return text[begin + 1 : end]

    def _between(self) -> bool:
        if not self.skip_blank():
            return self.last and self._close(cut_short=True)
        marker = self.meets((MARK,))
        if marker is None:
            return False
        if not marker:
            if self.ends_in_half((MARK,)):
                self.at = len(self.text)
                return self._close(cut_short=True)
            self._junk.append(self.text[self.at])
            self.at += 1
            return self.turn(self._words)
        tag = self._tag()
        if tag is None:
            return False
        if not tag and self.last and self.text.find(">", self.at + len(MARK)) < 0:
            self.at = len(self.text)
            return self._close(cut_short=True)
        return self._tag_between(tag)

    def _tag_between(self, tag: str) -> bool:
        if tag == "/invoke" or _ends_call(tag):
            self.at += len(MARK) + len("</invoke>") if tag == "/invoke" else 0
            return self._close()
        self.at += len(MARK)
        if not tag or tag.startswith("/"):
            self.at += len(tag) + 2 if tag else 0
            return True
        self.at += len(tag) + 2
        if self._done and self._done[0].name != tag:
            self._show()
        if not self._done and self._values.is_text(tag):
            self._key(tag)
            self.argue('"')
            self._open = [Element(tag)]
            return self.turn(self._string)
        self._open = [Element(tag)]
        return self.turn(self._inside)

    def _words(self) -> bool:
        end = self.text.find(MARK[0], self.at)
        stop = len(self.text) if end < 0 else end
        self._junk.append(self.text[self.at : stop])
        self.at = stop
        return (end >= 0 or self.last) and self.turn(self._between)

    def _key(self, name: str) -> None:
        before = ", " if self._parameters else "{"
        self.argue(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        self._parameters += 1

    def _show(self) -> None:
        """Output the argument that is complete."""
        if self._done:
            self._key(self._done[0].name)
            self.argue(self._values.argument(self._done))
            self._done.clear()

    def _close(self, *, cut_short: bool = False) -> bool:
        self._show()
        return super()._close(cut_short=cut_short)

    def _next_tag(self) -> str | None:
        """Pass text on up to the next tag, and return its inside; None: there is none yet."""
        while True:
            begin = self.at
            found = self.text.find(MARK[0], begin)
            self.at = len(self.text) if found < 0 else found
            self._text(self.text[begin : self.at])
            if found < 0:
                return None
            marker = self.meets((MARK,))
            if marker is None:
                return None
            if marker:
                tag = self._tag()
                if tag != "":
                    return tag
                # A mark that is not before a tag is dropped.
                self.at += len(MARK)
                continue
            self._text(MARK[0])
            self.at += 1

    def _text(self, text: str) -> None:
        if not text:
            return
        if self.state == self._string:
            self.argue(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._open[-1].texts.append(text)

    def _string(self) -> bool:
        tag = self._next_tag()
        if tag is None:
            return self.last and self.turn(self._over)
        if tag == f"/{self._open[0].name}" or tag == "/invoke" or _ends_call(tag):
            self.argue('"')
            self.at += len(MARK) + len(tag) + 2 if tag == f"/{self._open[0].name}" else 0
            return self.turn(self._between)
        # A string has no elements: this is text.
        self.at += len(MARK)
        self._text(f"<{tag}>")
        self.at += len(tag) + 2
        return True

    def _inside(self) -> bool:
        tag = self._next_tag()
        if tag is None:
            return self.last and self.turn(self._over)
        if tag == "/invoke" or _ends_call(tag):
            self._end(0)
            return self.turn(self._between)
        self.at += len(MARK) + len(tag) + 2
        if not tag.startswith("/"):
            self._begin_element(tag)
            return True
        names = [each.name for each in self._open]
        if tag[1:] in names:
            self._end(len(names) - 1 - names[::-1].index(tag[1:]))
        return bool(self._open) or self.turn(self._between)

    def _begin_element(self, name: str) -> None:
        if len(self._open) == _DEEPEST:
            self._open[-1].texts.append(f"<{name}>")
            return
        inner = Element(name)
        self._open[-1].children.append(inner)
        self._open.append(inner)

    def _end(self, place: int) -> None:
        """End the element at `place` and those in it."""
        if not place:
            self._done.append(self._open[0])
        del self._open[place:]


def _ends_call(tag: str) -> bool:
    return tag in ("tool_call", "/tool_call") or tag.startswith("invoke name=")
