"""`--engine=sim`: pdserve's scheduler and KV pool, a timing model instead of a model.

See `settings` for its options, `timing` for the kinds of workers it can be, docs/simulation.md for
what it is good for.
"""

from __future__ import annotations

from pdserve_engines.sim.core import SimCore
from pdserve_engines.sim.executor import SimExecutor

__all__ = ["SimCore", "SimExecutor", "create"]


def create() -> SimExecutor:
    """The factory behind the entry point; it brings a core of its own."""
    return SimExecutor()
