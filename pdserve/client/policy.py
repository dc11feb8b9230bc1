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
    """Deadlines of one request."""

    connect: Seconds = 10.0
    """To reach the server."""
    first: Seconds = 600.0
    """From sending until the answer begins; a long prompt at a busy server takes its time."""
    between: Seconds = 120.0
    """Without a byte, once it has begun."""
    total: Seconds | None = None
    """All of it, with every attempt and the pauses between them; None: as long as it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Exponential pauses with full jitter, unless the server says how long to wait."""

    attempts: int = 4
    """Including the first; 1: never again."""
    first: Seconds = 0.25
    """Longest pause after the first attempt; it doubles with each."""
    most: Seconds = 20.0
    """Longest pause of all. A server that asks for longer has its error raised instead."""

    def pause(self, attempt: int, error: ClientError, random: Random) -> Seconds | None:
        """Before the next attempt, after this one (from 1) failed; None: there is none."""
        if not error.retryable or attempt >= self.attempts:
            return None
        if error.retry_after is not None:
            return error.retry_after if error.retry_after <= self.most else None
        return random.uniform(0.0, min(self.most, self.first * 2.0 ** (attempt - 1)))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that failed, for whoever watches."""

    request_id: str
    number: int
    """From 1."""
    error: ClientError
    pause: Seconds | None
    """Until the next; None: it was the last."""


def retry_after_of(value: str | None, now: float) -> Seconds | None:
    """Of a Retry-After header: seconds, or a date. None: absent, or nonsense.

    Args: `now` is seconds since 1970.
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
