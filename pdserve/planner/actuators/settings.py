"""Defines what the settings of actuators share: kinds of workers, and the command of a worker.

It does not know how a command is run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from pdserve.errors import ActuatorDenied, ConfigError
from pdserve.messages.planner import Kind
from pdserve.toml import nearest, read_table, readable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.runtime.node import Node

__all__ = [
    "CommandKind",
    "Home",
    "PlainKind",
    "find_kind",
    "kinds_of",
    "read_kinds",
    "refuse_flags",
    "refuse_worker_flags",
    "worker_command",
]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_OWN: Final = ("--role", "--mode", "--change")
"""Flags that the actuator writes itself."""

Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Amount = Annotated[float, Meta(ge=0, lt=1e9)]


class PlainKind(msgspec.Struct, frozen=True, kw_only=True):
    """What every kind of worker has: a table `[planner.actuator.kinds.NAME]`."""

    slots: Count = 0
    """Most instances at once; 0: as many as there is room for."""
    price: Amount = 1.0
    """Cost of an instance for an hour, in the operator's unit."""


class CommandKind(PlainKind, frozen=True, kw_only=True):
    """A kind that a command starts."""

    flags: tuple[str, ...] = ()
    """More flags for the command that starts it: partition, GPUs, time limit, limits of a unit."""
    worker: tuple[str, ...] = ()
    """More flags for its worker, after those of all kinds."""


K = TypeVar("K", bound=PlainKind)


class Home(NamedTuple):
    """The cluster that started workers join, as the planner's process knows it."""

    cluster: str
    """Its name. Actuators of two clusters leave each other's workers alone."""
    flags: tuple[str, ...] = ()
    """Flags that lead a worker into it: `--join`, `--cluster`, `--cluster-key-file`."""
    node: Node | None = None
    """The planner's node, for actuators that ask other nodes."""
    acts: bool = True
    """False: the planner only advises, so reading changes nothing."""


def read_kinds(table: Mapping[str, Any], record: type[K], place: str) -> dict[str, K]:
    """Reads `kinds` of an actuator's table, each a table of its own.

    Args: `place` names the actuator's table in errors, as `file: [planner.actuator]`.

    Errors: `ConfigError`, also if there is no kind: such an actuator can start nothing.
    """
    kinds = table.get("kinds")
    if not isinstance(kinds, dict) or not kinds:
        raise ConfigError(
            f"{place}: no kind of worker: add a table [planner.actuator.kinds.NAME]", param="kinds"
        )
    if wrong := [name for name in kinds if not _NAME.fullmatch(name)]:
        raise ConfigError(
            f"{place}: kind {readable(wrong[0])!r}: a name has 1 to 32 letters, digits, dots, "
            "dashes and underscores",
            param="kinds",
        )
    return {name: read_table(one, record, f"{place} kinds.{name}") for name, one in kinds.items()}


def kinds_of(actuator: str, kinds: Mapping[str, PlainKind]) -> list[Kind]:
    """The records of the port."""
    return [
        Kind(name=name, actuator=actuator, slots=one.slots, price=one.price)
        for name, one in kinds.items()
    ]


def find_kind(kinds: Mapping[str, K], name: str) -> K:
    """Looks a kind up. Errors: `ActuatorDenied`, with the nearest name."""
    if name in kinds:
        return kinds[name]
    raise ActuatorDenied(f"no kind {readable(name)!r}; {nearest(name, kinds)}")


def refuse_flags(flags: Sequence[str], owned: Sequence[str], place: str) -> None:
    """Errors: `ConfigError` for a flag that the actuator itself writes, and for one that no command
    line takes."""
    for flag in flags:
        if "\0" in flag:
            raise ConfigError(f"{place}: {readable(flag)} has a NUL character: leave it out")
        name = flag.partition("=")[0]
        if name in owned:
            raise ConfigError(f"{place}: leave {readable(name)} out: the actuator sets it")


def worker_command(
    program: str, mode: str, change: str, home: Home, *flags: Sequence[str]
) -> list[str]:
    """The command line of a worker. Later `flags` win over earlier ones, and the actuator's own
    over all."""
    more = [flag for some in flags for flag in some]
    return [program, *home.flags, *more, "--role=worker", f"--mode={mode}", f"--change={change}"]


def refuse_worker_flags(flags: Sequence[str], place: str) -> None:
    """Errors: `ConfigError` for a worker's flag that the actuator itself writes."""
    refuse_flags(flags, _OWN, place)
