"""Workers as jobs of Slurm, or as steps of one allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.planner.actuators.slurm.config import SlurmConfig, read_config
from pdserve.planner.actuators.slurm.jobs import SlurmJobs
from pdserve.planner.actuators.slurm.steps import SlurmSteps

if TYPE_CHECKING:
    from pdserve.planner.actuators.base import Actuator
    from pdserve.planner.actuators.settings import Home

__all__ = ["SlurmConfig", "SlurmJobs", "SlurmSteps", "make", "read_config"]


def make(config: SlurmConfig, home: Home) -> Actuator:
    """The actuator of these settings."""
    return SlurmSteps(config, home) if config.allocation else SlurmJobs(config, home)
