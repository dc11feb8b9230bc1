"""Parses and prints values with units: sizes, durations, switches, names and lists.

Each parser takes text and returns the value, or raises `ValueError` with the error and the expected
form; the caller adds the key. Each parser has a matching printer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pdserve.limits.sizes import approximate_size as approximate_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import Bytes, Seconds

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES = {name.lower(): factor for name, factor in (_BINARY | _DECIMAL).items()}
_DURATIONS = {"us": 1e-6, "ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z%]*)")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def parse_size(text: str) -> Bytes:
    """`4GiB`, `512MiB`, `2GB`, or a plain number of bytes."""
    number, unit = _quantity(text, "a size such as 4GiB or 512MiB")
    if unit.lower() in ("", "b"):
        return _whole(number, text)
    if unit.lower() in ("k", "m", "g", "t"):
        letter = unit.upper()
        raise ValueError(
            f"{text!r} is ambiguous: write {number:g}{letter}iB or {number:g}{letter}B"
        )
    factor = _SIZES.get(unit.lower())
    if factor is None:
        raise ValueError(f"unknown unit {unit!r} in {text!r}: use {', '.join(_BINARY)}")
    return round(number * factor)


def format_size(size: Bytes) -> str:
    """The shortest binary form without loss: `4GiB`, `1536MiB`, `1000`."""
    for unit, factor in reversed(_BINARY.items()):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def parse_duration(text: str) -> Seconds:
    """`30s`, `500ms`, `5min`, `1h`, or a plain number of seconds."""
    number, unit = _quantity(text, "a duration such as 30s or 500ms")
    factor = _DURATIONS.get(unit.lower()) if unit else 1.0
    if factor is None:
        raise ValueError(f"unknown unit {unit!r} in {text!r}: use {', '.join(_DURATIONS)}")
    return number * factor


def format_duration(seconds: Seconds) -> str:
    """`30s`, `500ms`, `5min`."""
    if seconds and seconds < 1:
        return f"{seconds * 1000:g}ms"
    for unit, factor in (("h", 3600), ("min", 60)):
        if seconds and seconds % factor == 0:
            return f"{seconds / factor:g}{unit}"
    return f"{seconds:g}s"


def parse_limit(text: str, unit: str = "") -> tuple[Seconds, float | None]:
    """`500ms`, or `500ms@p95` with the share of the requests that must keep the limit.

    `unit` is that of a number alone, which is refused without. Errors: `ValueError`.
    """
    time, at, percentile = (one.strip() for one in text.partition("@"))
    if time.replace(".", "", 1).isdigit():
        if not unit:
            raise ValueError(f"{time!r} has no unit: write {time}ms or {time}s")
        time += unit
    seconds = parse_duration(time)
    if not seconds > 0:
        raise ValueError(f"{text!r} must be more than 0")
    return seconds, _percentile(percentile) if at else None


def _percentile(text: str) -> float:
    try:
        value = float(text.removeprefix("p")) if text.startswith("p") else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < 100:
        raise ValueError(f"{text!r} is not a percentile such as p95")
    return round(value / 100, 9)


def parse_switch(text: str) -> bool:
    """`true` or `false`, in the usual spellings."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"{text!r} is neither true nor false (1, yes, on / 0, no, off)")


def parse_list(text: str) -> tuple[str, ...]:
    """Names separated by commas; empty text is an empty list."""
    return tuple(part for raw in text.split(",") if (part := raw.strip()))


def parse_pairs(parts: Iterable[str]) -> dict[str, str]:
    """Converts `name=value` texts to a mapping; the last value of a name wins."""
    pairs = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"{part!r} is not of the form name=value")
        pairs[name.strip()] = value.strip()
    return pairs


def parse_model_times(parts: Iterable[str]) -> dict[str, Seconds]:
    """Converts `500ms` and `model=2s` to times by model; the empty name is that of all others.

    A time needs its unit, because a number alone is milliseconds in `bench --slo`, and seconds in
    `parse_duration`.
    """
    times: dict[str, Seconds] = {}
    for part in parts:
        model, equals, text = (one.strip() for one in part.rpartition("="))
        if equals and not model:
            raise ValueError(f"{part.strip()!r} names no model: write {text} for all models")
        _, unit = _quantity(text, "a time such as 500ms or 2s")
        if not unit:
            raise ValueError(f"{part.strip()!r} has no unit: write {text}ms or {text}s")
        time = parse_duration(text)
        if not time > 0:
            raise ValueError(f"{part.strip()!r} must be more than 0")
        if model in times:
            raise ValueError(f"{part.strip()!r} is the second time for {model or 'all models'}")
        times[model] = time
    return times


def parse_count(text: str, least: int = 0, most: int | None = None) -> int:
    """A whole number in [least, most]."""
    try:
        value = int(text.strip().replace("_", ""))
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None
    if value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{value} is out of range: must be {limit}")
    return value


def parse_share(text: str, *, zero: bool = False) -> float:
    """`0.45` or `45%`: greater than 0, or with `zero` also 0, and at most 1."""
    number, unit = _quantity(text, "a share such as 0.45 or 45%")
    share = number / 100 if unit == "%" else number
    least = "at least 0" if zero else "more than 0"
    if unit not in ("", "%") or not 0 <= share <= 1 or not (share or zero):
        raise ValueError(f"{text!r} is not a share: must be {least} and at most 1")
    return share


def parse_rate(text: str) -> float:
    """`50` or `50/s`: a number per second, at least 0."""
    number, unit = _quantity(text.removesuffix("/s"), "a number per second such as 50")
    if unit:
        raise ValueError(f"{text!r} is not a number per second such as 50")
    return number


def _quantity(text: str, wanted: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not {wanted}")
    return float(match[1]), match[2]


def _whole(number: float, text: str) -> int:
    if number != int(number):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(number)
