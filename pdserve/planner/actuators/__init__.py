"""Starts and stops workers: one file or folder per way to do it, behind the port in `base`.

`ACTUATORS` has them by the name that `type` of `[planner.actuator]` has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pdserve.errors import ConfigError
from pdserve.planner.actuators import agents, kubernetes, slurm, systemd
from pdserve.planner.actuators.settings import Home
from pdserve.toml import nearest, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.planner.actuators.base import Actuator

__all__ = ["ACTUATORS", "ActuatorType", "Home", "read_actuator"]


class ActuatorType(NamedTuple):
    """One way to start workers."""

    read: Callable[[object, str], Any]
    """Reads its table, without `type`, as its record of settings; the second argument names the
    table in errors. Raises `ConfigError`."""
    make: Callable[[Any, Home], Actuator]
    """Makes the actuator of the settings, for a cluster."""


ACTUATORS: Final[Mapping[str, ActuatorType]] = {
    "agents": ActuatorType(agents.read_config, agents.make),
    "kubernetes": ActuatorType(kubernetes.read_config, kubernetes.Deployments),
    "slurm": ActuatorType(slurm.read_config, slurm.make),
    "systemd": ActuatorType(systemd.read_config, systemd.Systemd),
}


def read_actuator(table: object, place: str) -> tuple[ActuatorType, Any]:
    """Reads `[planner.actuator]`: which one, and its settings for `ActuatorType.make`.

    Args: `place` names the table in errors, as `planner.toml: [planner.actuator]`.

    Errors: `ConfigError`, with the nearest name for an unknown one.
    """
    if not isinstance(table, dict) or not isinstance(table.get("type"), str):
        raise ConfigError(f"{place}: type is missing: use one of {', '.join(ACTUATORS)}")
    name = table["type"]
    if name not in ACTUATORS:
        hint = nearest(name, ACTUATORS)
        raise ConfigError(f"{place}: type {readable(name)!r} is unknown; {hint}", param="type")
    rest = {key: value for key, value in table.items() if key != "type"}
    return ACTUATORS[name], ACTUATORS[name].read(rest, place)
