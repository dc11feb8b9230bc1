"""What has gone by the paths to each peer, as statistics show it.

A path that is set up again goes on in the same book: counters only grow while the peer lives. It is
pure; times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.messages.engine import PathState

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds
    from pdserve.transfer.base import Path, PeerKey

__all__ = ["Book", "Books", "Meter"]


@dataclass(slots=True, eq=False)
class Book:
    """One peer by one back end."""

    path: Path
    """The present one, or the last."""
    why: str = ""
    expected: float = 0.0
    degraded: str = ""
    sent: Bytes = 0
    received: Bytes = 0
    seconds: Seconds = 0.0
    failures: int = 0
    outgoing: int = 0
    since: Seconds = 0.0
    """When deliveries came under way after none was."""

    def state(self, now: Seconds) -> PathState:
        """Of this moment."""
        path = self.path
        return PathState(
            node=path.peer.node,
            epoch=path.peer.epoch,
            backend=path.backend,
            why=self.why,
            expected=self.expected,
            sent_bytes=self.sent,
            received_bytes=self.received,
            sent_seconds=self.seconds + (now - self.since if self.outgoing else 0.0),
            failures=self.failures,
            down="" if path.down is None else path.down.message,
            degraded=self.degraded,
        )


class Meter:
    """Reads one path's counters and enters what has been added."""

    def __init__(self, book: Book, path: Path) -> None:
        self.book = book
        self.path = path
        self.died = False
        """Its end has been entered."""
        self._sent: Bytes = 0
        self._received: Bytes = 0

    def began(self, now: Seconds) -> None:
        """A delivery is under way."""
        book = self.book
        if not book.outgoing:
            book.since = now
        book.outgoing += 1

    def ended(self, now: Seconds) -> Bytes:
        """One has just ended; returns its size, 0 if nothing arrived."""
        book = self.book
        book.outgoing -= 1
        if not book.outgoing:
            book.seconds += now - book.since
        total = self.path.statistics().bytes_delivered
        size, self._sent = total - self._sent, total
        book.sent += size
        return size

    def arrived(self) -> Bytes:
        """A part has just arrived; returns its size, 0 if the back end does not know it."""
        total = self.path.statistics().bytes_received
        size, self._received = total - self._received, total
        self.book.received += size
        return size


class Books:
    """All of one life of a node."""

    def __init__(self) -> None:
        self._books: dict[tuple[PeerKey, str], Book] = {}
        self._meters: dict[Path, Meter] = {}

    def __len__(self) -> int:
        return len(self._books)

    def meter(self, path: Path) -> Meter:
        """Of a path, which is entered if it is new."""
        meter = self._meters.get(path)
        if meter is None:
            book = self._books.get((path.peer, path.backend))
            if book is None:
                book = self._books[path.peer, path.backend] = Book(path)
            elif book.path.down is not None:
                self._meters.pop(book.path, None)
            book.path = path
            meter = self._meters[path] = Meter(book, path)
        return meter

    def failed(self, peer: PeerKey, backend: str) -> None:
        """No path came about, or one has died."""
        book = self._books.get((peer, backend))
        if book is not None:
            book.failures += 1

    def paths(self, peer: PeerKey) -> list[Path]:
        """All to a peer that are known."""
        return [path for path in self._meters if path.peer == peer]

    def forget(self, peer: PeerKey) -> None:
        """That life of the peer is over."""
        for key in [key for key in self._books if key[0] == peer]:
            del self._books[key]
        for path in self.paths(peer):
            del self._meters[path]

    def states(self, now: Seconds) -> list[PathState]:
        """Of this moment."""
        return [book.state(now) for book in self._books.values()]
