"""The instant engine (`--engine=instant`): tokens at once, without a model, to measure everything
else.

`core` says which request fields it honours, `settings` which options it has.
"""

from __future__ import annotations

from pdserve.clock import SystemClock
from pdserve_engines.instant.core import InstantCore

__all__ = ["InstantCore", "create"]


def create() -> InstantCore:
    """The entry point's factory; the core schedules by itself."""
    return InstantCore(SystemClock())
