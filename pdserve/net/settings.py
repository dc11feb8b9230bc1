"""Every time and bound of the links of one node, with unit, effect and the default's reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.wire.handshake import Versions
from pdserve.wire.limits import Limits

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds

__all__ = ["NetSettings"]


@dataclass(frozen=True, slots=True)
class NetSettings:
    """The same for every link of a node; peers may differ in theirs."""

    limits: Limits = field(default_factory=Limits)
    """Of a control connection."""
    bulk_limits: Limits = field(default_factory=lambda: Limits(budget=64 << 20, window=16 << 20))
    """Of a bulk connection: its windows keep a fast network busy."""
    versions: Versions = field(default_factory=Versions)

    dial_timeout: Seconds = 5.0
    """From the first packet to an open link; a busy loop on the other side fits in."""
    handshake_timeout: Seconds = 3.0
    """How long an accepted connection may stay unauthenticated."""
    pending_handshakes: int = 256
    """Unauthenticated connections at a time; one more ends the oldest of the host with most."""

    ping_after: Seconds = 5.0
    """A link that has been silent this long is asked for a sign of life."""
    silent_after: Seconds = 15.0
    """A link that has been silent this long is lost: its host or its network is gone. Membership
    notices earlier by its own means; this bounds what a link holds when nothing else does."""
    retire_after: Seconds = 900.0
    """What is still under way on a connection that another replaced may take this long: more than
    the longest request, whose tokens travel on it. A dead peer is noticed as on any other link."""
    close_timeout: Seconds = 1.0
    """Last words wait this long for a peer that does not read."""

    high_water: Bytes = 1 << 20
    """Bytes in the transport's buffer at which we stop handing it more; what waits with us can
    still be reported as never sent."""
    low_water: Bytes = 256 * 1024
    """Bytes at which we go on; uvloop's own default of 16 would leave the socket idle meanwhile."""
    read_size: Bytes = 256 * 1024
    """Most bytes taken from a socket at a time; one buffer per node, not per connection."""

    strikes: int = 3
    """Undecodable bodies from one peer before its link ends."""
