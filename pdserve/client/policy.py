"""Decides timeouts and retries of requests. Pure: no clock, no network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from pdserve.client.errors import ClientError
    from pdserve.ids import Seconds

__all__ = ["Attempt", "Retries", "Timeouts", "retry_after_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of one request, in seconds."""

    connect: Seconds = 10.0
    """To connect to the server."""
    first: Seconds = 600.0
    """From sending the request to the beginning of the answer; long, for long prompts at a busy
    server."""
    between: Seconds = 120.0
    """Longest silence once the answer has begun."""
    total: Seconds | None = None
    """The whole request with all attempts and pauses; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Exponential back-off with full jitter, unless the server names a time."""

    attempts: int = 4
    """Most attempts, including the first; 1: no retry."""
    first: Seconds = 0.25
    """Longest pause after the first attempt; it doubles with each."""
    most: Seconds = 20.0
    """Longest pause. If the server asks for a longer one, its error is raised."""

    def pause(self, attempt: int, error: ClientError, random: Random) -> Seconds | None:
        """Seconds to wait after this attempt (from 1) has failed; None: do not retry."""
        if not error.retryable or attempt >= self.attempts:
            return None
        if error.retry_after is not None:
            return error.retry_after if error.retry_after <= self.most else None
        return random.uniform(0.0, min(self.most, self.first * 2.0 ** (attempt - 1)))


@dataclass(frozen=True, slots=True)
class Attempt:
    """A failed attempt, for `watch`."""

    request_id: str
    number: int
    """Number of the attempt, from 1."""
    error: ClientError
    pause: Seconds | None
    """Seconds until the next attempt; None: it was the last."""


def retry_after_of(value: str | None, now: float) -> Seconds | None:
    """Parse a Retry-After header: seconds, or a date. None: absent or invalid.

    Args: `now` is the Unix time in seconds.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
