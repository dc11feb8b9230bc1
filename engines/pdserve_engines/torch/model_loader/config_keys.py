"""Reads typed keys of `config.json`; a refusal names the key and the type."""

from __future__ import annotations

from typing import Any

from pdserve.errors import UnsupportedCheckpoint

Json = dict[str, Any]


def positive(raw: Json, key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise UnsupportedCheckpoint(f"config.json: {key} must be a positive integer, is {value!r}")
    return value


def number(raw: Json, key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedCheckpoint(f"config.json: {key} must be a number, is {value!r}")
    return float(value)


def flag(raw: Json, key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedCheckpoint(f"config.json: {key} must be true or false, is {value!r}")
    return bool(value)
