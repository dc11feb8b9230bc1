"""Reads JSON files of a checkpoint, and typed keys of `config.json`.

A refusal names the file, or the key and the type.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    from pathlib import Path

Json = dict[str, Any]

_SHOWN: Final = 40
"""Most characters of a value in an error."""


def read_json(path: Path) -> Any:
    """The value in a file. Raises `UnsupportedCheckpoint`, which names the file."""
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise UnsupportedCheckpoint(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UnsupportedCheckpoint(f"{path}: {error}") from error


def parse_json(text: bytes) -> Any:
    """The value. Raises ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def positive(raw: Json, key: str, default: int | None = None, most: int | None = None) -> int:
    """`most`: the largest value that is read, for numbers of things that are listed one by one."""
    value = raw.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise _refusal(key, "a positive integer", value)
    if most is not None and value > most:
        raise _refusal(key, f"at most {most}", value)
    return value


def number(raw: Json, key: str, default: float | None = None) -> float:
    """A finite number: JSON as Python writes it may hold NaN and Infinity."""
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(key, "a number", value)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise _refusal(key, "a finite number", value)
    return found


def above_zero(raw: Json, key: str, default: float | None = None) -> float:
    """A finite number that is larger than zero."""
    value = number(raw, key, default)
    if value <= 0:
        raise _refusal(key, "larger than zero", value)
    return value


def section(raw: Json, key: str) -> Json:
    """The object under `key`; without one an empty object."""
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise _refusal(key, "an object", value)
    return value or {}


def flag(raw: Json, key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise _refusal(key, "true or false", value)
    return bool(value)


def _refusal(key: str, wanted: str, value: Any) -> UnsupportedCheckpoint:
    try:
        shown = repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        shown = "too long to show"
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}…"
    return UnsupportedCheckpoint(f"config.json: {key} must be {wanted}, is {shown}")
