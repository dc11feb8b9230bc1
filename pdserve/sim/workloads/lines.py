"""Opens files with one request per line; an error names the bad line, its cause and remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.toml import readable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["bad_line", "read_lines"]

_MOST = 4 << 20
"""Bytes of one line; the longest prompts of the known traces take a few kilobytes."""


def read_lines(path: Path, what: str = "the trace") -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line), without empty lines. `what` names the file in errors.

    Errors: `ConfigError`.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST), b""), 1):
                if len(line) == _MOST:
                    raise bad_line(path, number, f"is longer than {_MOST} bytes: is this a trace?")
                line = line.strip()
                if line:
                    yield number, line
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{what} {path} cannot be read: {reason}") from None


def bad_line(path: Path, number: int, what: str) -> ConfigError:
    """An error that names the file and the line."""
    return ConfigError(f"{path}, line {number}: {readable(what, 500)}")
