"""What the parts of the machine share during one step: the time, the links, the effects so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.gossip.agenda import Agenda
from pdserve.gossip.events import Send
from pdserve.gossip.suspicion import Health

if TYPE_CHECKING:
    from random import Random

    from pdserve.gossip.config import GossipConfig
    from pdserve.gossip.events import Effect
    from pdserve.gossip.messages import Message
    from pdserve.ids import Epoch, NodeId, Seconds

__all__ = ["Context"]


class Context:
    """Owned by the machine. Iteration orders are insertion orders, so that a seed repeats a run."""

    def __init__(self, me: NodeId, config: GossipConfig, random: Random) -> None:
        self.me = me
        self.config = config
        self.random = random
        self.now: Seconds = 0.0
        self.agenda = Agenda()
        self.health = Health(config.health_limit)
        self.links: dict[NodeId, Epoch] = {}
        self.effects: list[Effect] = []

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def send(self, node: NodeId, message: Message) -> bool:
        """False without a link."""
        if node not in self.links:
            return False
        self.effects.append(Send(node, message))
        return True

    def after(self, kind: str, whose: str | int, delay: Seconds) -> None:
        """Make or move an appointment."""
        self.agenda.set((kind, whose), self.now + delay)

    def around(self, seconds: Seconds) -> Seconds:
        """That long, give or take half, so that nodes do not act in step."""
        return seconds * self.random.uniform(0.5, 1.5)

    def nonce(self) -> int:
        """What a peer can only know by having been sent it."""
        return self.random.getrandbits(62)
