"""Loads a policy by name: an entry point in the group `pdserve.policies`, or `module:attribute`.

Only the chosen policy is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.router.policies.base import Policy

__all__ = ["GROUP", "load_policy"]

GROUP = "pdserve.policies"


def load_policy(policy: str, options: Mapping[str, str] | None = None) -> Policy:
    """Loads `policy` and makes it with `options`. Raises `ConfigError` with the remedy."""
    target = policy if ":" in policy else _registered(policy, entry_points(group=GROUP)).value
    module_name, _, attribute = target.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"policy {policy!r} cannot be imported: {error}; install its package, or name its "
            "folder in PYTHONPATH"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"policy {policy!r}: module {module_name} has no {attribute!r}")
        found = getattr(found, part)
    if isinstance(found, type) and dataclasses.is_dataclass(found):
        made = _made(policy, found, options or {})
        _check_call(policy, target, made)
        return cast("Policy", made)
    _check_call(policy, target, found)
    if options:
        raise ConfigError(
            f"policy {policy!r} has no options, {', '.join(sorted(options))} was given"
        )
    return cast("Policy", found)


def _check_call(policy: str, target: str, found: object) -> None:
    """Checks at start-up, not at the first request, that the policy takes a request, a state and a
    `Random`.
    """
    if not callable(found):
        raise ConfigError(f"policy {policy!r}: {target} cannot be called")
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # written in C: it does not say
        return
    try:
        signature.bind(None, None, None)
    except TypeError:
        raise ConfigError(
            f"policy {policy!r}: {target}{signature} does not take (request, state, random)"
        ) from None


def _made(policy: str, kind: type, options: Mapping[str, str]) -> object:
    """An instance with these options. Raises `ConfigError`, also for a `ValueError` from the
    class's `__post_init__`.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, object] = {}
    for name, text in options.items():
        key = name.replace("-", "_")
        if key not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise ConfigError(f"policy {policy!r} has no option {name!r}. Options: {known}")
        values[key] = _parsed(policy, name, text, type(fields[key].default))
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"policy {policy!r}: {error}") from error


def _parsed(policy: str, name: str, text: str, kind: type) -> object:
    parse: Callable[[str], object] = _BOOLEANS.__getitem__ if kind is bool else kind
    try:
        return parse(text)
    except (ValueError, KeyError):
        raise ConfigError(
            f"policy {policy!r}: option {name}={text!r} is no {_KINDS[kind]}"
        ) from None


_KINDS = {float: "number", int: "whole number", bool: "true or false", str: "text"}
_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


def _registered(policy: str, points: Iterable[EntryPoint]) -> EntryPoint:
    by_name = {point.name: point for point in points}
    if policy in by_name:
        return by_name[policy]
    close = difflib.get_close_matches(policy, by_name, n=1)
    hint = f"; did you mean {close[0]!r}" if close else ""
    known = ", ".join(sorted(by_name)) or "none"
    raise ConfigError(f"there is no policy {policy!r}{hint}. Installed: {known}")
