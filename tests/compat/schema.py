"""What the installed pdserve sends to other nodes: every record with its fields, as JSON.

Run by the interpreter of either release, so it imports nothing of this one's tests.
"""

from __future__ import annotations

import enum
import importlib
import json
import pkgutil
import re
import typing
from typing import TYPE_CHECKING, Any

import msgspec

import pdserve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

PLACES = (
    *("pdserve.messages", "pdserve.gossip.messages", "pdserve.net", "pdserve.runtime"),
    *("pdserve.wire", "pdserve.transfer"),
)
"""Modules and packages that define what travels, as the release before calls them."""


def modules(places: Iterable[str]) -> list[ModuleType]:
    """All in these, but for parts that need a device's library."""
    found = []
    for place in places:
        module = importlib.import_module(place)
        found.append(module)
        for inner in pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}."):
            try:
                found.append(importlib.import_module(inner.name))
            except ImportError:
                continue
    return found


def record(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """One record's form."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        "tag": kind.__struct_config__.tag,
        "fields": [
            [field.name, _words(hints[field.name]), not field.required]
            for field in msgspec.structs.fields(kind)
        ],
    }


def _words(hint: object) -> str:
    """Python shows an enumeration without its module and values."""
    words = re.sub(r" at 0x[0-9a-f]+", "", repr(hint))
    for kind in _enums(hint):
        values = [one.value for one in kind]
        words = words.replace(repr(kind), f"<enum {kind.__module__}.{kind.__name__} {values}>")
    return words


def _enums(hint: object) -> Iterator[type[enum.Enum]]:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        yield hint
    for part in typing.get_args(hint):
        yield from _enums(part)


def records(places: Iterable[str] = PLACES) -> dict[str, Any]:
    """By module and name."""
    found = {}
    for module in modules(places):
        for name, kind in vars(module).items():
            if (
                isinstance(kind, type)
                and issubclass(kind, msgspec.Struct)
                and kind.__module__ == module.__name__
                and kind.__struct_config__.array_like
            ):
                try:
                    found[f"{module.__name__}.{name}"] = record(kind)
                except NameError as error:  # a hint that is there for type checkers only
                    found[f"{module.__name__}.{name}"] = {"unread": str(error)}
    return found


if __name__ == "__main__":
    print(json.dumps({"version": pdserve.__version__, "records": records()}))
