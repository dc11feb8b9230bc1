"""Finds and loads engines: entry points in the group `pdserve.engines`, or `module:attribute`.

An entry point names a factory without arguments. It returns an `Executor`, which pdserve's
scheduler drives, or a whole `Core`, for engines that schedule by themselves. Methods tell them
apart: a core has `step`, an executor has `execute`, and an executor that needs a core of its own
has `make_core(clock, mover)`. Factories must be cheap; `load` does the loading, with progress.

Only the chosen engine is imported, so an engine with a missing library does not disturb the others.
"""

from __future__ import annotations

import difflib
import importlib
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.engine_libraries import is_missing, lacking, needed_libraries, remedy
from pdserve.engine_core.kit import Core, kv_transfer_unsupported
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve.clock import Clock
    from pdserve.engine_core.executor import Executor
    from pdserve.engine_core.kv_transfer.connector import KvConnector

__all__ = [
    "ENTRY_POINT_GROUP",
    "import_early",
    "installed_engines",
    "load_core",
    "make_engine",
    "missing_parts",
    "wrap_core",
]

ENTRY_POINT_GROUP = "pdserve.engines"


def installed_engines() -> list[str]:
    """Names of all registered engines, also of those whose libraries are missing."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def missing_parts(engine: str) -> list[str]:
    """What this machine lacks for a registered engine, in words; empty: nothing is known to lack.

    Asks the function `missing()` of the entry point's module, if it has one. Libraries of pdserve's
    own engines are looked for without importing them.
    """
    needed = needed_libraries(engine)
    if needed:
        return [f"the package {name}: {remedy(name)}" for name in needed if is_missing(name)]
    point = _registered(engine, entry_points(group=ENTRY_POINT_GROUP))
    try:
        ask = getattr(importlib.import_module(point.module), "missing", list)
    except ImportError as error:
        return [str(error)]
    return list(ask())


def import_early(engine: str) -> None:
    """Import the engine's module before it is loaded, which then meets the errors ignored here."""
    with suppress(Exception):
        _ = _factory(engine)


def load_core(
    engine: str, clock: Clock, mover: KvConnector | None = None, *, optional: bool = False
) -> Core:
    """Make the core of `engine`. Raises `ConfigError`, which names a remedy."""
    return wrap_core(engine, make_engine(engine), clock, mover, optional=optional)


def make_engine(engine: str) -> object:
    """Call the engine's factory; returns an executor or a core. Raises `ConfigError`."""
    return _factory(engine)()


def wrap_core(
    engine: str,
    made: object,
    clock: Clock,
    mover: KvConnector | None = None,
    *,
    optional: bool = False,
) -> Core:
    """Make the core that drives what the factory returned. Raises `ConfigError` if that is neither
    an executor nor a core.

    With a `mover` the core exchanges KV with other workers. A core that schedules by itself needs
    `use_connector` for that, as `StagedCore` has. Without it, it is refused, or runs without KV
    transfer if that is `optional`.
    """
    if hasattr(made, "step"):
        if mover is not None and hasattr(made, "use_connector"):
            made.use_connector(mover)
        elif mover is not None and not optional:
            raise kv_transfer_unsupported(engine)
        return cast("Core", made)
    if hasattr(made, "make_core"):
        return cast("Core", made.make_core(clock, mover))
    if hasattr(made, "execute"):
        return EngineCore(cast("Executor", made), clock, mover)
    raise ConfigError(f"engine {engine!r} made a {type(made).__name__}, not an executor or core")


def _factory(engine: str) -> Callable[[], object]:
    target = (
        engine
        if ":" in engine
        else _registered(engine, entry_points(group=ENTRY_POINT_GROUP)).value
    )
    module_name, _, attribute = target.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _missing(engine, module_name, error.name or "") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"engine {engine!r}: module {module_name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"engine {engine!r}: {target} cannot be called")
    return cast("Callable[[], object]", found)


def _registered(engine: str, points: Iterable[EntryPoint]) -> EntryPoint:
    by_name = {point.name: point for point in points}
    if engine in by_name:
        return by_name[engine]
    close = difflib.get_close_matches(engine, by_name, n=1)
    hint = f"; did you mean {close[0]!r}" if close else ""
    known = ", ".join(sorted(by_name)) or "none"
    raise ConfigError(f"there is no engine {engine!r}{hint}. Installed: {known}")


def _missing(engine: str, module_name: str, missing: str) -> ConfigError:
    """The error for a missing module: the engine's own, or a library that it imports."""
    if module_name == missing or module_name.startswith(f"{missing}."):
        return ConfigError(f"engine {engine!r}: there is no module {missing!r}")
    return lacking(engine, missing)
