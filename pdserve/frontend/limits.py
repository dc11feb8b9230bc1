"""Bounds on work: who may start a request now, and when to come back otherwise.

Pure decisions; time comes in as an argument. `Admission` belongs to the frontend's service; whoever
holds a `Ticket` must release it exactly once, and releasing twice is harmless.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest, Overloaded, RateLimited

if TYPE_CHECKING:
    from pdserve.frontend.keys import ApiKey, KeyLimits
    from pdserve.ids import Seconds

MINUTE: Seconds = 60.0


class Bucket:
    """A token bucket that holds a minute's allowance and refills evenly.

    It may go into debt (`spend`), because output is paid for after it was made.
    """

    __slots__ = ("_level", "_per_second", "_size", "_then")

    def __init__(self, per_minute: int, now: Seconds) -> None:
        self._size = float(per_minute)
        self._per_second = per_minute / MINUTE
        self._level = self._size
        self._then = now

    def wait(self, amount: float, now: Seconds) -> Seconds:
        """Seconds until `amount` is there; 0: now; inf: never, it is more than the bucket holds."""
        self._refill(now)
        if amount > self._size:
            return math.inf
        return max(0.0, (amount - self._level) / self._per_second)

    def spend(self, amount: float, now: Seconds) -> None:
        """Take `amount`, below zero if need be."""
        self._refill(now)
        self._level -= amount

    def _refill(self, now: Seconds) -> None:
        if now > self._then:
            self._level = min(self._size, self._level + (now - self._then) * self._per_second)
            self._then = now


class KeyUse:
    """What one key has in flight and has used lately."""

    __slots__ = ("_limits", "_requests", "_tokens", "concurrent")

    def __init__(self, limits: KeyLimits, now: Seconds) -> None:
        self._limits = limits
        self.concurrent = 0
        rpm, tpm = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = Bucket(rpm, now) if rpm is not None else None
        self._tokens = Bucket(tpm, now) if tpm is not None else None

    def start(self, now: Seconds, retry_after: Seconds) -> None:
        """Count one request. Errors: `RateLimited`, and then nothing was counted."""
        limit = self._limits.max_concurrent_requests
        if limit is not None and self.concurrent >= limit:
            raise RateLimited(
                f"this API key already has {limit} requests in flight", retry_after=retry_after
            )
        if self._requests is not None:
            if wait := self._requests.wait(1, now):
                raise RateLimited(
                    f"this API key is limited to {self._limits.requests_per_minute} requests "
                    "per minute",
                    retry_after=wait,
                )
            self._requests.spend(1, now)
        self.concurrent += 1

    def check_tokens(self, prompt_tokens: int, now: Seconds) -> None:
        """Pay for a prompt.

        Errors: `RateLimited`; `InvalidRequest` for one that no waiting could pay. Then nothing
        was paid.
        """
        if self._tokens is None:
            return
        limit = self._limits.tokens_per_minute
        wait = self._tokens.wait(prompt_tokens, now)
        if math.isinf(wait):
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens, but this API key may use {limit} per "
                "minute; shorten the prompt"
            )
        if wait:
            raise RateLimited(
                f"this API key is limited to {limit} tokens per minute; the prompt has "
                f"{prompt_tokens}",
                retry_after=wait,
            )
        self._tokens.spend(prompt_tokens, now)

    def pay_output(self, tokens: int, now: Seconds) -> None:
        """Pay for what was generated; later requests wait until the debt is gone."""
        if self._tokens is not None:
            self._tokens.spend(tokens, now)


@dataclass(slots=True)
class Ticket:
    """The right to one request in flight."""

    _owner: Admission
    _use: KeyUse | None
    _held: bool = True

    def check_tokens(self, prompt_tokens: int, now: Seconds) -> None:
        """Errors: `RateLimited` when the key's token allowance does not cover the prompt."""
        if self._use is not None:
            self._use.check_tokens(prompt_tokens, now)

    def release(self, output_tokens: int, now: Seconds) -> None:
        """Give the place back and pay for the output. Later calls change nothing."""
        if not self._held:
            return
        self._held = False
        self._owner.in_flight -= 1
        if self._use is not None:
            self._use.concurrent -= 1
            self._use.pay_output(output_tokens, now)


class Admission:
    """The frontend's own bound and those of every key."""

    def __init__(self, max_in_flight: int, retry_after: Seconds) -> None:
        self._max_in_flight = max_in_flight
        self._retry_after = retry_after
        self._uses: dict[bytes, KeyUse] = {}
        self.in_flight = 0

    def admit(self, key: ApiKey | None, now: Seconds) -> Ticket:
        """A place for one more request.

        Errors: `Overloaded` at the frontend's bound, `RateLimited` at the key's.
        """
        if self.in_flight >= self._max_in_flight:
            raise Overloaded(
                f"{self._max_in_flight} requests are in flight, which is this server's limit",
                retry_after=self._retry_after,
            )
        use = None if key is None else self._use(key, now)
        if use is not None:
            use.start(now, self._retry_after)
        self.in_flight += 1
        return Ticket(self, use)

    def forget_keys(self) -> None:
        """The keys were reread: limits start afresh; tickets in flight settle with the old ones."""
        self._uses.clear()

    def _use(self, key: ApiKey, now: Seconds) -> KeyUse:
        use = self._uses.get(key.digest)
        if use is None:
            use = self._uses[key.digest] = KeyUse(key.limits, now)
        return use
