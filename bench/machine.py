"""Describes the machine and the code of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def facts() -> list[str]:
    """Lines for the head of a result file, one per fact."""
    return [
        _COMMIT,
        f"CPU: {_cpu_model()}, {_usable_cpus()} usable",
        f"Kernel: {platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        f"Python: {platform.python_version()} ({platform.python_compiler().strip()})",
    ]


def commit() -> str:
    """Describes the measured commit, and says whether files differ from it."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD").strip()
        changed = _git("status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.CalledProcessError):
        return "Commit: unknown, this is no git checkout"
    return f"Commit: {head}{', with changes that are not committed' if changed else ''}"


def _git(*words: str) -> str:
    done = subprocess.run(
        ("git", *words), cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return done.stdout


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


_COMMIT = commit()
"""The commit when the benchmark begins, because another one may be checked out during a run."""
