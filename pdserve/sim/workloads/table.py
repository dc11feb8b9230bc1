"""Reads traces in tables (CSV with a header, or JSON lines): arrival times and lengths.

Two prompts share a prefix only if a column names their blocks. Azure's CSV is such a table without
one; `--columns` names the columns of others. A time is in seconds, or an ISO 8601 date and time.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from pdserve.errors import ConfigError
from pdserve.sim.workloads.lines import bad_line, check_span, read_lines
from pdserve.sim.workloads.mooncake import BLOCK, OWN_CONTENT, block_pieces
from pdserve.sim.workloads.trace_request import MOST_TOKENS, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pdserve.ids import Seconds
    from pdserve.sim.workloads.trace_request import PromptPiece

__all__ = ["Columns", "TableTrace", "columns_of", "known_columns"]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the columns that a replay reads."""

    at: str
    """Arrival times; empty: none, all requests arrive at time 0."""
    input: str
    """Prompt lengths in tokens."""
    output: str
    """Answer lengths in tokens."""
    scale: float = 1.0
    """Seconds per unit of a time that is a number."""
    hash_ids: str = ""
    """Ids of a prompt's blocks, as in Mooncake's traces; empty: none."""
    block: int = BLOCK
    """Tokens of a block."""


_KNOWN: Final = (
    Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),  # Azure
    Columns("Timestamp", "Request tokens", "Response tokens"),  # BurstGPT
    Columns("arrived_at", "num_prefill_tokens", "num_decode_tokens"),  # Vidur
    Columns("at", "input", "output"),
    Columns("timestamp", "input_length", "output_length", 0.001),  # Mooncake without its blocks
)
_EXAMPLE: Final = "--columns at=NAME,input=NAME,output=NAME"
_KEYS: Final = ("at", "at_ms", "input", "output", "hash_ids", "block")


def columns_of(text: str) -> Columns:
    """Parse `at=NAME,input=NAME,output=NAME`; `at_ms` for times in milliseconds; perhaps
    `hash_ids=NAME,block=TOKENS`.

    Errors: `ConfigError`.
    """
    named: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (one.strip() for one in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"--columns: {part!r} is not of the form name=column ({_EXAMPLE})")
        if name not in _KEYS:
            hint = _nearest(name, _KEYS) or f". Known: {', '.join(_KEYS)}"
            raise ConfigError(f"--columns: {name!r} is unknown{hint}")
        named[name] = value
    if not {"input", "output"} <= set(named) or {"at", "at_ms"} <= set(named):
        raise ConfigError(f"--columns {text!r}: name at (or at_ms), input and output: {_EXAMPLE}")
    block = named.get("block", str(BLOCK))
    if not block.isdigit() or not 0 < int(block) <= _MOST_BLOCK:
        raise ConfigError(f"--columns: block={block!r} is not a number of tokens such as 512")
    return Columns(
        named.get("at_ms") or named.get("at", ""),
        named["input"],
        named["output"],
        0.001 if "at_ms" in named else 1.0,
        named.get("hash_ids", ""),
        int(block),
    )


_MOST_BLOCK: Final = 1 << 20


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.lower(), [one.lower() for one in names], n=1)
    found = [one for one in names if one.lower() in close]
    return f", did you mean {found[0]!r}?" if found else ""


def known_columns(header: Sequence[str]) -> Columns | None:
    """The columns of a header with well-known names."""
    return next((one for one in _KNOWN if set(_names(one)) <= set(header)), None)


def _names(columns: Columns) -> list[str]:
    every = (columns.at, columns.input, columns.output, columns.hash_ids)
    return [name for name in every if name]


class TableTrace:
    """The requests of a file, read anew by each iteration."""

    def __init__(self, path: Path, columns: Columns | None = None) -> None:
        """`columns`: None for a header with well-known names."""
        self._path = path
        self._columns = columns
        self.timed = columns is None or bool(columns.at)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Raises `ConfigError` at the first bad line."""
        columns = self._columns
        begin: Seconds | None = None
        for count, (number, row) in enumerate(_rows(self._path, columns)):
            columns = columns or self._known(number, row)
            try:
                at, prompt, output = _parse(row, columns)
                pieces = _blocks(row, columns, prompt) or ((OWN_CONTENT + count, prompt),)
            except (ValueError, TypeError) as error:
                what = f"{error}; expected a time and two lengths, {_EXAMPLE} names their columns"
                raise bad_line(self._path, number, what) from None
            begin = at if begin is None else begin
            if at < begin:
                raise bad_line(self._path, number, "is earlier than the first: sort the file")
            unit = "seconds" if columns.scale == 1.0 else "milliseconds"
            check_span(self._path, number, at - begin, unit)
            # An engine answers with one token at least.
            yield TraceRequest(count, at - begin, pieces, max(1, output))

    def _known(self, number: int, row: Mapping[str, Any]) -> Columns:
        columns = known_columns(list(row))
        if columns is None:
            what = f"the columns are {', '.join(map(str, row))}: name three of them by {_EXAMPLE}"
            raise bad_line(self._path, number, what)
        return columns


def _rows(path: Path, columns: Columns | None) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, fields by column)."""
    lines = read_lines(path)
    first, head = next(lines, (1, b""))
    if head.startswith(b"{"):
        for number, text in ((first, head), *lines):
            yield number, _object(path, number, text)
        return
    names = [name.strip() for name in _split(path, first, head.decode("utf-8-sig", "replace"))]
    if all(_is_number(name) for name in names):
        what = (
            "has numbers where the names of the columns must stand: write a header, at,input,output"
        )
        raise bad_line(path, first, what)
    columns = columns or known_columns(names)
    for name in _names(columns) if columns else ():
        if names.count(name) > 1:
            raise bad_line(path, first, f"there are {names.count(name)} columns {name}")
    for number, text in lines:
        values = _split(path, number, text.decode("utf-8", "replace"))
        if len(values) != len(names):
            raise bad_line(path, number, f"{len(values)} fields, the header has {len(names)}")
        yield number, dict(zip(names, values, strict=True))


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def _object(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise bad_line(path, number, f"{error}; expected one JSON object per line") from None


def _split(path: Path, number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error as error:
        what = f"{error}; expected fields with commas between them, and each request on one line"
        raise bad_line(path, number, what) from None


def _parse(row: Mapping[str, Any], columns: Columns) -> tuple[Seconds, int, int]:
    for name in _names(columns):
        if name not in row:
            hint = _nearest(name, list(row)) or f"; there are {', '.join(map(str, row))}"
            raise ValueError(f"there is no column {name}{hint}")
    prompt = _field(row, columns.input, _length)
    output = _field(row, columns.output, _length)
    if prompt < 1 or output < 0:
        raise ValueError(f"lengths {prompt} and {output}")
    if not columns.at:
        return 0.0, prompt, output
    return _field(row, columns.at, lambda value: _time(value, columns.scale)), prompt, output


def _field(row: Mapping[str, Any], name: str, parse: Callable[[Any], T]) -> T:
    """Errors: `ValueError` names the column."""
    try:
        return parse(row[name])
    except (ValueError, TypeError) as error:
        raise ValueError(f"column {name}: {error}") from None


def _blocks(row: Mapping[str, Any], columns: Columns, length: int) -> tuple[PromptPiece, ...]:
    if not columns.hash_ids:
        return ()
    return _field(
        row, columns.hash_ids, lambda value: block_pieces(_ids(value), length, columns.block)
    )


def _ids(value: Any) -> list[int]:
    """Ids from a JSON list, or from text such as `1 2 3` or `[1, 2, 3]`."""
    words = value.strip(" []").replace(",", " ").split() if isinstance(value, str) else value
    ids = [int(one) for one in words or ()]
    if any(not 0 <= one < OWN_CONTENT for one in ids):
        raise ValueError(f"ids must be from 0 to {OWN_CONTENT - 1}")
    return ids


_MOST: Final = 1e18
"""Seconds or tokens: differences of smaller numbers are finite."""


class _NotANumber(ValueError):
    """A field holds other text than a number."""


def _number(value: Any, scale: float = 1.0) -> float:
    """Raises `_NotANumber` for other text, `ValueError` for NaN and what is out of range."""
    try:
        number = float(value) * scale
    except ValueError as error:
        raise _NotANumber(str(error)) from None
    except OverflowError:
        number = math.inf
    if not abs(number) <= _MOST:
        raise ValueError(f"{str(value)[:20]} is out of range")
    return number


def _length(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError(f"{value!r} is not a whole number of tokens")
    if number > MOST_TOKENS:
        raise ValueError(f"{int(number)} tokens are more than any model takes ({MOST_TOKENS})")
    return int(number)


def _time(value: Any, scale: float) -> Seconds:
    """Seconds, from a number or from a date and time (of UTC, where it names no zone). Errors:
    `ValueError`."""
    with contextlib.suppress(_NotANumber):
        return _number(value, scale)
    # Seven digits of a second, one more than a datetime holds.
    whole, dot, fraction = str(value).strip().partition(".")
    digits = "".join(one for one in fraction if one.isdigit()) if dot else ""
    zone = fraction.lstrip("0123456789")
    text = f"{whole}.{digits[:6]:0<6}{zone}" if dot else whole
    try:
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(
            f"{str(value)[:40]!r} is neither a number of seconds (at_ms: of milliseconds) nor a "
            f"date and time such as 2026-11-28T08:30:00Z ({error})"
        ) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
