"""Reads a TOML file that a person wrote; errors name the file and the line. Pure."""

from __future__ import annotations

import tomllib
from typing import Any

from pdserve.errors import ConfigError

__all__ = ["read_toml", "readable"]


def read_toml(data: bytes, source: str) -> dict[str, Any]:
    """Parses a TOML text. Args: `source` names the file in errors. Errors: `ConfigError`."""
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{source}, line {line}: not UTF-8: save it as text in that encoding"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {readable(str(error))}") from None
    except ValueError:  # what else the parser's conversions raise: integers of thousands of digits
        raise ConfigError(f"{source}: not valid TOML: a number is too long") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid TOML: it is nested too deeply") from None


def readable(text: str, most: int = 200) -> str:
    """A file's text as shown in an error: printable and shortened."""
    shown = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text[:most])
    return shown if len(text) <= most else f"{shown}…"
