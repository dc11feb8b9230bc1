"""Reads a TOML file that a person wrote; errors name the file and the line or the table. Pure."""

from __future__ import annotations

import difflib
import re
import tomllib
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import msgspec

__all__ = ["TomlPlaces", "nearest", "read_table", "read_toml", "readable"]

T = TypeVar("T", bound="msgspec.Struct")


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


def read_table(table: object, record: type[T], place: str) -> T:
    """Reads a table of the file as a record, whose fields are the names that it may have.

    Args: `place` names the table in errors, as `file: [planner.actuator]`.

    Errors: `ConfigError` for a name that the record lacks, with the nearest one that it has, for a
    missing name and for a wrong type.
    """
    import msgspec  # heavy, and most commands read no table

    if not isinstance(table, dict):
        raise ConfigError(f"{place}: must be a table")
    known = [field.encode_name for field in msgspec.structs.fields(record)]
    for name in table:
        if name not in known:
            hint = nearest(name, known)
            raise ConfigError(f"{place}: {readable(name)!r} is unknown; {hint}", param=name)
    try:
        converted: T = msgspec.convert(table, record)
        return converted
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {readable(str(error))}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the one that was meant, or all that there are."""
    known = tuple(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"


class TomlPlaces:
    """Finds the line of a field in a file with entries `[[name]]`, which tomllib does not
    report."""

    def __init__(self, text: str, source: str, name: str) -> None:
        """`source` names the file, `name` the entries."""
        self._source = source
        self._text = text
        self._name = name
        header = rf"^\s*\[\[\s*{re.escape(name)}\s*\]\]"
        self._starts = [match.start() for match in re.finditer(header, text, re.M)]

    def error(self, number: int | None, name: str, reason: str) -> ConfigError:
        """The error for field `name` of entry `number`, from 0; None: of the file itself."""
        line = self._line(number, name)
        entry = "" if number is None else f" ({self._name} {number + 1})"
        words = f"{self._source}, line {line}{entry}: '{readable(name)}': {reason}"
        return ConfigError(words, param=name)

    def check_names(
        self, table: Mapping[str, Any], known: tuple[str, ...], number: int | None
    ) -> None:
        """Errors: `ConfigError` for a field that is not known, with the nearest one that is."""
        for name in table:
            if name not in known:
                raise self.error(number, name, f"unknown field; {nearest(name, known)}")

    def _line(self, number: int | None, name: str) -> int:
        begin, end = 0, len(self._text)
        if number is not None and number < len(self._starts):
            begin = self._starts[number]
            end = (*self._starts, end)[number + 1]
        at = self._place(rf"[\"']?{re.escape(name)}[\"']?", begin, end)
        return self._text.count("\n", 0, at) + 1

    def _place(self, quoted: str, begin: int, end: int) -> int:
        """The line where a field is set, else the line of its header or inline table, else
        `begin`."""
        for pattern in (rf"^[ \t]*{quoted}[ \t]*[=.]", rf"[\s\[.{{,]{quoted}\s*[=.\]]"):
            found = re.compile(pattern, re.M).search(self._text, begin, end)
            if found:
                return found.end() - 1
        return begin
