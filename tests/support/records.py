"""Changed copies of records."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from msgspec import Struct, structs

T = TypeVar("T")


def replace(record: T, /, **fields: Any) -> T:
    """A copy of a dataclass or Struct with other fields."""
    if isinstance(record, Struct):
        return structs.replace(record, **fields)
    changed: T = dataclasses.replace(record, **fields)  # type: ignore[type-var]
    return changed
