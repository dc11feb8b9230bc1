"""The seam between an engine core and the transports: KV in and out of the core's pool.

    core's thread       Mover's methods: they post and return
    transports' loop    paths, grants, deliveries (`pdserve.transfer`); bytes move beside it
    core's thread       `poll`: what has come of it

A core computes for long stretches, a transport must answer at once: so they live apart, on two
threads of one process, or, in simulated time, on one loop. The core owns the blocks: a mover reads
those of a part until its `Delivered`, and may write those of an attempt until its `Closed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.errors import TransferError
    from pdserve.ids import Bytes
    from pdserve.messages.engine import Event, PathState, PeerGone, TransferAnswered, TransferCall
    from pdserve.messages.transfer import Ticket
    from pdserve.transfer.base import Order, Part, PeerKey, Region

__all__ = [
    "Arrived",
    "AttemptKey",
    "Closed",
    "Delivered",
    "Granted",
    "Lost",
    "Moved",
    "Mover",
    "Say",
]


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """One try at filling a sequence's blocks."""

    handle: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Granted:
    """An attempt's blocks may be filled under this ticket."""

    key: AttemptKey
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Arrived:
    """All bytes of a part are in the blocks."""

    key: AttemptKey
    part: int
    size: Bytes
    """Of the part here, as far as the back end knows it; 0: it does not."""


@dataclass(frozen=True, slots=True)
class Lost:
    """No path, no grant, or no further part will arrive. No fence: `Closed` follows `revoke`."""

    key: AttemptKey
    error: TransferError


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing can be written to the attempt's blocks any more. It comes after every `revoke`, since
    a mover that cannot have the peer's word closes the path."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Delivered:
    """The source's blocks of a part are not read any more; with an error it did not arrive."""

    handle: int
    part: int
    size: Bytes
    error: TransferError | None


@dataclass(frozen=True, slots=True)
class Say:
    """For the node, as it is: `TransferQuestion`, `TransferReply`, `Paths`."""

    event: Event


Moved = Granted | Arrived | Lost | Closed | Delivered | Say


class Mover(Protocol):
    """See above. Called in the core's thread; nothing here waits."""

    def start(self, region: Region, wake: Callable[[], None]) -> tuple[str, ...]:
        """The pool is there: get ready; returns the back ends that can be used. `wake` is called,
        from any thread, when `poll` has something. Raises `ConfigError` if none of those that were
        asked for is possible here, naming the reason of each."""
        ...

    def attach(self, peer: PeerKey) -> None:
        """Act in the name of this node and life from now on; an earlier life's paths end, and with
        them its attempts (`Lost`, then `Closed` after their `revoke`)."""
        ...

    def open(self, key: AttemptKey, peer: PeerKey, order: Order) -> None:
        """Get a path to the peer and let it fill these blocks: `Granted` or `Lost`."""
        ...

    def finish(self, key: AttemptKey) -> None:
        """All parts that there are have arrived: nothing comes any more, no fence is needed."""
        ...

    def revoke(self, key: AttemptKey) -> None:
        """Want nothing more of it, whatever its state: `Closed`."""
        ...

    def deliver(self, handle: int, peer: PeerKey, ticket: Ticket, part: Part) -> None:
        """Bring a part to the peer's blocks: `Delivered`."""
        ...

    def withdraw(self, handle: int, peer: PeerKey, ticket: Ticket) -> None:
        """Deliver nothing more of it; what is under way ends by its `Delivered`."""
        ...

    def take(self, command: PeerGone | TransferCall | TransferAnswered) -> None:
        """What the node passes on to the transports."""
        ...

    def poll(self) -> list[Moved]:
        """All that has happened since the last call, in order."""
        ...

    def paths(self) -> list[PathState]:
        """For statistics; as of a moment ago."""
        ...

    def close(self) -> None:
        """End every path; on return no byte can come or go. Idempotent."""
        ...
