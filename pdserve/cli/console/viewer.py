"""What `pdserve top` shows and how keys change it: selection, order, filter, help. Pure.

`press` takes a key, `screen` returns the lines of a terminal of a size. It knows no terminal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from pdserve.cli.console.head import degraded_lines, head_lines
from pdserve.cli.console.layout import Table, cut, laid_out, text_width
from pdserve.cli.console.overview import Overview
from pdserve.cli.outputs import printable

__all__ = ["ScreenLine", "View", "Viewer"]

Style = Literal["", "title", "head", "selected", "warning", "bottom"]

_HELP: Final = """\
up, down, j, k       another row
PageUp, PageDown     a screen further; also space
Home, End, g, G      the first, the last row
/                    show only rows with a text; Esc: all again
s, 1 to 9            order the row's table by the next column,
                     by this one; again: the other way round
w                    rates over 10 s or over 60 s
?                    this help, and back
q, Ctrl-C            end"""
_PINNED: Final = 9
"""Least lines for tables below a head that stays in its place."""
_NUMBER: Final = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
_UNITS: Final = {
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
    "s": 1.0,
    "ms": 1e-3,
}
_AGE: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


class ScreenLine(NamedTuple):
    """One line of the screen."""

    text: str
    style: Style = ""


@dataclass(slots=True)
class View:
    """One look at what is watched."""

    overview: Overview = field(default_factory=Overview)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines that call for attention, besides what is degraded."""


class _Row(NamedTuple):
    key: tuple[str, ...]
    """Table and name: the same row in the next look."""
    table: Table


class Viewer:
    """The state of the display."""

    def __init__(self) -> None:
        self.view = View()
        self.minute = False
        """True: rates over 60 s."""
        self.trouble = ""
        """Why the last look has failed; empty: it has not."""
        self._first = 0
        """First line of the body that is visible."""
        self._selected: tuple[str, ...] | None = None
        self._order: dict[str, tuple[str, bool]] = {}
        """Table name to its column, and whether the largest is first."""
        self._filter = ""
        self._typing = False
        self._help = False
        self._page = 10
        self._rows: list[_Row] = []
        self._columns: dict[str, tuple[str, ...]] = {}

    # ------------------------------------------------------------------ keys

    def press(self, key: str) -> bool:
        """Handles a key; False: it is to end."""
        if self._typing:
            self._type(key)
        elif key in ("q", "Q"):
            return False
        elif key == "?":
            self._help = not self._help
        elif self._help:
            self._help = False
        elif key == "/":
            self._typing, self._filter = True, ""
        elif key == "\x1b":
            self._filter = ""
        elif key == "w":
            self.minute = not self.minute
        elif key == "s" or (key.isdecimal() and key.isascii() and key != "0"):
            self._sort(key)
        else:
            self._move(key)
        return True

    def _type(self, key: str) -> None:
        if key in ("\r", "\n"):
            self._typing = False
        elif key == "\x1b":
            self._typing, self._filter = False, ""
        elif key in ("\x7f", "\b"):
            self._filter = self._filter[:-1]
        elif key.isprintable() and len(self._filter) < 60:
            self._filter += key

    def _move(self, key: str) -> None:
        steps = {
            **dict.fromkeys(("up", "k"), -1),
            **dict.fromkeys(("down", "j", "\r", "\n"), 1),
            **dict.fromkeys(("pageup", "b"), -self._page),
            **dict.fromkeys(("pagedown", " "), self._page),
            **dict.fromkeys(("home", "g"), -(10**6)),
            **dict.fromkeys(("end", "G"), 10**6),
        }
        if key not in steps:
            return
        here = self._index()
        if here <= 0 and steps[key] < 0:
            # Above the first row there is only what cannot be selected.
            self._selected, self._first = None, 0
        elif self._rows:
            there = min(max(here + steps[key], 0), len(self._rows) - 1)
            self._selected = self._rows[there].key
            if there == 0:
                # What stands above the first row is seen again.
                self._first = 0

    def _index(self) -> int:
        """The selected row; -1: none is."""
        keys = [row.key for row in self._rows]
        return keys.index(self._selected) if self._selected in keys else -1

    def _sort(self, key: str) -> None:
        """Orders the table of the selected row, or the first one."""
        if not self._rows:
            return
        table = self._rows[max(0, self._index())].table
        columns = self._columns.get(table.name, table.heads)
        now, largest = self._order.get(table.name, ("", False))
        if key == "s":
            after = columns.index(now) + 1 if now in columns else 0
            if after == len(columns):
                self._order.pop(table.name, None)
                return
            column = columns[after]
        elif int(key) <= len(columns):
            column = columns[int(key) - 1]
        else:
            return
        # Numbers are first wanted by the largest, names by the alphabet.
        numbers = all(_value(row[table.heads.index(column)])[0] == 0 for row in table.rows)
        self._order[table.name] = (column, not largest if column == now else numbers)

    # ------------------------------------------------------------------ screen

    def screen(self, columns: int, lines: int) -> list[ScreenLine]:
        """Exactly `lines` lines of at most `columns` columns."""
        width, room = max(10, columns), max(1, lines - 1)
        head = [
            ScreenLine(text, "" if number else "title")
            for number, text in enumerate(head_lines(self.view.overview, width))
        ]
        warnings = [f"({self.trouble}; this is the last answer)"] if self.trouble else []
        warnings += [*degraded_lines(self.view.overview, width), *self.view.notes]
        attention = [ScreenLine(text, "warning") for text in warnings]
        body, places = self._body(width)
        if self._help:
            shown = [ScreenLine(line) for line in _HELP.split("\n")][:room]
        elif len(head) + _PINNED <= room:
            below = room - len(head)
            shown = [*head, *self._visible([*attention, *body], places, len(attention), below)]
        else:
            above = [*head, *attention]
            shown = self._visible([*above, *body], places, len(above), room)
        padding = [ScreenLine("")] * (room - len(shown))
        bottom = ScreenLine(self._bottom(width), "bottom")
        whole = [*shown, *padding, bottom] if lines > 1 else [bottom]
        # Errors and notes quote what others have sent.
        return [
            ScreenLine(cut(printable(line.text), columns), line.style) for line in whole[:lines]
        ]

    def _body(self, width: int) -> tuple[list[ScreenLine], list[tuple[int, int]]]:
        """The tables, and the first and last line of each row."""
        body: list[ScreenLine] = []
        places: list[tuple[int, int]] = []
        self._rows, self._columns = [], {}
        for table in self.view.tables:
            kept = self._ordered(self._filtered(table))
            if not kept.rows:
                continue
            column, largest = self._order.get(table.name, ("", False))
            laid = laid_out(kept, width, {column: "v" if largest else "^"} if column else {})
            self._columns[table.name] = laid.columns
            body += [ScreenLine(""), ScreenLine(laid.head, "head")]
            for row, texts in zip(kept.rows, laid.rows, strict=True):
                places.append((len(body), len(body) + len(texts) - 1))
                self._rows.append(_Row((table.name, *row[:2]), kept))
                body += [ScreenLine(text) for text in texts]
        selected = self._index()
        if selected >= 0:
            first, last = places[selected]
            for at in range(first, last + 1):
                text = body[at].text
                body[at] = ScreenLine(text + " " * (width - text_width(text)), "selected")
        return body, places

    def _filtered(self, table: Table) -> Table:
        wanted = self._filter.lower()
        rows = [row for row in table.rows if any(wanted in cell.lower() for cell in row)]
        return Table(table.heads, rows, table.optional, table.below)

    def _ordered(self, table: Table) -> Table:
        column, largest = self._order.get(table.name, ("", False))
        if column not in table.heads:
            return table
        index = table.heads.index(column)
        rows = sorted(table.rows, key=lambda row: _value(row[index]), reverse=largest)
        return Table(table.heads, rows, table.optional, table.below)

    def _visible(
        self, whole: list[ScreenLine], places: list[tuple[int, int]], above: int, room: int
    ) -> list[ScreenLine]:
        """The lines on the screen: the selected row is among them."""
        self._page = max(1, room - 3)
        selected = self._index()
        if selected >= 0:
            first, last = places[selected]
            last += above
            # The heading of the first row of a table is seen with it.
            first += above - (2 if selected == 0 else 1)
            if selected == 0 and self._first == 0 and last < room:
                first = 0
            self._first = max(last - room + 1, min(self._first, first))
        self._first = min(max(0, self._first), max(0, len(whole) - room))
        return whole[self._first : self._first + room]

    def _bottom(self, width: int) -> str:
        if self._typing:
            return cut(f"/{self._filter}_   Enter keeps it, Esc ends it", width)
        words = "q quit  ? help  / filter  s sort  w 10/60 s"
        if self._filter:
            words = f"q quit  Esc all rows, now those with {self._filter!r}"
        here = f"{self._index() + 1}/{len(self._rows)}" if self._rows else ""
        room = width - len(here)
        return cut(words, room - 1).ljust(room) + here


def _value(cell: str) -> tuple[int, float, str]:
    """What a cell is ordered by: numbers before other text, with their units."""
    text = cell.strip()
    match = _NUMBER.match(text)
    if match is None:
        # Empty ones and `-` count as nothing.
        return (0, -1.0, "") if text in ("", "-") else (1, 0.0, text.lower())
    age = _AGE.fullmatch(text)
    if age is not None and text:
        days, hours, minutes, seconds = (int(part or 0) for part in age.groups())
        return (0, days * 86400.0 + hours * 3600 + minutes * 60 + seconds, "")
    rest = text[match.end() :].strip()
    if rest and rest not in ("%", "/s", "B", *_UNITS):
        return (1, 0.0, text.lower())
    return (0, float(match[0].replace(",", "")) * _UNITS.get(rest, 1.0), "")
