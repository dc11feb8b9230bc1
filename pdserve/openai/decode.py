"""Bytes from a client become a typed request, or an `InvalidRequest` that names the field.

Two passes: msgspec decodes and validates into the record; a plain JSON pass sees what a typed
decoder skips (duplicate keys, unknown fields, invalid UTF-8 inside them). Whatever a client sends
ends in one of the two outcomes, never in another exception.
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
from pdserve.openai.fields import (
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    Refusal,
    refuse_unknown,
    shorten,
    unknown_fields,
)
from pdserve.openai.nested import Place, place_of, unknown_inside, words_at
from pdserve.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T", bound=msgspec.Struct)

_AT_PATH = re.compile(
    r"^(?P<what>.*?)(?: - at (?P<key>`key(?:`|\.\.\.`)? in )?`\$(?P<path>.*)`)?$", re.S
)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")
MAX_STRUCTURE = 1 << 17
"""Objects, arrays and keys of one body: 40,000 messages, a tenth of a second."""
MAX_VALUES = 1 << 21
"""Values of one body: a prompt of two million token ids."""
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.S)

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


_PLAIN = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


@dataclass(frozen=True, slots=True)
class Decoded(Generic[T]):
    """A request and the names in it that nobody knows."""

    request: T
    unknown: list[str]


class RequestDecoder(Generic[T]):
    """Decodes one kind of request body."""

    def __init__(self, record: type[T], refused: Mapping[str, Refusal]) -> None:
        self._typed = msgspec.json.Decoder(record)
        self.record = record
        self.refused = refused
        self._known = frozenset(field.encode_name for field in msgspec.structs.fields(record))

    def decode(self, body: bytes, *, strict: bool = False) -> Decoded[T]:
        """Decode a whole body.

        Args: `strict` makes unknown fields an error that suggests the nearest known name.
        Errors: `InvalidRequest` for whatever is wrong.
        """
        _check_structure(body)
        try:
            request = self._typed.decode(body)
        except msgspec.ValidationError as error:
            raise _invalid(str(error), self.record) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            _plain(body)
            raise InvalidRequest(_SURROGATE) from None
        plain = _plain(body)
        unknown = unknown_fields(plain, self._known, self.refused)
        unknown += unknown_inside(plain, self._place)
        if unknown and strict:
            refuse_unknown(unknown, [*self._place.paths(), *self.refused])
        return Decoded(request, unknown)

    @cached_property
    def _place(self) -> Place:
        """Made with the first request: records are many, and starting is to be quick."""
        return place_of(self.record)


def _check_structure(body: bytes) -> None:
    """Bound what a body can cost beyond its length: small values take most of the time.

    Counting bytes is cheap and never too low, so strings are only looked through when it may
    matter. Errors: `InvalidRequest`.
    """
    if len(body) <= MAX_STRUCTURE or not _is_too_much(body):
        return
    if _is_too_much(_STRINGS.sub(b"", body)):
        raise InvalidRequest(
            f"the body holds more than {MAX_STRUCTURE} objects, arrays and keys, or more than "
            f"{MAX_VALUES} values; send less in one request"
        )


def _is_too_much(body: bytes) -> bool:
    structure = body.count(b"{") + body.count(b"[") + body.count(b":")
    return structure > MAX_STRUCTURE or body.count(b",") > MAX_VALUES


# The plain pass finds every other fault of syntax: what it takes and msgspec does not is this.
_SURROGATE = (
    "the body is not valid JSON: a \\u escape is half of a surrogate pair; "
    "send text as UTF-8 or as full pairs"
)


def _plain(body: bytes) -> dict[str, Any]:
    """The body as plain objects; `InvalidRequest` says what is wrong and where."""
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    if body.startswith(codecs.BOM_UTF8):
        raise InvalidRequest("the body begins with a byte order mark; send UTF-8 without one")
    try:
        found = _PLAIN.decode(body.decode())
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


def _invalid(message: str, record: type[msgspec.Struct]) -> InvalidRequest:
    """msgspec's words, in JSON's terms, with the path in OpenAI's form (`messages[0].content`)."""
    match = _AT_PATH.match(message)
    assert match is not None  # every part of the pattern is optional
    what, path = match["what"], (match["path"] or "").removeprefix(".")
    path = path.replace("[...]", "[*]") if match["key"] is None else path
    if missing := _MISSING.match(what):
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequest(f"'{path}' is required", param=path)
    if what.startswith("Invalid enum value"):
        what = f"expected one of {', '.join(words_at(record, path))}"
    else:
        if what.startswith("Integer value out of range"):
            what = "the integer is out of range"
        what = what[:1].lower() + what[1:].replace("`", "")
        what = _PYTHONS.sub(lambda found: _JSONS[found[0]], what)
    if not path:
        return InvalidRequest(f"the body is not valid: {what}")
    where = f"'{path}'" if match["key"] is None else f"'{path}', in a key"
    return InvalidRequest(f"{where}: {what}", param=path)


CHAT = RequestDecoder(ChatRequest, REFUSED_BY_CHAT)
COMPLETION = RequestDecoder(CompletionRequest, REFUSED_BY_COMPLETIONS)
TOKENIZE = RequestDecoder(TokenizeRequest, {})
DETOKENIZE = RequestDecoder(DetokenizeRequest, {})
