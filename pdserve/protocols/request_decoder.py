"""Decodes a request body to a typed request, or raises `InvalidRequest` that names the field.

Two passes: msgspec decodes and validates into the record; a plain JSON pass finds what a typed
decoder skips (duplicate keys, unknown fields, invalid UTF-8 inside them). No body causes any other
exception.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.protocols.completion_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pdserve.protocols.nested_unknown_fields import (
    RecordTree,
    allowed_values_at,
    record_tree,
    unknown_nested_fields,
)
from pdserve.protocols.unsupported_fields import (
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    REFUSED_BY_TOKENIZE,
    UnsupportedField,
    refuse_unknown,
    shorten,
    unknown_fields,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T", bound=msgspec.Struct)

_AT_PATH = re.compile(
    r"^(?P<what>.*?)(?: - at (?P<key>`key(?:`|\.\.\.`)? in )?`\$(?P<path>.*)`)?$", re.S
)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")
MAX_STRUCTURE = 1 << 17
"""Maximum objects, arrays and keys of one body: 40,000 messages, 0.1 s of work."""
MAX_VALUES = 1 << 21
"""Maximum values of one body: a prompt of two million token ids."""
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.S)
"""Matches an unterminated string too. Otherwise each escaped quote in it would be tried as the
start of another string, with a scan to the end of the body."""

_SOME_STRINGS = re.compile(rb'(?:[^"]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"?){1,4096}+', re.S)
"""Matches up to 4096 strings with the bytes before them: about a millisecond of work. No other
thread runs during one call of a regular expression."""
_ZEROS = bytes.maketrans(b"0123456789", b"0" * 10)
_LONG_NUMBER = b"0" * 64
"""Digits of a long number, after `_ZEROS` has replaced every digit by 0."""
_AT_ONCE = 1 << 20
"""Bytes that one call searches, in about a millisecond: no other thread runs during it."""
_MANY_VALUES = 1 << 17
"""Number of values that the JSON reader reads in about 10 ms; no other thread runs meanwhile."""

_PYTHONS = re.compile(r"\b(?:int|float|str|bool)\b")
_JSONS = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _DuplicateKey(name)
            seen.add(name)
    return found


def _no_constant(text: str) -> NoReturn:
    raise InvalidRequest(f"{text} is not valid JSON; send a finite number or null")


def _whole(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def _float(text: str) -> float:
    """Parse a float in Python, so that other threads can run: a body may hold two million
    numbers."""
    return float(text)


def _int(text: str) -> int:
    """Parse an integer in Python, so that other threads can run: a body may hold two million
    integers, and one with thousands of digits takes 0.1 ms."""
    return int(text)


def _decoder(
    parse_float: Callable[[str], float], parse_int: Callable[[str], int] | None = None
) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_unique,
        parse_constant=_no_constant,
        parse_float=parse_float,
        parse_int=parse_int,
    )


_PLAIN = _decoder(_float)
_LONG = _decoder(_float, _int)
"""Slower by one call for each integer, but other threads run in between."""
_WHOLE = _decoder(_whole, _int)
"""Reads numbers without a fraction as integers."""
_NO_INTEGER = re.compile(r"`[^`]*\bint\b[^`]*`, got `float`")


@dataclass(frozen=True, slots=True)
class Decoded(Generic[T]):
    """A decoded request and its unknown fields."""

    request: T
    unknown: list[str]


class RequestDecoder(Generic[T]):
    """Decodes one kind of request body."""

    def __init__(self, record: type[T], refused: Mapping[str, UnsupportedField]) -> None:
        self._typed = msgspec.json.Decoder(record)
        self.record = record
        self.refused = refused
        self._known = frozenset(field.encode_name for field in msgspec.structs.fields(record))

    def decode(self, body: bytes, *, strict: bool = False) -> Decoded[T]:
        """Decode a whole body.

        `strict` makes unknown fields an error that suggests the nearest known name.
        Raises `InvalidRequest` for any fault.
        """
        _check_structure(body)
        try:
            request = self._typed.decode(body)
        except msgspec.ValidationError as error:
            request = self._again(body, str(error))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            _plain(body)
            raise InvalidRequest(_SURROGATE) from None
        plain = _plain(body)
        unknown = unknown_fields(plain, self._known, self.refused)
        unknown += unknown_nested_fields(plain, self._place)
        if unknown and strict:
            refuse_unknown(unknown, [*self._place.paths(), *self.refused])
        return Decoded(request, unknown)

    def _again(self, body: bytes, fault: str) -> T:
        """Decode a body whose only fault is 5.0 for an integer: clients in languages with one
        number type send that. Raises `InvalidRequest` for other faults."""
        if _NO_INTEGER.search(fault):
            try:
                return msgspec.convert(_plain(body, _WHOLE), self.record, str_keys=True)
            except msgspec.ValidationError as error:
                fault = str(error)
        raise _invalid(fault, self.record, body)

    @cached_property
    def _place(self) -> RecordTree:
        """Build the record tree at the first request, to keep start-up fast."""
        return record_tree(self.record)


def _check_structure(body: bytes) -> None:
    """Bounds the number of objects, arrays, keys and values: they take most of the decoding time.

    Counting bytes is cheap and never gives too little, so strings are removed only if that count is
    over a limit. Errors: `InvalidRequest`.
    """
    if len(body) <= MAX_STRUCTURE or not _is_too_much(*_counted(body)):
        return
    structure = values = at = 0
    while at < len(body):
        found = _SOME_STRINGS.match(body, at)
        end = len(body) if found is None else found.end()
        more = _counted(_STRINGS.sub(b"", body[at:end]))
        structure, values, at = structure + more[0], values + more[1], end
        if _is_too_much(structure, values):
            raise InvalidRequest(
                f"the body holds more than {MAX_STRUCTURE} objects, arrays and keys, or more than "
                f"{MAX_VALUES} values; send less in one request"
            )


def _counted(body: bytes) -> tuple[int, int]:
    """Returns the number of objects, arrays and keys, and the number of values."""
    return body.count(b"{") + body.count(b"[") + body.count(b":"), body.count(b",")


def _is_too_much(structure: int, values: int) -> bool:
    return structure > MAX_STRUCTURE or values > MAX_VALUES


# The plain pass finds all other syntax errors: this is the only one that msgspec alone refuses.
_SURROGATE = (
    "the body is not valid JSON: a \\u escape is half of a surrogate pair; "
    "send text as UTF-8 or as full pairs"
)


def _plain(body: bytes, decoder: json.JSONDecoder = _PLAIN) -> dict[str, Any]:
    """The body as plain objects; `InvalidRequest` says what is wrong and where."""
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    if body.startswith(codecs.BOM_UTF8):
        raise InvalidRequest("the body begins with a byte order mark; send UTF-8 without one")
    if len(body) > MAX_STRUCTURE and decoder is _PLAIN and _has_slow_numbers(body):
        decoder = _LONG
    try:
        found = decoder.decode(body.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid UTF-8 (byte {error.start}); send JSON encoded as UTF-8"
        ) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply; send flatter JSON") from None
    except _DuplicateKey as error:
        name = shorten(str(error))
        raise InvalidRequest(f"'{name}' appears twice in one object", param=name) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} ({where})") from None
    except ValueError:
        raise InvalidRequest("the body holds a number with too many digits") from None
    if not isinstance(found, dict):
        raise InvalidRequest("the body must be a JSON object")
    return found


def _has_slow_numbers(body: bytes) -> bool:
    """True if reading the integers in one call would block other threads for too long."""
    if body.count(b",") > _MANY_VALUES:
        return True
    size = _AT_ONCE + len(_LONG_NUMBER) - 1
    slices = (body[at : at + size] for at in range(0, len(body), _AT_ONCE))
    return any(_LONG_NUMBER in piece.translate(_ZEROS) for piece in slices)


def _invalid(message: str, record: type[msgspec.Struct], body: bytes) -> InvalidRequest:
    """Converts msgspec's message: JSON's type names, OpenAI's paths (`messages[0].content`)."""
    match = _AT_PATH.match(message)
    # Every part of the pattern is optional, so it always matches.
    assert match is not None
    what, path = match["what"], (match["path"] or "").removeprefix(".")
    path = path.replace("[...]", "[*]") if match["key"] is None else path
    if missing := _MISSING.match(what):
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequest(f"'{path}' is required", param=path)
    if what.startswith("Invalid enum value"):
        what = f"expected one of {', '.join(allowed_values_at(record, path))}"
    else:
        if what.startswith("Integer value out of range"):
            what = "the integer is out of range"
        what = what[:1].lower() + what[1:].replace("`", "")
        what = _PYTHONS.sub(lambda found: _JSONS[found[0]], what)
    if not path:
        return InvalidRequest(f"the body is not valid: {what}")
    where = f"'{path}'" if match["key"] is None else f"'{path}', in {_bad_key(body, path)}"
    return InvalidRequest(f"{where}: {what}", param=path)


def _bad_key(body: bytes, path: str) -> str:
    """Describes the first key at `path` that is not a token id, if one is found."""
    given = _plain(body).get(path)
    keys = given if isinstance(given, dict) else {}
    bad = next((key for key in keys if not (key.isascii() and key.isdigit())), None)
    return "a key" if bad is None else f"the key '{shorten(bad)}'"


CHAT = RequestDecoder(ChatRequest, REFUSED_BY_CHAT)
COMPLETION = RequestDecoder(CompletionRequest, REFUSED_BY_COMPLETIONS)
TOKENIZE = RequestDecoder(TokenizeRequest, REFUSED_BY_TOKENIZE)
DETOKENIZE = RequestDecoder(DetokenizeRequest, {})
