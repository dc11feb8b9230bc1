"""Prints command output: safe terminal text, requested files, aligned columns."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["check_writable", "columns", "printable", "write"]

_ORDER: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that override the direction of text. Marks of single letters are not among them."""


def check_writable(paths: Iterable[Path]) -> None:
    """Checks, before the work begins, that the files can be written. Errors: `ConfigError`."""
    for path in paths:
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
        if path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder: name a file")


def write(path: Path, text: str) -> None:
    """Writes a file. Errors: `ConfigError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path} cannot be written: {reason}") from None


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, with aligned columns: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def printable(text: str) -> str:
    """`text` without control characters, because a model's output must not control the terminal,
    nor change the order of what stands beside it. Halves of surrogate pairs go, too: they cannot
    be written."""
    return "".join(
        one
        for one in text
        if one in "\n\t" or (unicodedata.category(one) not in ("Cc", "Cs") and one not in _ORDER)
    )
