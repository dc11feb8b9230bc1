"""Azure's traces (CSV): moments and lengths, no prompts. No two requests share a prefix."""

from __future__ import annotations

import csv
from datetime import datetime
from typing import TYPE_CHECKING, Final

from pdserve.sim.traces.base import TraceRequest
from pdserve.sim.traces.lines import bad_line, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["COLUMNS", "AzureTrace"]

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureTrace:
    """The requests of a file, read anew by each iteration."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[TraceRequest]:
        """Raises `ConfigError` at the first bad line."""
        lines = read_lines(self._path)
        first, header = next(lines, (1, b""))
        names = tuple(name.strip() for name in header.decode("utf-8-sig", "replace").split(","))
        if names != COLUMNS:
            what = f"the columns are {', '.join(names)}; expected {', '.join(COLUMNS)}"
            raise bad_line(self._path, first, what)
        begin: datetime | None = None
        for count, (number, text) in enumerate(lines):
            try:
                moment, prompt, output = _parse(text)
            except (ValueError, csv.Error) as error:
                what = f"{error}; expected a moment and two positive lengths"
                raise bad_line(self._path, number, what) from None
            begin = begin or moment
            at = (moment - begin).total_seconds()
            if at < 0:
                raise bad_line(self._path, number, "is earlier than the first: sort the file")
            yield TraceRequest(count, at, ((count, prompt),), max(1, output))


def _parse(text: bytes) -> tuple[datetime, int, int]:
    fields = next(csv.reader([text.decode("utf-8", "replace")]))
    if len(fields) != len(COLUMNS):
        raise ValueError(f"{len(fields)} fields")
    # Seven digits of a second, one more than a datetime holds.
    whole, _, fraction = fields[0].strip().partition(".")
    moment = datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}")
    prompt, output = int(fields[1]), int(fields[2])
    if prompt < 1 or output < 0:
        raise ValueError(f"lengths {prompt} and {output}")
    return moment, prompt, output
