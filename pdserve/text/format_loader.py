"""Loads a format of tool calls or of reasoning: built in, an entry point, or `module:attribute`.

Only the chosen format's module is imported. No I/O beyond imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["load_format"]


def load_format(
    what: str, name: str, built_in: Mapping[str, str], group: str, needs: Collection[str]
) -> object:
    """The format called `name`. A class is instantiated without arguments.

    Args: `what` is the option's name, for errors; `built_in` gives `module:attribute` by name;
    `group` is the group of entry points of other packages; `needs` lists what a format must have.
    Errors: `ConfigError` with the remedy.
    """
    target = name if ":" in name else built_in.get(name) or _registered(what, name, built_in, group)
    module_name, _, attribute = target.partition(":")
    if not all(map(str.isidentifier, module_name.split("."))):
        raise ConfigError(f"{what} {name!r}: {module_name!r} names no module: write package.module")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{what} {name!r} cannot be imported: {error}; install its package, or name its folder "
            "in PYTHONPATH"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what} {name!r}: module {module_name} has no {attribute!r}")
        found = getattr(found, part)
    if isinstance(found, type):
        found = _instance(what, name, found)
    missing = [each for each in needs if not hasattr(found, each)]
    if missing:
        raise ConfigError(
            f"{what} {name!r}: {target} lacks {', '.join(missing)}; docs/tools.md says what a "
            "format needs"
        )
    return found


def _instance(what: str, name: str, kind: type) -> object:
    try:
        return kind()
    except TypeError as error:
        raise ConfigError(
            f"{what} {name!r}: {kind.__name__} must be made without arguments: {error}"
        ) from error


def _registered(what: str, name: str, built_in: Collection[str], group: str) -> str:
    """The target of an installed entry point."""
    # For a format of another package, and for errors; slow to import.
    import difflib
    from importlib.metadata import entry_points

    points = {point.name: point.value for point in entry_points(group=group)}
    if name in points:
        return points[name]
    known = [*built_in, *sorted(points)]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}" if close else ""
    raise ConfigError(
        f"{what} {name!r} is unknown{hint}: use one of {', '.join(known)}, or module:attribute"
    )
