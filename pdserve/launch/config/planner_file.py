"""Reads the planner file: objectives, pools and floors, prices, and how workers are started.

    [planner]               paces and limits; all have defaults
    [planner.prices]        KIND = cost of a worker for an hour
    [[planner.pool]]        one model each
    [[planner.pool.floor]]  more workers at some times
    [planner.actuator]      how workers start and stop; `[[planner.actuator]]` for several

Errors name the file, the line, the field and the remedy. Times and objectives have the grammar of
all flags: `30s`, `500ms@p95`. A configuration that could leave a model without a worker is refused
here, and not when the load has gone.
"""

from __future__ import annotations

import re
from dataclasses import fields
from errno import EFBIG, EINVAL
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pdserve.errors import ConfigError
from pdserve.launch.config.units import parse_duration, parse_limit, parse_share
from pdserve.launch.config.worker_flags import check_worker_flags
from pdserve.planner.actuators import ActuatorType, read_actuator
from pdserve.planner.config import Floor, PlannerConfig, PoolConfig
from pdserve.toml import TomlPlaces, nearest, read_toml, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pdserve.planner.config import PlannerMode

__all__ = ["PlannerFile", "parse_planner_file", "read_planner_file"]

_MOST_BYTES: Final = 1 << 20
"""Largest file that is read: some thousands of pools."""
_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_FULL: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_TIME: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)|24:00")
_ELSEWHERE: Final = ("mode", "pools", "prices")
"""Fields of `PlannerConfig` that are a flag, or tables of their own."""
_POOL: Final = (
    *("model", "slo-ttft", "slo-itl", "share", "kinds", "modes", "min", "max", "floor"),
)
_FLOOR: Final = ("days", "from", "to", "zone", "min")
_TABLES: Final = ("pool", "prices", "actuator")


class PlannerFile(NamedTuple):
    """What a planner file says."""

    config: PlannerConfig
    actuators: tuple[tuple[ActuatorType, Any], ...] = ()
    """Each way to start workers, and its settings."""


def read_planner_file(path: Path, mode: PlannerMode = "off") -> PlannerFile:
    """Reads a file. Errors: `ConfigError`."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError(EINVAL, "it is no file")  # a pipe or a device may never end
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise OSError(EFBIG, f"it is larger than {_MOST_BYTES} bytes")
    except OSError as error:
        raise ConfigError(
            f"--planner-file {path} cannot be read: {error.strerror}; examples/planner.toml shows "
            "what is in it",
            param="planner_file",
        ) from None
    return parse_planner_file(data, str(path), mode)


def parse_planner_file(data: bytes, source: str, mode: PlannerMode = "off") -> PlannerFile:
    """Reads a file's content; `source` names it in errors. Errors: `ConfigError`."""
    document = read_toml(data, source)
    places = TomlPlaces(data.decode("utf-8-sig"), source, "planner.pool")
    places.check_names(document, ("planner",), None)
    table = document.get("planner")
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: there is no table [planner]; examples/planner.toml has one")
    values = _settings(table, places)
    pools = table.get("pool", [])
    if not isinstance(pools, list) or not pools or not all(isinstance(one, dict) for one in pools):
        raise places.error(None, "pool", "write each model under its own [[planner.pool]] header")
    config = PlannerConfig(
        mode=mode,
        pools=tuple(_pool(one, number, places) for number, one in enumerate(pools)),
        prices=_prices(table.get("prices", {}), places),
        **values,
    )
    try:
        config.validate()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}", param="planner_file") from None
    actuators = _actuators(table.get("actuator", []), source)
    _check_kinds(config, actuators, source)
    for _, settings in actuators:
        _check_worker_flags(settings, f"{source}: [planner.actuator]")
    return PlannerFile(config, actuators)


def _settings(table: Mapping[str, Any], places: TomlPlaces) -> dict[str, Any]:
    """The settings of `[planner]` as fields of `PlannerConfig`."""
    known = {
        one.name.replace("_", "-"): one
        for one in fields(PlannerConfig)
        if one.name not in _ELSEWHERE
    }
    places.check_names(table, (*known, *_TABLES), None)
    found = {}
    for name, value in table.items():
        if name not in _TABLES:
            field = known[name]
            found[field.name] = _parsed(_BY_TYPE[str(field.type)], value, None, name, places)
    return found


def _parsed(
    parse: Callable[[Any], Any], value: Any, number: int | None, name: str, places: TomlPlaces
) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise places.error(number, name, str(error)) from None


# ---------------------------------------------------------------------- pools


def _pool(table: dict[str, Any], number: int, places: TomlPlaces) -> PoolConfig:
    places.check_names(table, _POOL, number)

    def value(name: str, parse: Callable[[Any], Any], usual: Any) -> Any:
        if name not in table:
            return usual
        return _parsed(parse, table[name], number, name, places)

    ttft, itl = value("slo-ttft", _limit, (None, None)), value("slo-itl", _limit, (None, None))
    shares = {one for _, one in (ttft, itl) if one is not None}
    if "share" in table:
        shares.add(value("share", _share, 0.95))
    if len(shares) > 1:
        raise places.error(
            number, "share", "a pool has one share for both objectives: give it once, as share"
        )
    usual = PoolConfig(model="")
    return PoolConfig(
        model=value("model", _text, ""),
        ttft=ttft[0],
        itl=itl[0],
        share=next(iter(shares), usual.share),
        kinds=value("kinds", _names, ()),
        modes=value("modes", _names, ()),
        min=value("min", _whole, usual.min),
        max=value("max", _whole, usual.max),
        floors=value("floor", lambda given: _floors(given, number, places), ()),
    )


def _floors(given: Any, number: int, places: TomlPlaces) -> tuple[Floor, ...]:
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ValueError("write each under its own [[planner.pool.floor]] header")
    return tuple(_floor(one, number, places) for one in given)


def _floor(table: dict[str, Any], number: int, places: TomlPlaces) -> Floor:
    places.check_names(table, _FLOOR, number)
    usual = Floor()

    def value(name: str, parse: Callable[[Any], Any], other: Any) -> Any:
        return _parsed(parse, table[name], number, name, places) if name in table else other

    return Floor(
        days=value("days", _days, usual.days),
        begin=value("from", _clock, usual.begin),
        end=value("to", _clock, usual.end),
        zone=value("zone", _text, usual.zone),
        min=value("min", _whole, usual.min),
    )


def _prices(given: Any, places: TomlPlaces) -> dict[str, float]:
    if not isinstance(given, dict):
        raise places.error(None, "prices", "must be a table: [planner.prices]")
    return {name: _parsed(_number, price, None, name, places) for name, price in given.items()}


def _actuators(given: Any, source: str) -> tuple[tuple[ActuatorType, Any], ...]:
    """One table, or several. None: the planner switches modes and starts nothing."""
    tables = given if isinstance(given, list) else [given]
    place = f"{source}: [planner.actuator]"
    found = tuple(read_actuator(one, place) for one in tables)
    types = [one["type"] for one in tables]
    if twice := [name for name in types if types.count(name) > 1]:
        raise ConfigError(
            f"{place}: type {twice[0]!r} stands there twice, and actuators are told apart by their "
            "type: put the kinds of both into one",
            param="type",
        )
    return found


def _check_kinds(
    config: PlannerConfig, actuators: Sequence[tuple[ActuatorType, Any]], source: str
) -> None:
    """Kinds of pools and prices must be some actuator's. Agents tell theirs only later, and without
    an actuator nothing is started. Errors: `ConfigError`."""
    tables = [getattr(settings, "kinds", None) for _, settings in actuators]
    if not tables or None in tables:
        return
    known = [name for table in tables if table is not None for name in table]
    named = {kind: f"pool {pool.model!r}" for pool in config.pools for kind in pool.kinds}
    for kind, place in ({name: "[planner.prices]" for name in config.prices} | named).items():
        if kind not in known:
            hint = nearest(kind, known)
            words = f"{source}: {place}: no actuator has kind {readable(kind)!r}; {hint}"
            raise ConfigError(words, param="kinds")


def _check_worker_flags(settings: Any, place: str) -> None:
    """Flags of workers that a command starts: a typing error would be found only as each worker
    ends at its start. Errors: `ConfigError`."""
    check_worker_flags(f"{place} worker", getattr(settings, "worker", ()))
    for name, kind in (getattr(settings, "kinds", None) or {}).items():
        check_worker_flags(f"{place} kinds.{name} worker", getattr(kind, "worker", ()))


# ---------------------------------------------------------------------- values


def _duration(value: Any) -> float:
    if isinstance(value, str):
        return parse_duration(value)
    raise ValueError("must be a time in quotes, such as '30s' or '5min'")


def _limit(value: Any) -> tuple[float, float | None]:
    if isinstance(value, str):
        return parse_limit(value)
    raise ValueError("must be a time in quotes, such as '500ms' or '1s@p95'")


def _share(value: Any) -> float:
    if isinstance(value, str):
        return parse_share(value)
    return _number(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("is too large") from None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text in quotes")
    if not value.isprintable():
        raise ValueError("must be a text without control characters")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list, such as ['decode', 'prefill']")
    return tuple(_text(one) for one in value)


def _names(value: Any) -> tuple[str, ...]:
    """Texts that name something, each once."""
    names = _texts(value)
    if "" in names:
        raise ValueError("a name is empty: leave it out")
    if twice := [one for one in names if names.count(one) > 1]:
        raise ValueError(f"{twice[0]!r} stands there twice: name it once")
    return names


def _days(value: Any) -> frozenset[int]:
    numbers = {name: number for names in (_DAYS, _FULL) for number, name in enumerate(names)}
    names = _texts(value)
    unknown = [one for one in names if one.strip().lower() not in numbers]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no weekday: use {', '.join(_DAYS)}")
    return frozenset(numbers[one.strip().lower()] for one in names)


def _clock(value: Any) -> float:
    match = _TIME.fullmatch(_text(value))
    if match is None:
        raise ValueError(f"{value!r} is no time of a day, such as 08:30")
    return 86400.0 if match[1] is None else int(match[1]) * 3600.0 + int(match[2]) * 60.0


_BY_TYPE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "Seconds": _duration,
    "float": _number,
    "int": _whole,
}
"""By the type of the field."""
