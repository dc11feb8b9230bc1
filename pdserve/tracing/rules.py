"""Says which requests are traced, as an operator sets it.

It imports nothing, because the command line reads it for its help. `keep.py` applies the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["PARENT_MODES", "ParentMode", "TraceRules"]

ParentMode = Literal["trust", "limit", "ignore"]
"""What the caller's sampled bit does: it always counts, it counts up to a rate, or it does not."""

PARENT_MODES: Final[tuple[ParentMode, ...]] = ("trust", "limit", "ignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRules:
    """Which requests are traced."""

    sample: float = 0.01
    """Share of requests whose traces are kept by lot."""
    rate: float = 50.0
    """Most traces that are kept per second; 0: nothing is recorded."""
    parent: ParentMode = "limit"
