"""Finds unknown field names inside nested objects, which a typed decoder ignores.

A record is compiled once into the places of its nested records; a body is then walked along these
places only, so that free objects (a schema, a template's arguments) are not searched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect

from pdserve.protocols.unsupported_fields import NESTED_WITHOUT_EFFECT

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RecordTree", "allowed_values_at", "record_tree", "unknown_nested_fields"]


@dataclass(slots=True)
class RecordTree:
    """Records that may occur at one place of a body."""

    tag_field: str | None = None
    records: dict[object, dict[str, RecordTree | None]] = field(default_factory=dict)
    """Fields of each record and their subtrees, by the record's tag (None: untagged)."""
    item: RecordTree | None = None
    """Subtree of each item of a list."""

    def __bool__(self) -> bool:
        return bool(self.records) or self.item is not None

    def paths(self, at: str = "", depth: int = 6) -> Iterator[str]:
        """Yield all known paths, without list indexes. `depth` limits recursive records."""
        if depth == 0:
            return
        if self.item is not None:
            yield from self.item.paths(f"{at}[]", depth)
        for fields in self.records.values():
            for name, inside in fields.items():
                path = f"{at}.{name}" if at else name
                yield path
                if inside is not None:
                    yield from inside.paths(path, depth - 1)


def record_tree(record: type[msgspec.Struct]) -> RecordTree:
    """Build the tree of a record."""
    return _place(inspect.type_info(record), {})


def _place(kind: Any, known: dict[type, dict[str, RecordTree | None]]) -> RecordTree:
    place = RecordTree()
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for one in kinds:
        while isinstance(one, inspect.Metadata):
            one = one.type
        if isinstance(one, inspect.UnionType):
            inner = _place(one, known)
            place.records |= inner.records
            place.tag_field = place.tag_field or inner.tag_field
            place.item = place.item or inner.item
        elif isinstance(one, inspect.StructType):
            place.tag_field = one.tag_field
            place.records[one.tag] = _fields(one, known)
        elif isinstance(one, inspect.ListType):
            place.item = _place(one.item_type, known) or None
    return place


def _fields(
    kind: inspect.StructType, known: dict[type, dict[str, RecordTree | None]]
) -> dict[str, RecordTree | None]:
    if kind.cls not in known:
        fields: dict[str, RecordTree | None] = {}
        # Before the loop over the fields, because a record may contain itself.
        known[kind.cls] = fields
        if kind.tag_field is not None:
            fields[kind.tag_field] = None
        for one in kind.fields:
            fields[one.encode_name] = _place(one.type, known) or None
    return known[kind.cls]


def allowed_values_at(record: type[msgspec.Struct], path: str) -> list[str]:
    """Return the values allowed at `path` (`tools[0].type`); empty if it is no enumeration."""
    kinds = _alternatives(inspect.type_info(record))
    for step in path.replace("[", ".[").split("."):
        if step.startswith("["):
            inner = [kind.item_type for kind in kinds if isinstance(kind, inspect.ListType)]
        else:
            fields = [f for k in kinds if isinstance(k, inspect.StructType) for f in k.fields]
            inner = [field.type for field in fields if field.encode_name == step]
        kinds = [kind for each in inner for kind in _alternatives(each)]
    return [str(word) for k in kinds if isinstance(k, inspect.LiteralType) for word in k.values]


def _alternatives(kind: Any) -> list[Any]:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        return [one for each in kind.types for one in _alternatives(each)]
    return [kind]


def unknown_nested_fields(body: dict[str, Any], place: RecordTree) -> list[str]:
    """Return paths of unknown fields inside nested objects of a body, in order; once per field of
    a list's items. Top-level fields and null values are not reported."""
    (fields,) = place.records.values()
    found: dict[str, str] = {}
    for name, value in body.items():
        inside = fields.get(name)
        if inside is not None:
            _walk(value, inside, name, name, found)
    return list(found.values())


def _walk(value: Any, place: RecordTree, path: str, general: str, found: dict[str, str]) -> None:
    """Adds to `found`, by the path without indexes, the first path with indexes."""
    if value.__class__ is list and place.item is not None:
        general += "[]"
        for index, item in enumerate(value):
            _walk(item, place.item, f"{path}[{index}]", general, found)
    elif value.__class__ is dict and place.records:
        tag = None if place.tag_field is None else value.get(place.tag_field)
        fields = place.records.get(tag)
        if fields is None:
            return
        for name, inner in value.items():
            inside = fields.get(name, _UNKNOWN)
            if inside is _UNKNOWN:
                _note(f"{path}.{name}", f"{general}.{name}", inner, found)
            elif inside is not None:
                _walk(inner, inside, f"{path}.{name}", f"{general}.{name}", found)


_UNKNOWN = RecordTree()


def _note(path: str, general: str, value: Any, found: dict[str, str]) -> None:
    if value is not None and general not in NESTED_WITHOUT_EFFECT:
        found.setdefault(general, path)
