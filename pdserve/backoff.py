"""Computes exponential back-off: delays that double up to a maximum.

Pure arithmetic without time or randomness; callers add their own jitter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["backoff_delay"]

_DOUBLINGS: Final = 64
"""More doublings than from a nanosecond to a year; 2.0 ** 1100 would overflow."""


def backoff_delay(first: Seconds, most: Seconds, failures: int) -> Seconds:
    """The delay, without jitter, after a failure that `failures` others preceded."""
    return min(most, first * 2.0 ** min(failures, _DOUBLINGS))
