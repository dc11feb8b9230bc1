"""Publishes a value that replaces the one before: a subscriber gets the latest, never old values.

Plain synchronous code. It knows neither what the values mean nor how they travel; `service` polls
each feed when its stream has credit. Owned by the publishing node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pdserve.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.wire.parser import Buffer

__all__ = ["StateFeed", "StatePublisher"]

T = TypeVar("T")


class StatePublisher(Generic[T]):
    """The present value of one topic, encoded once."""

    def __init__(self, encode: Callable[[T], bytes], *, interval: Seconds = 0.0) -> None:
        """`interval`: least time between two values to one subscriber."""
        self.interval = interval
        self.value: bytes | None = None
        """None: nothing was ever set."""
        self.sent = 0
        """Values handed to subscribers."""
        self._encode = encode

    def set(self, value: T) -> bool:
        """Replace the value; False if it is equal. Takes effect at the feeds' next `poll`."""
        encoded = self._encode(value)
        if encoded == self.value:
            return False
        self.value = encoded
        return True

    def feed(self) -> StateFeed:
        """Add a subscriber; drop the feed to remove it."""
        return StateFeed(self)


class StateFeed:
    """What one subscriber has received."""

    __slots__ = ("_not_before", "_publisher", "_sent", "due")

    def __init__(self, publisher: StatePublisher[Any]) -> None:
        self.due: Seconds | None = None
        """The time at which `poll` may have something although nothing was set."""
        self._publisher = publisher
        self._sent: bytes | None = None
        self._not_before: Seconds = 0.0

    def poll(self, now: Seconds) -> bytes | None:
        """The value to send now; None: the subscriber has it, or the interval has not passed."""
        publisher = self._publisher
        value = publisher.value
        self.due = None
        if value is None or value == self._sent:
            return None
        if now < self._not_before:
            self.due = self._not_before
            return None
        self._sent = value
        self._not_before = now + publisher.interval
        publisher.sent += 1
        return value

    def hear(self, body: Buffer, now: Seconds) -> None:
        """Errors: `ProtocolError`; subscribers of a state send nothing."""
        raise ProtocolError("a subscriber of a state must not send messages")

    def close(self) -> None:
        """Nothing to do."""
