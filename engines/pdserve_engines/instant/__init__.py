"""The instant engine (`--engine=instant`): tokens at once, without a model, to measure everything
else.

`core` says which request fields it honours, `settings` which options it has.
"""

from __future__ import annotations

from pdserve.clock import SystemClock
from pdserve.engine_core.support import EngineSupport
from pdserve_engines.instant.core import InstantCore

__all__ = ["SUPPORT", "InstantCore", "create"]

SUPPORT = EngineSupport(
    exact="all requests", logprobs="made up", prompt_logprobs="made up", devices="none"
)


def create() -> InstantCore:
    """The entry point's factory; the core schedules by itself."""
    return InstantCore(SystemClock())
