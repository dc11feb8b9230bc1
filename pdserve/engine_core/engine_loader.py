"""Engine names to engines: entry points in the group `pdserve.engines`, or `module:attribute`.

What is found is a factory without arguments that returns an `Executor`, which pdserve's scheduler
then drives, or a whole `Core` for engines that schedule for themselves. Which of the two shows by
its methods: a core has `step`, an executor has `execute`, and an executor that is to be driven in a
way of its own has `make_core(clock, mover)`. Factories must be cheap; loading happens in their
`load`, with progress.

Nothing is imported before it is chosen, so an engine whose library is missing costs nothing until
someone asks for it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.kit import Core, kv_transfer_unsupported
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve.clock import Clock
    from pdserve.engine_core.executor import Executor
    from pdserve.engine_core.kv_transfer.connector import KvConnector

__all__ = [
    "ENTRY_POINT_GROUP",
    "check_installed",
    "installed_engines",
    "load_core",
    "make_engine",
    "wrap_core",
]

ENTRY_POINT_GROUP = "pdserve.engines"

_EXTRAS = {"torch": "torch", "numpy": "torch", "safetensors": "torch", "tensorrt_llm": "trtllm"}
"""Import name of a library that an engine needs -> the extra of pdserve that brings it."""


_NEEDS = {"torch": ("torch", "numpy")}
"""Engine name -> libraries that are not pdserve's own."""


def check_installed(engine: str) -> None:
    """Before anything is started for it; nothing is imported. Raises `ConfigError` for a library
    that one of pdserve's engines needs and is not there."""
    for name in _NEEDS.get(engine, ()):
        if importlib.util.find_spec(name) is None:
            raise _lacking(engine, name)


def installed_engines() -> list[str]:
    """Names of the engines that are registered here, whether or not their libraries are."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def load_core(
    engine: str, clock: Clock, mover: KvConnector | None = None, *, optional: bool = False
) -> Core:
    """The core that drives `engine`. Raises `ConfigError` with the remedy."""
    return wrap_core(engine, make_engine(engine), clock, mover, optional=optional)


def make_engine(engine: str) -> object:
    """What the engine's factory makes: an executor or a core. Raises `ConfigError`."""
    return _factory(engine)()


def wrap_core(
    engine: str,
    made: object,
    clock: Clock,
    mover: KvConnector | None = None,
    *,
    optional: bool = False,
) -> Core:
    """The core that drives what the factory made. Raises `ConfigError` if it is neither.

    With a `kv_transfer.connector` it exchanges KV with others. A core that schedules for itself has
    none to exchange: asked to, it is refused, or goes without if that is `optional`.
    """
    if hasattr(made, "step"):
        if mover is not None and not optional:
            raise kv_transfer_unsupported(engine)
        return cast("Core", made)
    if hasattr(made, "make_core"):
        return cast("Core", made.make_core(clock, mover))
    if hasattr(made, "execute"):
        return EngineCore(cast("Executor", made), clock, mover)
    raise ConfigError(f"engine {engine!r} made a {type(made).__name__}: no executor and no core")


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
    """The engine's own module is not there, or a library that it imports is not."""
    if module_name == missing or module_name.startswith(f"{missing}."):
        return ConfigError(f"engine {engine!r}: there is no module {missing!r}")
    return _lacking(engine, missing)


def _lacking(engine: str, library: str) -> ConfigError:
    extra = _EXTRAS.get(library.partition(".")[0])
    remedy = f"pip install 'pdserve[{extra}]'" if extra else f"install {library!r}"
    return ConfigError(
        f"engine {engine!r} needs {library!r}, which is not installed: {remedy}; or try pdserve "
        "without a model's arithmetic, with --engine sim"
    )
