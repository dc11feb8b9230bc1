"""Opens files with one request per line; an error names the bad line, its cause and remedy."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.toml import readable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve.ids import Seconds

__all__ = ["YEAR", "bad_line", "check_span", "read_lines"]

_MOST = 4 << 20
"""Bytes of one line; the longest prompts of the known traces take a few kilobytes."""
YEAR: Final[Seconds] = 366 * 86400.0
"""Longest time from a trace's first arrival to its last: a longer replay would not end."""
_UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_lines(path: Path, what: str = "the trace") -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line), without empty lines and a byte order mark. `what` names the
    file in errors.

    Errors: `ConfigError`.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST), b""), 1):
                if len(line) == _MOST:
                    raise bad_line(path, number, f"is longer than {_MOST} bytes: is this a trace?")
                if number == 1:
                    if line.startswith(_UTF_16):
                        raise bad_line(path, number, "is UTF-16: save the file as UTF-8")
                    line = line.removeprefix(codecs.BOM_UTF8)
                line = line.strip()
                if line:
                    yield number, line
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{what} {path} cannot be read: {reason}") from None


def check_span(path: Path, number: int, at: Seconds, unit: str) -> None:
    """Refuse an arrival at `at` seconds after the first if that is so late that times must be in
    another unit than `unit`: a replay would not end. Raises `ConfigError`."""
    if at > YEAR:
        what = f"arrives {at / YEAR:.3g} years after the first: times must be in {unit}"
        raise bad_line(path, number, what)


def bad_line(path: Path, number: int, what: str) -> ConfigError:
    """An error that names the file and the line."""
    return ConfigError(f"{path}, line {number}: {readable(what, 500)}")
