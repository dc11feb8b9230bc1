"""Looks into types that travel: are they typed through and through, and can their values change?

A typed decoder refuses unexpected containers while it parses. An untyped field would accept any
nesting and any size that a frame can hold. `check_type` is for tests, which call it for all
`codec.decoded_kinds`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_type", "is_immutable"]

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
