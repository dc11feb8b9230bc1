"""Encodes typed bodies as msgpack and decodes them, with one error for bytes that do not decode.

Bodies are `msgspec.Struct`s encoded as arrays. Fields are append-only with defaults, so a reader
skips the fields of a later version and fills those that an earlier one lacks. No body may hold an
untyped field: a typed decoder refuses unexpected containers while it parses, so that types and
frame size bound nesting and memory for any input.

`Method` pairs a number on the wire with its two types, `Notice` with the type of a one-way message;
each package defines its own numbers.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
from msgspec import inspect

from pdserve.errors import ProtocolError
from pdserve.token_ids import listed_ids, packed_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.wire.parser import Buffer

__all__ = [
    "PACKED_IDS",
    "UNDECODABLE",
    "Method",
    "Notice",
    "check_type",
    "decoder",
    "encode",
    "encoder_for",
    "is_immutable",
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


def decoder(kind: type[T]) -> Callable[[Buffer], T]:
    """Makes a function from bytes to `kind`, which raises `ProtocolError` for malformed bytes.
    Raises `TypeError` at once if `kind` could hold untyped data.
    """
    check_type(kind)
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
        check_type(reply)
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


_NAMED = (inspect.DataclassType, inspect.TypedDictType)


def check_type(kind: Any) -> None:
    """Raises `TypeError` if a value of `kind` could hold untyped data, or a Struct that is no
    array. `msgspec.Raw` is allowed: it is bytes until a typed decoder reads them.
    """
    seen: set[int] = set()
    waiting = [inspect.type_info(kind)]
    while waiting:
        info = waiting.pop()
        if id(info) in seen:
            continue
        seen.add(id(info))
        if isinstance(info, (inspect.AnyType, inspect.CustomType, inspect.ExtType)):
            raise TypeError(f"{kind!r} holds an untyped field")
        if isinstance(info, _NAMED) or (
            isinstance(info, inspect.StructType) and not info.array_like
        ):
            raise TypeError(f"{info.cls.__name__} is not array_like: its names would travel")
        waiting += _parts(info)


_UNCHANGING: Final = (
    inspect.NoneType,
    inspect.BoolType,
    inspect.IntType,
    inspect.FloatType,
    inspect.StrType,
    inspect.BytesType,
    inspect.LiteralType,
    inspect.EnumType,
    inspect.UnionType,
    inspect.TupleType,
    inspect.VarTupleType,
    inspect.FrozenSetType,
    inspect.Metadata,
)
"""Types whose values cannot change if those of their parts cannot."""


def is_immutable(kind: Any) -> bool:
    """True if no value of `kind` can change: frozen Structs of texts, numbers and tuples."""
    return _is_immutable(kind)


@cache
def _is_immutable(kind: Any) -> bool:
    seen: set[int] = set()
    waiting = [inspect.type_info(kind)]
    while waiting:
        info = waiting.pop()
        if id(info) in seen:
            continue
        seen.add(id(info))
        if isinstance(info, inspect.StructType):
            if not info.cls.__struct_config__.frozen:
                return False
        elif not isinstance(info, _UNCHANGING):
            return False
        waiting += _parts(info)
    return True


def _parts(info: inspect.Type) -> Iterator[inspect.Type]:
    """The types directly inside a type."""
    if isinstance(info, inspect.StructType):
        for field in info.fields:
            yield field.type
    elif isinstance(info, inspect.UnionType):
        yield from info.types
    elif isinstance(info, (inspect.CollectionType, inspect.VarTupleType)):
        yield info.item_type
    elif isinstance(info, inspect.TupleType):
        yield from info.item_types
    elif isinstance(info, (inspect.DictType, inspect.FrozenDictType)):
        yield info.key_type
        yield info.value_type
    elif isinstance(info, inspect.Metadata):
        yield info.type
