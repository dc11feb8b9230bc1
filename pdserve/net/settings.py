"""Times and bounds of one node's links, with unit, effect and the default's reason."""

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
    """Settings of all links of a node; peers may have others."""

    limits: Limits = field(default_factory=Limits)
    """Limits of a control connection."""
    bulk_limits: Limits = field(default_factory=lambda: Limits(budget=64 << 20, window=16 << 20))
    """Limits of a bulk connection; its windows keep a fast network busy."""
    versions: Versions = field(default_factory=Versions)

    requests: Bytes = 256 << 20
    """Most bytes of request bodies under way here, over all peers; one more is answered
    `Overloaded`, except within each peer's own share (`Limits.asked_least`).
    """

    dial_timeout: Seconds = 5.0
    """From the first packet to an open link; long enough for a busy event loop at the other
    side.
    """
    handshake_timeout: Seconds = 3.0
    """How long an accepted connection may stay unauthenticated."""
    pending_handshakes: int = 256
    """Most unauthenticated connections; one more ends the oldest one of the host that has most."""

    ping_after: Seconds = 5.0
    """A link that has been silent this long is pinged."""
    silent_after: Seconds = 15.0
    """A link that has been silent this long is lost: the host or the network is gone. Membership
    notices earlier; this bounds what a link holds.
    """
    retire_after: Seconds = 900.0
    """How long work may go on over a replaced connection: more than the longest request, whose
    tokens travel on it. A dead peer is detected as on any other link.
    """
    revoke_after: Seconds = 60.0
    """A link whose cluster key is no longer in the file ends after this, unless its peer has
    reconnected: time to send SIGHUP to all nodes one after the other.
    """
    close_timeout: Seconds = 1.0
    """How long the last frames wait for a peer that does not read."""

    high_water: Bytes = 1 << 20
    """Bytes in the transport's buffer at which no more is handed to it; what waits above can still
    be reported as never sent.
    """
    low_water: Bytes = 256 * 1024
    """Bytes in the transport's buffer at which sending goes on; uvloop's default of 16 would leave
    the socket idle meanwhile.
    """
    read_size: Bytes = 256 * 1024
    """Most bytes per socket read; one buffer per node, not per connection."""

    strikes: int = 3
    """Undecodable bodies from one peer within `strike_window` before its link ends."""
    strike_window: Seconds = 60.0
    """A strike is forgotten after this: a link stays up for weeks, and one bad body a day does not
    mean a faulty peer.
    """
