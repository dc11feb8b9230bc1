"""Reads `--engine-option` for engines whose own settings are the options."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["field_of", "parse_value", "set_by_pdserve"]


def parse_value(text: str) -> Any:
    """The value of an option: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def field_of(
    engine: str, name: str, fields: Collection[str], ours: Mapping[str, str], what: str
) -> str:
    """The engine's field that an option names; dashes are underscores.

    `ours` maps the fields that pdserve sets to what sets them (`set_by_pdserve`); `what` says what
    the fields are, with examples. Raises `ConfigError` for these and for unknown names.
    """
    field = name.replace("-", "_")
    if field in ours:
        raise set_by_pdserve(engine, name, ours[field])
    if field in fields and not field.startswith("_"):
        return field
    close = difflib.get_close_matches(field, [*fields, *ours], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise ConfigError(
        f"the {engine} engine has no option {name!r}{hint} Options are the fields of {what}"
    )


def set_by_pdserve(engine: str, name: str, by: str) -> ConfigError:
    """The error for an option whose field pdserve sets. `by` is what sets it, such as a flag, or
    `nothing: ` and the reason."""
    told = f"cannot be set: {by.removeprefix('nothing: ')}"
    told = told if by.startswith("nothing: ") else f"is set by {by}"
    return ConfigError(f"the {engine} engine's option {name} {told}")
