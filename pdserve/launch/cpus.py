"""How many cores this process may compute on: the least of affinity, control groups and Slurm.

Reading is separate from deciding: `read_limits` looks, `CpuLimits` says what follows. It
starts no thread and sets no affinity.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_QuotaOf = Callable[[Path], float | None]
_V1_FOLDERS = ("cpu,cpuacct", "cpuacct,cpu", "cpu")


@dataclass(frozen=True, slots=True)
class CpuLimits:
    """What bounds this process; None where a bound does not exist."""

    logical: int
    """CPUs of the affinity mask, hardware threads counted singly."""
    cores: int
    """Distinct physical cores among them: sharing one seldom helps arithmetic."""
    quota: float | None = None
    """CPUs' worth of time a control group grants."""
    slurm: int | None = None
    """SLURM_CPUS_PER_TASK."""

    @property
    def threads(self) -> int:
        """Compute threads worth starting, at least 1."""
        bounds = [self.cores]
        if self.quota is not None:
            bounds.append(math.floor(self.quota))
        if self.slurm is not None:
            bounds.append(self.slurm)
        return max(1, min(bounds))

    @property
    def reason(self) -> str:
        """Which bound decided, in words."""
        if self.slurm is not None and self.slurm == self.threads < self.cores:
            return "SLURM_CPUS_PER_TASK"
        if self.quota is not None and self.threads < self.cores:
            return f"control group quota of {self.quota:g} CPUs"
        if self.cores < self.logical:
            return f"physical cores ({self.logical} hardware threads)"
        return "CPU affinity"


def read_limits(
    environ: Mapping[str, str] = os.environ, root: Path = Path("/"), pid: int = 0
) -> CpuLimits:
    """Look at this machine. `root` stands in for `/` in tests; `pid` 0 is this process."""
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
    return set(range(os.cpu_count() or 1))  # no affinity on this platform


def _physical_cores(cpus: set[int], root: Path) -> int:
    """CPUs that are siblings of one core count once; unknown topology counts each."""
    topology = root / "sys/devices/system/cpu"
    cores = {
        _read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus
    }
    return len(cores)


def _slurm(environ: Mapping[str, str]) -> int | None:
    text = environ.get("SLURM_CPUS_PER_TASK", "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _cgroup_quota(root: Path) -> float | None:
    """The least quota from this process's group up to the root, of either version."""
    quotas = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += _walk(root / "sys/fs/cgroup", path, _quota_v2)
        elif "cpu" in controllers.split(","):
            for folder in _V1_FOLDERS:
                quotas += _walk(root / "sys/fs/cgroup" / folder, path, _quota_v1)
    return min(quotas, default=None)


def _walk(mount: Path, path: str, quota_of: _QuotaOf) -> list[float]:
    """Quotas along `path` below `mount`. Inside a container only the mount's own may exist."""
    group = mount / path.lstrip("/")
    groups = [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    return [quota for folder in groups if (quota := quota_of(folder)) is not None]


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
    return None if quota == "max" else int(quota) / int(period or 100_000)


def _quota_v1(folder: Path) -> float | None:
    quota = int(_read(folder / "cpu.cfs_quota_us") or -1)
    period = int(_read(folder / "cpu.cfs_period_us") or 100_000)
    return quota / period if quota > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
