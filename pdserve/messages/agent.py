"""Defines what an actuator says to the agent of a host, which starts workers there."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.ids import CHANGE_PATTERN
from pdserve.messages.planner import Instance, Kind

__all__ = ["AgentQuery", "AgentReport", "StartWorker", "StopTaken", "StopWorker"]

Count = Annotated[int, Meta(ge=0)]
ChangeId = Annotated[str, Meta(pattern=CHANGE_PATTERN)]


class StartWorker(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Has an agent start a worker; the answer is its `Instance`. The agent's operator has said what
    the worker's flags are: the order can only choose among kinds and modes."""

    change: ChangeId
    kind: Annotated[str, Meta(max_length=200)]
    mode: Annotated[str, Meta(max_length=64)]


class StopWorker(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Has an agent end a worker: SIGTERM now, SIGKILL after the grace."""

    change: ChangeId
    grace: Annotated[float, Meta(ge=0, le=86400)]
    """Seconds."""


class StopTaken(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The answer to `StopWorker`."""

    known: bool = True
    """False: the agent never started a worker for this change."""


class AgentQuery(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Asks an agent for its report."""


class AgentReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an agent can start, and what it has started."""

    kinds: tuple[Kind, ...] = ()
    free: dict[str, Count] = {}
    """By kind: how many more it could start now. Kinds may share slots."""
    instances: tuple[Instance, ...] = ()
    """Workers that run, and those that ended not long ago."""
    directory: str = ""
    """Where its records are, and the workers' logs: `CHANGE.log`."""
