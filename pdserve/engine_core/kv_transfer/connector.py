"""Defines the KV connector: the port between an engine core and the KV transports.

    core's thread       calls `KvConnector`'s methods, which post and return
    transports' loop    paths, grants, deliveries (`pdserve.transfer`), and the node's control calls
    core's thread       calls `poll` for the events

A core computes for long and a transport must answer at once, so they run in two threads, or, in
simulated time, on one loop. The node and the transports talk by a socket of their own
(`control_socket`): no control call, path or fence waits for the core.

The core owns the blocks: the connector reads a part's blocks until `PartDelivered`, and peers may
write to an attempt's blocks until `AttemptFenced`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.errors import NotReady, TransferError
    from pdserve.ids import Bytes, NodeLife
    from pdserve.messages.engine import PathState
    from pdserve.messages.transfer import TransferTicket
    from pdserve.transfer.base import GrantSpec, KvPart, Region

__all__ = [
    "AttemptBroken",
    "AttemptFenced",
    "AttemptGranted",
    "AttemptKey",
    "ConnectorEvent",
    "KvConnector",
    "PartArrived",
    "PartDelivered",
]


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """Identifies one attempt to fill a sequence's blocks."""

    handle: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptGranted:
    """A peer may fill the attempt's blocks with this ticket."""

    key: AttemptKey
    ticket: TransferTicket


@dataclass(frozen=True, slots=True)
class PartArrived:
    """All bytes of a part have arrived in the attempt's blocks."""

    key: AttemptKey
    part: int
    size: Bytes
    """Bytes of the part in this pool; 0 if the back end does not know."""


@dataclass(frozen=True, slots=True)
class AttemptBroken:
    """The attempt failed: there is no path or no grant, or no further part arrives. Its blocks may
    still be written to until `AttemptFenced`, which follows `revoke`."""

    key: AttemptKey
    error: TransferError | NotReady
    """`NotReady`: this worker's own transports are not ready; the peer is not at fault."""


@dataclass(frozen=True, slots=True)
class AttemptFenced:
    """Nothing can be written to the attempt's blocks any more. It follows every `revoke`: if the
    peer does not confirm, the connector closes the path."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class PartDelivered:
    """The part's source blocks are not read any more. With an error, the part did not arrive."""

    handle: int
    part: int
    size: Bytes
    error: TransferError | None


ConnectorEvent = AttemptGranted | PartArrived | AttemptBroken | AttemptFenced | PartDelivered


class KvConnector(Protocol):
    """Moves KV in and out of one core's pool. Called in the core's thread; no method waits, except
    `close`."""

    def start(self, region: Region, wake: Callable[[], None]) -> tuple[str, ...]:
        """Start with the allocated pool; returns the usable back ends. `wake` is called, from any
        thread, when `poll` has events. Raises `ConfigError`, with a reason for each, if none of the
        configured back ends is possible here."""
        ...

    def attach(self, peer: NodeLife) -> None:
        """Exchange KV as this (node, epoch) from now on. Paths of an earlier epoch end, and with
        them its attempts (`AttemptBroken`, then `AttemptFenced` after their `revoke`). The node
        says it to the transports too: whichever comes first counts, so an attempt that follows in
        the core's order is never too early, and an epoch that has passed is ignored."""
        ...

    def open(self, key: AttemptKey, peer: NodeLife, order: GrantSpec) -> None:
        """Connect to the peer and let it fill these blocks. `AttemptGranted` or `AttemptBroken`
        follows."""
        ...

    def finish(self, key: AttemptKey) -> None:
        """End an attempt of which all parts have arrived: it needs no fence."""
        ...

    def revoke(self, key: AttemptKey) -> None:
        """End an attempt in any state. `AttemptFenced` follows."""
        ...

    def deliver(self, handle: int, peer: NodeLife, ticket: TransferTicket, part: KvPart) -> None:
        """Send a part to the peer's blocks. `PartDelivered` follows."""
        ...

    def withdraw(self, handle: int, peer: NodeLife, ticket: TransferTicket) -> None:
        """Send no more parts for this ticket; parts under way still end with `PartDelivered`."""
        ...

    def poll(self) -> list[ConnectorEvent]:
        """Return all events since the last call, in order."""
        ...

    def paths(self) -> list[PathState]:
        """State of every path to a peer, for stats; about a second old at most."""
        ...

    def close(self) -> None:
        """Close every path. After it returns no byte is read or written. Idempotent."""
        ...
