"""What every arm of the comparison can do; the harness knows nothing else of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Awaitable

PAYLOAD_BYTES = 128
BURST = 64
"""Messages a publisher hands over before it lets the event loop turn."""


BULK_CHUNK = 1 << 20
BULK_CHUNKS = 8
"""Bulk goes through so much memory in turn, at both ends of every arm: real payloads are not all in
one piece that stays in a processor's cache."""


class Arm:
    """One way of talking. The same object serves in one process and asks in another."""

    name: ClassVar[str]
    about: ClassVar[str]

    @classmethod
    def missing(cls) -> str | None:
        """Why it cannot run here; None if it can."""
        return None

    async def serve(self, port: int) -> None:
        """Answer on `port`; returns when it listens, and goes on until `stop`."""
        raise NotImplementedError

    async def connect(self, port: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Give back the connection."""

    async def stop(self) -> None:
        """End whatever `serve` started outside this process."""

    def call(self, payload: bytes) -> Awaitable[Any]:
        """Ask, in the words of the arm's own interface: nothing that the comparison would add."""
        raise NotImplementedError

    def payload_of(self, answer: Any) -> bytes:
        """What the answer to `call` carries: the payload that was given."""
        return bytes(answer)

    async def publish(self, count: int, payload: bytes) -> int:
        """Send `count` numbered messages one way; returns how many arrived in order, none twice."""
        raise NotImplementedError

    async def bulk(self, total: int) -> None:
        """Move `total` bytes one way, through reused memory; all have arrived when it returns."""
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
