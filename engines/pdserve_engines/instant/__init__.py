"""`--engine=instant`: tokens at once, without a model, for measuring everything else.

See `core` for what it honours and which options it has.
"""

from __future__ import annotations

from pdserve.clock import SystemClock
from pdserve_engines.instant.core import InstantCore

__all__ = ["InstantCore", "create"]


def create() -> InstantCore:
    """The factory behind the entry point; the core schedules for itself."""
    return InstantCore(SystemClock())
