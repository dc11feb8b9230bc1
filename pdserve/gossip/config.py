"""Every time and bound of membership, with unit, effect and formula.

`n` is the number of members that are not dead, the node itself included. `h` is the local health
score (`suspicion.LocalHealth`): 0 when this process keeps its own appointments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds

__all__ = ["GossipConfig"]


@dataclass(frozen=True, slots=True)
class GossipConfig:
    """The same on every node of a cluster; a silent death is seen no sooner and no later than

        misses * ping_timeout + relay_timeout + suspicion              (5.5 s)
        ping_interval + the same + spreading the news                  (6.5 s and a little)

    which leaves room for a process that stalls for five seconds and then answers."""

    rings: int = 8
    """Observers per node, 1 to 8; a node has about twice as many links."""

    ping_interval: Seconds = 1.0
    """Between two pings of one target; times (1 + h)."""
    ping_timeout: Seconds = 0.5
    """A ping without answer for this long is missed; from loop to loop, hence far above a round
    trip. Times (1 + h)."""
    misses: int = 2
    """Missed in a row before others are asked to ping."""
    relays: int = 3
    """How many others are asked."""
    relay_timeout: Seconds = 0.5
    """How long they have; they report a failure after 0.8 of it, so that silence is theirs."""

    suspicion_floor: Seconds = 4.0
    """A fully confirmed suspicion lasts max(this, 2 * spread(n) + 1 s): the suspect must hear of it
    and be heard. Longer than pings can notice a 5 s pause, see above."""
    suspicion_stretch: float = 6.0
    """An unconfirmed one lasts this many times longer: one observer alone may be the sick one."""
    confirmations: int = 2
    """Further accusers, min(this, n - 2), that bring a suspicion down to its floor."""
    refusals: int = 2
    """Observers, min(this, n - 1), whose connection was lost and whose new one was refused: the
    process is gone, and nobody waits."""
    isolation_grace: Seconds = 60.0
    """A node that hears fewer than half of its targets puts off its verdicts this long: more likely
    it is cut off itself, and a verdict is final."""

    health_limit: int = 8
    """h stays below this."""
    lag_noticed: Seconds = 0.25
    """Work begun this late adds one to h and puts verdicts off by a ping timeout: refutations may
    lie unread."""
    lag_blind: Seconds = 2.0
    """Work begun this late voids every ping under way and puts verdicts off by a whole suspicion:
    the silence was ours."""

    gossip_interval: Seconds = 0.1
    """Least time between two rounds of news. No news, no round."""
    gossip_fanout: int = 4
    """Linked peers told in a round, in turns;
    spread(n) = interval * (3 + log(n) / log(1 + fanout))."""
    retransmit: int = 4
    """A rumour is sent this * ceil(log10(n + 1)) times by each node, at least once to each linked
    peer, then dropped."""
    batch: int = 64
    """Rumours in one message, at most 64."""
    queue_limit: int = 4096
    """Rumours waiting; past it the most often sent goes first. Digests repair what is lost."""

    sync_interval: Seconds = 30.0
    """Between two comparisons of digests with a random peer, +-50 %; also at each new link."""
    reunion_interval: Seconds = 15.0
    """Between two attempts, +-50 %, to reach a seed or a member held dead: the only way that two
    halves of a cluster, or two islands formed at boot, meet again."""
    reunion_window: Seconds = 24 * 3600.0
    """A dead member is remembered, and tried, this long."""
    redial_first: Seconds = 0.1
    """Delay after a first failed dial; doubles, drawn evenly between half and whole."""
    redial_most: Seconds = 5.0
    """The doubling ends here."""
    redial_refused: Seconds = 1.0
    """The least delay after a refusal. For seeds, while none is with us, the longest: they may
    start this moment, and requests wait for them (`FrontendConfig.router_wait`)."""
    link_linger: Seconds = 10.0
    """A link that we dialled and no longer need is closed after this; views settle first."""
    alone_after: Seconds = 3.0
    """A node whose seeds do not answer is a cluster of its own after this, and keeps trying."""
    leave_linger: Seconds = 1.0
    """A leaving node answers this long, so that its word goes round before its links break."""

    max_members: int = 16_384
    """Members remembered, dead ones included. The oldest dead make room; without any, a newcomer is
    refused by a named effect."""
    relays_limit: int = 256
    """Pings under way for others; beyond it they are told of a failure."""
    card_fetches: int = 32
    """Cards and parts asked for at a time, each; the rest wait in order of their news."""
    fetch_timeout: Seconds = 2.0
    """A request for a card or a chunk; then another peer is asked."""
    fetch_tries: int = 8
    """Requests for one chunk of a part before the fetch is reported as failed."""
    part_chunk: Bytes = 256 * 1024
    """Asked for at a time, at most 256 KiB."""
    part_cache: Bytes = 256 * 1024 * 1024
    """Parts of others kept to pass on, least recently used out first."""

    def __post_init__(self) -> None:
        if not 1 <= self.rings <= 8:
            raise ValueError("rings is 1 to 8")
        if not 1 <= self.batch <= 64 or not 1 <= self.part_chunk <= 256 * 1024:
            raise ValueError("batch is 1 to 64, part_chunk 1 to 262144")

    @property
    def mesh_limit(self) -> int:
        """Up to so many members everybody watches everybody."""
        return 2 * self.rings + 1

    @property
    def fresh(self) -> Seconds:
        """A reachable target has been heard within this; times (1 + h)."""
        worst = self.ping_interval + self.misses * self.ping_timeout + self.relay_timeout
        return worst + self.ping_timeout
