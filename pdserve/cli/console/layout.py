"""Lays tables out for a width: what is least important is left out first. Pure."""

from __future__ import annotations

import textwrap
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.cli.outputs import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Laid", "Table", "cut", "laid_out", "lines_of", "text_width"]

_GAP: Final = 2
_LEAST_NAME: Final = 12
"""Columns of a name that are kept when a line is still too long."""
_INDENT: Final = "    "


@dataclass(frozen=True, slots=True)
class Table:
    """A table; its first cells name the rows."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    optional: tuple[str, ...] = ()
    """Headings of columns that may be left out, the least important first."""
    below: str = ""
    """Heading of the column whose text goes below a row that is too long for it."""

    @property
    def name(self) -> str:
        """What it is about; two tables may begin with the same heading."""
        return " ".join(self.heads[:2])


class Laid(NamedTuple):
    """A table in lines of a width."""

    columns: tuple[str, ...]
    """The headings that are shown."""
    head: str
    rows: list[list[str]]
    """The lines of each row."""


def laid_out(table: Table, width: int, marks: dict[str, str] | None = None) -> Laid:
    """The table in lines of at most `width` columns. Args: `marks` are appended to headings."""
    marks = marks or {}
    heads = [_clean(head) + marks.get(head, "") for head in table.heads]
    cells = [[_clean(cell) for cell in row] for row in table.rows]
    shown = [
        index for index, _ in enumerate(heads) if index == 0 or any(row[index] for row in cells)
    ]
    widths = [max(map(text_width, column)) for column in zip(heads, *cells, strict=True)]
    below: int | None = None
    dropped = [table.heads.index(head) for head in table.optional if head in table.heads]
    while _total(shown, widths) > width:
        noted = table.heads.index(table.below) if table.below in table.heads else None
        if below is None and noted in shown:
            below = noted
            shown.remove(noted)
            continue
        unwanted = next((index for index in dropped if index in shown), None)
        if unwanted is None:
            break
        shown.remove(unwanted)
    widths[0] -= max(0, min(widths[0] - _LEAST_NAME, _total(shown, widths) - width))
    rows = [
        [_line(row, shown, widths, width), *([] if below is None else _below(row[below], width))]
        for row in cells
    ]
    columns = tuple(table.heads[index] for index in shown)
    return Laid(columns, _line(heads, shown, widths, width), rows)


def _total(shown: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[index] for index in shown) + _GAP * (len(shown) - 1)


def _line(row: Sequence[str], shown: Sequence[int], widths: Sequence[int], width: int) -> str:
    cells = [_padded(cut(row[index], widths[index]), widths[index]) for index in shown]
    return cut((" " * _GAP).join(cells).rstrip(), width)


def _below(text: str, width: int) -> list[str]:
    room = max(16, width)
    if text in ("", "-"):
        return []
    return textwrap.wrap(text, room, initial_indent=_INDENT, subsequent_indent=_INDENT)


def lines_of(table: Table, width: int) -> list[str]:
    """The table as text; empty without rows."""
    if not table.rows:
        return []
    laid = laid_out(table, width)
    return [laid.head, *(line for row in laid.rows for line in row)]


def cut(text: str, width: int) -> str:
    """Text of at most `width` columns; the end of a name is kept, since names begin alike."""
    if text_width(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    kept = text
    tail = "" if " " in text else text[-min(6, max(0, width // 2 - 1)) :] if width > 3 else ""
    while kept and text_width(kept) + 1 + text_width(tail) > width:
        kept = kept[:-1]
    return f"{kept}…{tail}"


def text_width(text: str) -> int:
    """Columns that a terminal takes for text without control characters."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF")
        for one in text
    )


def _padded(text: str, width: int) -> str:
    return text + " " * (width - text_width(text))


def _clean(text: str) -> str:
    return " ".join(printable(text).split())
