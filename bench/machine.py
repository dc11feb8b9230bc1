"""What a result must say about the machine it was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def facts() -> list[str]:
    """One line per fact, for the head of a result file."""
    return [
        f"CPU: {_cpu_model()}, {_usable_cpus()} usable",
        f"Kernel: {platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        f"Python: {platform.python_version()} ({platform.python_compiler().strip()})",
    ]


def _usable_cpus() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
