"""Decides whether a request may start now, and otherwise when the client should retry.

Pure: the caller passes times. The frontend's service owns `Admission`. The holder of an
`AdmissionTicket` releases it; a second release has no effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.errors import InvalidRequest, Overloaded, RateLimited

if TYPE_CHECKING:
    from pdserve.frontend.access.api_keys import ApiKey, KeyLimits
    from pdserve.ids import Seconds

MINUTE: Seconds = 60.0
_FARTHEST: Final[Seconds] = 60.0
"""Longest Retry-After in seconds; the load further ahead cannot be known."""
_ROOM: Final = 0.9
"""Below this fraction of places in use, earlier Retry-After times are forgotten."""
_NEWEST: Final = 1 / 16
"""Weight of the newest request in the moving average of durations."""


class TokenBucket:
    """A token bucket that holds a minute's allowance and refills evenly.

    Its level may fall below zero (`spend`), because output is charged after it was generated.
    """

    __slots__ = ("_level", "_per_second", "_size", "_then")

    def __init__(self, per_minute: int, now: Seconds) -> None:
        self._size = float(per_minute)
        self._per_second = per_minute / MINUTE
        self._level = self._size
        self._then = now

    def wait(self, amount: float, now: Seconds) -> Seconds:
        """Seconds until `amount` is available; 0: now; inf: never, because the bucket is
        smaller."""
        self._refill(now)
        if amount > self._size:
            return math.inf
        return max(0.0, (amount - self._level) / self._per_second)

    def spend(self, amount: float, now: Seconds) -> None:
        """Takes `amount`; the level may fall below zero."""
        self._refill(now)
        self._level -= amount

    def _refill(self, now: Seconds) -> None:
        if now > self._then:
            self._level = min(self._size, self._level + (now - self._then) * self._per_second)
            self._then = now


class ConcurrencyLimit:
    """A number of places that requests hold while they run.

    Refused requests get Retry-After times spread at the rate at which places become free, the first
    one when the oldest request is likely to end. So clients that follow them find a place and do
    not all come at once.
    """

    __slots__ = ("_called_back", "_held", "_mean", "_most", "_unknown")

    def __init__(self, most: int, unknown: Seconds) -> None:
        """`unknown`: Retry-After in seconds before any request has ended."""
        self._most = most
        self._unknown = unknown
        self._held: dict[int, Seconds] = {}
        """Start times by number; the oldest first."""
        self._mean: Seconds | None = None
        self._called_back: Seconds = 0.0
        """The latest time that a refused request was told to come back."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def full(self) -> bool:
        return len(self._held) >= self._most

    def take(self, number: int, now: Seconds) -> None:
        if len(self._held) < _ROOM * self._most:
            # With this much room, clients that were called back find a place in any case.
            self._called_back = 0.0
        self._held[number] = now

    def leave(self, number: int, now: Seconds) -> None:
        took = now - self._held.pop(number)
        mean = self._mean
        self._mean = took if mean is None else mean + (took - mean) * _NEWEST

    def call_back(self, now: Seconds) -> Seconds:
        """Retry-After in seconds for one more refused request."""
        mean = self._mean
        if mean is None or not self._held:
            return self._unknown
        first = max(now, next(iter(self._held.values())) + mean)
        # Retry-After counts whole seconds, so clients that were called back come together, and
        # their places become free together.
        at = max(first, self._called_back) + math.ceil(mean) / self._most
        self._called_back = min(at, now + _FARTHEST)
        return max(self._called_back - now, 0.0)


class KeyUsage:
    """Requests in flight and recent use of one key."""

    __slots__ = ("_limits", "_places", "_requests", "_tokens")

    def __init__(self, limits: KeyLimits, now: Seconds, unknown: Seconds) -> None:
        self._limits = limits
        most = limits.max_concurrent_requests
        self._places = None if most is None else ConcurrencyLimit(most, unknown)
        rpm, tpm = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = TokenBucket(rpm, now) if rpm is not None else None
        self._tokens = TokenBucket(tpm, now) if tpm is not None else None

    def check(self, now: Seconds) -> None:
        """Errors: `RateLimited` if one more request cannot start now."""
        limit, places = self._limits.max_concurrent_requests, self._places
        if places is not None and places.full:
            raise RateLimited(
                f"this API key already has {limit} requests in flight",
                retry_after=places.call_back(now),
            )
        if self._requests is not None and (wait := self._requests.wait(1, now)):
            raise RateLimited(
                f"this API key is limited to {self._limits.requests_per_minute} requests "
                "per minute",
                retry_after=wait,
            )

    def start(self, number: int, now: Seconds) -> None:
        """Counts a request that passed `check`."""
        if self._requests is not None:
            self._requests.spend(1, now)
        if self._places is not None:
            self._places.take(number, now)

    def end(self, number: int, output_tokens: int, now: Seconds) -> None:
        """Frees the place and charges the output; later requests wait while the level is below
        zero."""
        if self._places is not None:
            self._places.leave(number, now)
        if self._tokens is not None:
            self._tokens.spend(output_tokens, now)

    def check_tokens(self, prompt_tokens: int, now: Seconds) -> None:
        """Charges a prompt.

        Errors: `RateLimited`; `InvalidRequest` for a prompt larger than the whole allowance. Then
        nothing is charged.
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


@dataclass(slots=True)
class AdmissionTicket:
    """The right to one request in flight."""

    _owner: Admission
    _use: KeyUsage | None
    _number: int
    _held: bool = True

    def check_tokens(self, prompt_tokens: int, now: Seconds) -> None:
        """Errors: `RateLimited` when the key's token allowance does not cover the prompt."""
        if self._use is not None:
            self._use.check_tokens(prompt_tokens, now)

    def release(self, output_tokens: int, now: Seconds) -> None:
        """Frees the place and charges the output. Idempotent."""
        if not self._held:
            return
        self._held = False
        self._owner.places.leave(self._number, now)
        if self._use is not None:
            self._use.end(self._number, output_tokens, now)


class Admission:
    """The limits of the frontend and of every key."""

    def __init__(self, max_in_flight: int, retry_after: Seconds) -> None:
        self._max_in_flight = max_in_flight
        self._retry_after = retry_after
        self._uses: dict[bytes, KeyUsage] = {}
        self._admitted = 0
        self.places = ConcurrencyLimit(max_in_flight, retry_after)

    @property
    def in_flight(self) -> int:
        return len(self.places)

    def check(self, key: ApiKey | None, now: Seconds) -> None:
        """Checks whether one more request could start now; counts nothing.

        Errors: `Overloaded` at the frontend's limit, `RateLimited` at the key's.
        """
        if self.places.full:
            raise Overloaded(
                f"{self._max_in_flight} requests are in flight, which is this server's limit",
                retry_after=self.places.call_back(now),
            )
        if key is not None:
            self._use(key, now).check(now)

    def admit(self, key: ApiKey | None, now: Seconds) -> AdmissionTicket:
        """Takes a place for one more request. Errors: those of `check`."""
        self.check(key, now)
        self._admitted += 1
        number = self._admitted
        use = None if key is None else self._use(key, now)
        if use is not None:
            use.start(number, now)
        self.places.take(number, now)
        return AdmissionTicket(self, use, number)

    def forget_keys(self) -> None:
        """Forgets all use after the key file was read again; tickets in flight settle with the old
        records."""
        self._uses.clear()

    def _use(self, key: ApiKey, now: Seconds) -> KeyUsage:
        use = self._uses.get(key.digest)
        if use is None:
            use = self._uses[key.digest] = KeyUsage(key.limits, now, self._retry_after)
        return use
