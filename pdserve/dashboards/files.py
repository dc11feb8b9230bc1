"""Writes files that people may edit: one that was edited, or is of another origin, stays.

A file carries the checksum of its text.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["MARK", "make_folder", "sealed", "untouched", "write_all"]

_UNSEALED: Final = "0" * 16
MARK: Final = f"Made by `pdserve dashboards`, checksum {_UNSEALED}"
"""What a file says of itself; `sealed` puts the checksum in."""
_SEAL: Final = re.compile(r"(?<=Made by `pdserve dashboards`, checksum )[0-9a-f]{16}")


def sealed(text: str) -> str:
    """The text, with its checksum where `MARK` is. Raises `ValueError` without a mark."""
    if MARK not in text:
        raise ValueError("a text to seal needs the mark")
    return text.replace(_UNSEALED, _checksum(text), 1)


def untouched(text: str) -> bool:
    """Whether this is a text of `sealed`, without a change."""
    found = _SEAL.search(text)
    return found is not None and found[0] == _checksum(_SEAL.sub(_UNSEALED, text, count=1))


def write_all(texts: Mapping[Path, str]) -> None:
    """Writes all files, or none if one of them is not ours. Errors: `ConfigError`."""
    try:
        for path in texts:
            _check(path)
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # A reader such as Grafana sees the old file or the new one.
            fresh = path.with_name(f".{path.name}.new")
            # Never through a link that somebody else may have put there.
            fresh.unlink(missing_ok=True)
            with fresh.open("x", encoding="utf-8") as file:
                file.write(text)
            os.replace(fresh, path)
    except OSError as error:
        raise _not_written(error) from None


def make_folder(path: Path) -> None:
    """Makes a folder if it is missing. Errors: `ConfigError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(error) from None


def _not_written(error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(f"{error.filename} cannot be written: {reason}")


def _check(path: Path) -> None:
    if path.exists() and not path.is_file():
        # Reading a pipe would have no end.
        raise ConfigError(f"{path} cannot be written: it is no file. Choose another --out")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except UnicodeDecodeError:
        text = ""
    if not untouched(text):
        raise ConfigError(
            f"{path} was edited or is not from `pdserve dashboards`: it stays as it is, and "
            "nothing was written. Move it away, or choose another --out"
        )


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
