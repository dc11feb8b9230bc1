"""Counts the processors that this process may use.

The launcher normally chooses the number of threads, with more information; this count serves an
executor that got no number.
"""

from __future__ import annotations

import os


def available_cpus() -> int:
    """Processors in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
