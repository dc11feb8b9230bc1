"""The interface of an arm of the comparison. The harness knows nothing else of an arm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Awaitable

PAYLOAD_BYTES = 128
BURST = 64
"""Messages a publisher hands over before it lets the event loop turn."""


class Arm:
    """One kind of bus. The same object serves in one process and asks in the other."""

    name: ClassVar[str]
    about: ClassVar[str]

    @classmethod
    def missing(cls) -> str | None:
        """The reason why the arm cannot run here; None if it can."""
        return None

    async def serve(self, port: int) -> None:
        """Starts to answer on `port`; returns when it listens, and serves until `stop`."""
        raise NotImplementedError

    async def connect(self, port: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Closes the connection."""

    async def stop(self) -> None:
        """Ends what `serve` started outside this process."""

    def call(self, payload: bytes) -> Awaitable[Any]:
        """Makes one call through the arm's own interface, without code of the comparison."""
        raise NotImplementedError

    def payload_of(self, answer: Any) -> bytes:
        """The payload in the answer to `call`."""
        return bytes(answer)

    async def publish(self, count: int, payload: bytes) -> int:
        """Send `count` numbered messages one way; returns how many arrived in order, none twice."""
        raise NotImplementedError


class Tally:
    """Counts numbered messages; one out of order spoils the count."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> None:
        self.count = self.count + 1 if number == self.count else -1 << 60

    def take(self) -> int:
        """The count so far; the next message is number 0 again."""
        count, self.count = self.count, 0
        return count
