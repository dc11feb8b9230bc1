"""Every time and bound of membership, with unit, effect and formula.

`n` is the number of members that are not dead, the node itself included. `h` is the local health
score (`suspicion.LocalHealth`): 0 when this process is on time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds

__all__ = ["GossipConfig"]


@dataclass(frozen=True, slots=True)
class GossipConfig:
    """Must be the same on every node of a cluster. If a node stops answering without closing its
    connections, its death is detected between these two times:

        misses * ping_timeout + relay_timeout + suspicion              (5.5 s)
        ping_interval + the same + spreading the news                  (a little over 6.5 s)

    So a process that stalls for five seconds and then answers is not declared dead."""

    rings: int = 8
    """Observers per node, 1 to 8; a node has about twice as many links."""

    ping_interval: Seconds = 1.0
    """Most time between two pings of one target; times (1 + h). Pings are sent at multiples of it:
    a node pings all its targets in one wake-up."""
    ping_timeout: Seconds = 0.5
    """A ping without an answer for this long is missed. The time includes the delays of both event
    loops, so it is far above a round trip. Times (1 + h)."""
    misses: int = 2
    """Missed pings in a row before helpers are asked to ping."""
    relays: int = 3
    """Number of helpers that are asked."""
    relay_timeout: Seconds = 0.5
    """Time for the helpers to report. A helper reports a failure after 0.8 of it, so that a failure
    differs from a missing report."""

    suspicion_floor: Seconds = 4.0
    """A fully confirmed suspicion lasts max(this, 2 * spread(n) + 1 s): the news must reach the
    suspect, and its refutation must return. Long enough for a pause of 5 s, see above."""
    suspicion_stretch: float = 6.0
    """An unconfirmed suspicion lasts this many times longer: the fault may be at its one
    observer."""
    confirmations: int = 2
    """Further accusers, min(this, n - 2), that shorten a suspicion to its floor."""
    refusals: int = 2
    """If this many observers, min(this, n - 1), lose their connection and are refused a new one,
    the process is gone, and the suspicion ends at once."""
    isolation_grace: Seconds = 60.0
    """A node to which fewer than half of its targets answer delays its verdicts by up to this: the
    node itself is probably cut off, and a verdict is final."""

    health_limit: int = 8
    """h stays below this."""
    lag_noticed: Seconds = 0.25
    """A step that begins this late adds one to h and delays verdicts by a ping timeout, because
    refutations may not have been read yet."""
    lag_blind: Seconds = 2.0
    """A step that begins this late restarts every ping under way and delays verdicts by a confirmed
    suspicion, because this process itself stalled."""

    gossip_interval: Seconds = 0.1
    """Least time between two rounds of news; without news there is no round."""
    gossip_fanout: int = 4
    """Linked peers that get the news in a round, in turns;
    spread(n) = interval * (3 + log(n) / log(1 + fanout))."""
    retransmit: int = 4
    """A rumour is sent this * ceil(log10(n + 1)) times by each node, at least once to each linked
    peer, then dropped."""
    batch: int = 64
    """Rumours in one message, at most 64."""
    queue_limit: int = 4096
    """Most waiting rumours; beyond it the most often sent one is dropped. Digests repair the
    loss."""

    sync_interval: Seconds = 30.0
    """Time between two comparisons of digests with a random peer, +-50 %; also at each new link."""
    reunion_interval: Seconds = 15.0
    """Time between two attempts, +-50 %, to reach a seed or a dead member. Only these attempts join
    two halves of a cluster again, or two clusters that formed at boot."""
    reunion_window: Seconds = 24 * 3600.0
    """A dead member is remembered, and tried, this long."""
    redial_first: Seconds = 0.1
    """Delay after a first failed dial; doubles, drawn evenly between half and whole."""
    redial_most: Seconds = 5.0
    """Longest delay that the doubling reaches."""
    redial_refused: Seconds = 1.0
    """Least delay after a refusal. For seeds, while none is linked, it is the longest delay
    instead: a seed may be starting, and requests wait for it (`FrontendConfig.router_wait`)."""
    link_linger: Seconds = 10.0
    """A link that this node dialled and no longer needs is closed after this, so that views settle
    first."""
    alone_after: Seconds = 3.0
    """A node whose seeds do not answer forms a cluster of its own after this, and keeps trying."""
    leave_linger: Seconds = 1.0
    """A leaving node still answers this long, so that its goodbye spreads before its links end."""

    max_members: int = 16_384
    """Most members in the table, dead ones included. A newcomer replaces the member that has been
    dead longest; if none is dead, the newcomer is refused with the effect `TableFull`."""
    relays_limit: int = 256
    """Most pings under way on behalf of peers; beyond it a failure is reported at once."""
    card_fetches: int = 32
    """Most cards, and most parts, fetched at a time; the rest wait in the order of their news."""
    fetch_timeout: Seconds = 2.0
    """Timeout of a request for a card or a chunk; then another peer is asked."""
    fetch_tries: int = 8
    """Requests for one chunk of a part before the fetch is reported as failed."""
    part_chunk: Bytes = 256 * 1024
    """Bytes of a part that are requested at a time, at most 256 KiB."""
    part_cache: Bytes = 256 * 1024 * 1024
    """Bytes of other members' parts that are kept for peers; the least recently used go first."""

    def __post_init__(self) -> None:
        if not 1 <= self.rings <= 8:
            raise ValueError("rings is 1 to 8")
        if not 1 <= self.batch <= 64 or not 1 <= self.part_chunk <= 256 * 1024:
            raise ValueError("batch is 1 to 64, part_chunk 1 to 262144")

    @property
    def mesh_limit(self) -> int:
        """Up to this many members, every member watches all others."""
        return 2 * self.rings + 1

    @property
    def fresh(self) -> Seconds:
        """A reachable target has been heard within this; times (1 + h)."""
        worst = self.ping_interval + self.misses * self.ping_timeout + self.relay_timeout
        return worst + self.ping_timeout
