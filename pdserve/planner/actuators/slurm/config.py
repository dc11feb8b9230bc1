"""Settings of the Slurm actuators: `[planner.actuator]` with type `slurm`."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.errors import ConfigError
from pdserve.planner.actuators.settings import (
    CommandKind,
    read_kinds,
    refuse_flags,
    refuse_worker_flags,
)
from pdserve.toml import read_table

__all__ = ["SlurmConfig", "read_config"]

_OWN: Final = (
    *("--comment", "--job-name", "-J", "--parsable", "--requeue", "--no-requeue", "--wrap"),
    *("--array", "-a", "--dependency", "-d", "--signal", "--output", "-o", "--nodes", "-N"),
    *("--ntasks", "-n", "--chdir", "-D", "--jobid", "--overlap", "--exact", "--wait", "-W"),
)


class SlurmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How workers become jobs, or steps of an allocation."""

    directory: str
    """Where outputs are written, and what steps were started: an absolute path on a disk that all
    nodes share."""
    kinds: dict[str, CommandKind]
    """By name; `flags` are for `sbatch`, or for `srun` in an allocation."""
    worker: tuple[str, ...] = ()
    """Flags of every worker."""
    program: str = "pdserve"
    """The executable; the same path on all nodes."""
    allocation: Annotated[int, Meta(ge=0)] = 0
    """Id of a job whose nodes are used: workers are its steps. 0: each worker is a job."""
    warning: Annotated[int, Meta(ge=1, le=3600)] = 90
    """Seconds before its time limit at which a job is told to drain: longer than a drain."""


def read_config(table: object, place: str) -> SlurmConfig:
    """Reads the table; `place` names it in errors. Errors: `ConfigError`."""
    config = read_table(table, SlurmConfig, place)
    if not config.directory.startswith("/"):
        raise ConfigError(f"{place}: directory must be an absolute path on a shared disk")
    assert isinstance(table, dict)
    kinds = read_kinds(table, CommandKind, place)
    refuse_worker_flags(config.worker, place)
    for name, kind in kinds.items():
        refuse_flags(kind.flags, _OWN, f"{place} kinds.{name}")
        refuse_worker_flags(kind.worker, f"{place} kinds.{name}")
    return config
