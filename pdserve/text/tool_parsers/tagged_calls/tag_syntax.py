"""Describes how a model family writes calls whose arguments stand between tags.

A call looks like this; parts in brackets exist only in some families:

    [WRAP] START CALL-TAG PARAMETER-TAG value PARAMETER-END … [CALL-END] END [WRAP-END]

`tag_reader.py` reads it, `tag_grammar.py` enforces it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

__all__ = ["ATTRIBUTE_VALUE", "LONGEST_HEAD", "Tag", "TagLayout", "TagSyntax"]

LONGEST_HEAD: Final = 256
"""Most characters between the beginning and the end of a tag."""
ATTRIBUTE_VALUE: Final = r"""\s*(?:"(?P<name>[^"]+)"|'(?P<single>[^']+)'|(?P<bare>[^\s"'>]+))\s*"""
"""Pattern of a name that is an attribute's value, in quotes or without."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag that contains a name, such as `<parameter=NAME>`."""

    begin: str
    end: str
    """Text that ends the tag. If it is empty, the tag ends before a line break or a `<`."""
    head: re.Pattern[str]
    """What stands between; its groups `name`, `single` or `bare` are the name. A group `string`
    says whether the value is a string."""
    never: str
    """Pattern of what is never inside of the tag."""

    def stop(self) -> re.Pattern[str]:
        """Pattern of the first place that shows whether there is a tag: group `end`, or not."""
        end = re.escape(self.end) if self.end else r"(?=[\r\n<])"
        return re.compile(f"(?P<end>{end})|{self.never}")


@dataclass(frozen=True, slots=True)
class TagLayout:
    """The text of a call as the family's templates show it, for the grammar."""

    block: str
    """What follows the start marker."""
    call: str
    """What begins a call, with `{name}`."""
    parameter: str
    """What stands before a value, with `{name}`, and `{string}` if the tag tells the type."""
    value_end: str
    call_end: str
    block_end: str
    """What stands before the end marker."""
    between: str = ""
    """What stands between two blocks."""
    between_calls: str | None = None
    """What stands between two calls of one block; None: a block has one call."""


@dataclass(frozen=True, kw_only=True)
class TagSyntax:
    """The tags of one family."""

    starts: tuple[str, ...]
    """Markers that begin a block; the first is the usual one."""
    ends: tuple[str, ...]
    """Markers that end a block."""
    wraps: tuple[str, ...] = ()
    """Markers around all blocks. The first begins and the second ends them; they are dropped."""
    prelude: str = ""
    """Text that may stand between a start and the call's tag."""
    call: Tag
    """The tag that names the function. If it begins with nothing, the name follows the start."""
    separator: str = ""
    """Marker that may follow the name."""
    call_end: str = ""
    """The tag that ends a call; empty if the end of the block does."""
    parameter: Tag
    parameter_end: str
    sure: bool = False
    """A parameter's end ends a string wherever it stands; else only if markup follows it."""
    lines: bool = False
    """One line break at each end of a value is layout."""
    unended: Literal["", "line", "anywhere"] = ""
    """Where the next parameter's tag ends a value whose end is missing."""
    wrappers: tuple[str, ...] = ()
    """Names of a parameter in which all arguments may stand as one object, by mistake."""
    quotes: tuple[str, ...] = ()
    """What a value may begin and end with, so that all between is text."""
    json: bool = True
    """A block may contain a JSON object instead."""
    tokens: tuple[str, ...] = ()
    """Further texts that the family's tokenizer has as tokens of their own."""
    leads: tuple[str, ...] = ()
    """What all of the family's tags begin with, if that is never text."""
    layout: TagLayout

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """All text that is never shown, the most important first."""
        outer = (*self.wraps[:1], *self.starts, *self.ends, *self.wraps[1:])
        return tuple(each for each in (*outer, self.separator, *self.tokens) if each)

    @cached_property
    def openers(self) -> tuple[str, ...]:
        """The text with which a tag of a call begins, if there is any."""
        return (self.call.begin,) if self.call.begin else ()

    @cached_property
    def call_ends(self) -> tuple[str, ...]:
        """What ends a call."""
        return (self.call_end,) if self.call_end else self.ends

    @cached_property
    def borders(self) -> tuple[str, ...]:
        """Markup that may stand in a call where a parameter may begin."""
        closing = (self.call_end,) if self.call_end else ()
        every = (self.parameter.begin, *closing, *self.ends, *self.starts, *self.openers)
        return (*every, *self.wraps)

    @cached_property
    def confirming(self) -> tuple[str, ...]:
        """Markup that must follow the end of a call, for it to end a value that has no end."""
        if not self.call_end:
            return (*self.starts, *self.wraps[1:])
        return (*self.ends, *(self.openers if self.layout.between_calls is not None else ()))

    @cached_property
    def value_ends(self) -> tuple[str, ...]:
        """What may end a value."""
        return (self.parameter_end, *self.call_ends)

    @cached_property
    def call_stop(self) -> re.Pattern[str]:
        return self.call.stop()

    @cached_property
    def parameter_stop(self) -> re.Pattern[str]:
        return self.parameter.stop()
