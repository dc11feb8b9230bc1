"""Policy names to policies: entry points in the group `pdserve.policies`, or `module:attribute`.

Nothing is imported before it is chosen.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.router.policies.base import Policy

__all__ = ["GROUP", "installed_policies", "load_policy"]

GROUP = "pdserve.policies"


def installed_policies() -> list[str]:
    """Names of the policies that are registered here."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_policy(policy: str) -> Policy:
    """The function that `policy` names. Raises `ConfigError` with the remedy."""
    target = policy if ":" in policy else _registered(policy, entry_points(group=GROUP)).value
    module_name, _, attribute = target.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"policy {policy!r} cannot be imported: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"policy {policy!r}: module {module_name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"policy {policy!r}: {target} cannot be called")
    return cast("Policy", found)


def _registered(policy: str, points: Iterable[EntryPoint]) -> EntryPoint:
    by_name = {point.name: point for point in points}
    if policy in by_name:
        return by_name[policy]
    close = difflib.get_close_matches(policy, by_name, n=1)
    hint = f"; did you mean {close[0]!r}" if close else ""
    known = ", ".join(sorted(by_name)) or "none"
    raise ConfigError(f"there is no policy {policy!r}{hint}. Installed: {known}")
