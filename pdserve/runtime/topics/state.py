"""A value that replaces the one before: each subscriber gets the latest, never a queue of old ones.

Plain synchronous code. It knows neither what the values mean nor who carries them; `service` polls
each feed whenever its stream takes something. Owned by the node that publishes.
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
        """`interval`: a subscriber gets values at least this far apart."""
        self.interval = interval
        self.value: bytes | None = None
        """None: nothing was ever set."""
        self.sent = 0
        """Values handed to subscribers."""
        self._encode = encode

    def set(self, value: T) -> bool:
        """Replace the value; False if it is the same. Takes effect with the feeds' next `poll`."""
        encoded = self._encode(value)
        if encoded == self.value:
            return False
        self.value = encoded
        return True

    def feed(self) -> StateFeed:
        """A new subscriber; it is forgotten by dropping it."""
        return StateFeed(self)


class StateFeed:
    """What one subscriber has of a value."""

    __slots__ = ("_not_before", "_publisher", "_sent", "due")

    def __init__(self, publisher: StatePublisher[Any]) -> None:
        self.due: Seconds | None = None
        """When `poll` may have something although nothing was set."""
        self._publisher = publisher
        self._sent: bytes | None = None
        self._not_before: Seconds = 0.0

    def poll(self, now: Seconds) -> bytes | None:
        """The value to send now, if the subscriber has another one."""
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
        """Subscribers of a state have nothing to say."""
        raise ProtocolError("a subscriber of a state sent something")

    def close(self) -> None:
        """Nothing is held."""
