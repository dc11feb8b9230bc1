"""Determines how many cores this process may use: minimum of affinity, cgroups and Slurm.

`read_cpu_limits` reads the limits, `CpuLimits` decides. It starts no thread and sets no affinity.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.limits.cgroups import groups, read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.limits.cgroups import Cgroup


@dataclass(frozen=True, slots=True)
class CpuLimits:
    """CPU limits of this process; None for a limit that does not exist."""

    logical: int
    """Logical CPUs of the affinity mask."""
    cores: int
    """Distinct physical cores among them: two threads on one core seldom speed up arithmetic."""
    quota: float | None = None
    """CPUs that a control group's quota allows."""
    slurm: int | None = None
    """SLURM_CPUS_PER_TASK."""

    @property
    def threads(self) -> int:
        """Number of compute threads to start, at least 1."""
        bounds = [self.cores]
        if self.quota is not None:
            bounds.append(math.floor(self.quota))
        if self.slurm is not None:
            bounds.append(self.slurm)
        return max(1, min(bounds))

    @property
    def reason(self) -> str:
        """The limit that decided, in words."""
        if self.slurm is not None and self.slurm == self.threads < self.cores:
            return "SLURM_CPUS_PER_TASK"
        if self.quota is not None and self.threads < self.cores:
            return f"control group quota of {self.quota:g} CPUs"
        if self.cores < self.logical:
            return f"physical cores ({self.logical} hardware threads)"
        return "CPU affinity"


def read_cpu_limits(
    environ: Mapping[str, str] = os.environ, root: Path = Path("/"), pid: int = 0
) -> CpuLimits:
    """Reads this machine's limits. `root` replaces `/` in tests; `pid` 0 is this process."""
    cpus = _affinity(pid)
    return CpuLimits(
        logical=len(cpus),
        cores=_physical_cores(cpus, root),
        quota=_cgroup_quota(root),
        slurm=_slurm(environ),
    )


def _affinity(pid: int) -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(pid)
    # This platform has no CPU affinity.
    return set(range(os.cpu_count() or 1))


def _physical_cores(cpus: set[int], root: Path) -> int:
    """Number of physical cores; each CPU counts if the topology is unknown."""
    topology = root / "sys/devices/system/cpu"
    cores = {read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    return len(cores)


def _slurm(environ: Mapping[str, str]) -> int | None:
    text = environ.get("SLURM_CPUS_PER_TASK", "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _cgroup_quota(root: Path) -> float | None:
    """The smallest quota from this process's group up to the root, for cgroup v1 or v2."""
    quotas = [_quota(group) for group in groups("cpu", root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Cgroup) -> float | None:
    if group.version == 2:
        share, _, period = (read(group.folder / "cpu.max") or "max").partition(" ")
        return None if share == "max" else int(share) / int(period or 100_000)
    microseconds = int(read(group.folder / "cpu.cfs_quota_us") or -1)
    period = read(group.folder / "cpu.cfs_period_us") or "100000"
    return microseconds / int(period) if microseconds > 0 else None
