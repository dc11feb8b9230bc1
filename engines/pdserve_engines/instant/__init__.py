"""The instant engine (`--engine=instant`): tokens at once, without a model, to measure all else.

`core` tells which request fields it honours, `settings` which options it has.
"""

from __future__ import annotations

from pdserve.clock import SystemClock
from pdserve_engines.instant.core import InstantCore

__all__ = ["InstantCore", "create"]


def create() -> InstantCore:
    """The factory behind the entry point; the core schedules for itself."""
    return InstantCore(SystemClock())
