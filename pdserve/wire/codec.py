"""Encodes typed bodies as msgpack and decodes them, with one error for bytes that do not decode.

Bodies are `msgspec.Struct`s encoded as arrays. Fields are append-only with defaults, so a reader
skips the fields of a later version and fills those that an earlier one lacks. No body may hold an
untyped field: a typed decoder refuses unexpected containers while it parses, so that types and
frame size bound nesting and memory for any input.

`Method` pairs a number on the wire with its two types, `Notice` with the type of a one-way message;
each package defines its own numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from pdserve.errors import ProtocolError
from pdserve.token_ids import listed_ids, packed_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.wire.parser import Buffer

__all__ = [
    "PACKED_IDS",
    "UNDECODABLE",
    "Method",
    "Notice",
    "decoded_kinds",
    "decoder",
    "encode",
    "encoder_for",
]

T = TypeVar("T")
Q = TypeVar("Q")
R = TypeVar("R")

PACKED_IDS: Final = 1
"""Feature of a peer (a bit in its handshake): it reads token ids as packed bytes. Others are sent
lists."""

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=packed_ids).encode
"""Encodes a body. Objects without a type on the wire raise `TypeError`."""

_encode_lists: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=listed_ids).encode


def encoder_for(features: int) -> Callable[[Any], bytes]:
    """The `encode` for a peer that understands these features."""
    return encode if features & PACKED_IDS else _encode_lists


UNDECODABLE: Final = (
    # Malformed, truncated or trailing bytes; its subclass `ValidationError`: another type.
    msgspec.DecodeError,
    RecursionError,  # nested too deeply
    UnicodeDecodeError,
    OverflowError,
    MemoryError,
)
"""All exceptions that a decoder raises for malformed bytes."""


decoded_kinds: Final[list[Any]] = []
"""Every type that this process decodes. Tests check them all (`type_check.py`); at start-up that
would take tens of milliseconds."""


def decoder(kind: type[T]) -> Callable[[Buffer], T]:
    """Makes a function from bytes to `kind`, which raises `ProtocolError` for malformed bytes.
    `kind` must pass `type_check.check_type`.
    """
    decoded_kinds.append(kind)
    decode = msgspec.msgpack.Decoder(kind).decode
    name = getattr(kind, "__name__", str(kind))

    def decode_body(data: Buffer) -> T:
        try:
            return decode(data)
        except UNDECODABLE as error:
            raise ProtocolError(f"not a {name}: {error}") from None

    return decode_body


class Method(Generic[Q, R]):
    """One kind of request: its number, a name for logs, the types of request and answer. Numbers
    are 16 bits, chosen once and never reused, so that peers of other versions cannot confuse
    them.
    """

    __slots__ = ("decode_request", "id", "name", "reply", "request", "unpack_reply")

    def __init__(self, number: int, name: str, request: type[Q], reply: type[R]) -> None:
        self.id = _checked_number(number)
        self.name = name
        self.request = request
        self.decode_request: Callable[[Buffer], Q] = decoder(request)
        decoded_kinds.append(reply)
        self.reply = reply
        self.unpack_reply: Callable[[Buffer], R] = msgspec.msgpack.Decoder(reply).decode
        """Decodes an answer and raises any of `UNDECODABLE`; saves the hot path a call."""

    def bad_reply(self, error: Exception) -> ProtocolError:
        """The error for an answer that does not decode."""
        return ProtocolError(f"the answer to {self.name} is no {self.reply.__name__}: {error}")

    def __repr__(self) -> str:
        return f"Method({self.id}, {self.name!r})"


class Notice(Generic[Q]):
    """One kind of one-way message: its number, a name for logs, its type."""

    __slots__ = ("decode", "id", "message", "name")

    def __init__(self, number: int, name: str, message: type[Q]) -> None:
        self.id = _checked_number(number)
        self.name = name
        self.message = message
        self.decode: Callable[[Buffer], Q] = decoder(message)

    def __repr__(self) -> str:
        return f"Notice({self.id}, {self.name!r})"


def _checked_number(number: int) -> int:
    if not 0 <= number < 1 << 16:
        raise ValueError(f"method number {number} does not fit 16 bits")
    return number
