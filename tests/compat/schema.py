"""What the installed pdserve sends to other nodes: every record with its fields, as JSON.

Run by the interpreter of either release, so it imports nothing of this one's tests.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import typing
from typing import TYPE_CHECKING, Any

import msgspec

import pdserve

if TYPE_CHECKING:
    from types import ModuleType

PLACES = ("messages", "gossip.messages", "net", "runtime", "wire", "transfer")


def modules() -> list[ModuleType]:
    """Those that define what travels, but for parts that need a device's library."""
    found = []
    for place in PLACES:
        module = importlib.import_module(f"pdserve.{place}")
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
    return re.sub(r" at 0x[0-9a-f]+", "", repr(hint))


def records() -> dict[str, Any]:
    """By module and name."""
    found = {}
    for module in modules():
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
