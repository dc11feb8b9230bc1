"""Shared state of one step of the gossip machine: the time, the links, the effects so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.gossip.events import Send
from pdserve.gossip.suspicion import LocalHealth
from pdserve.gossip.timer_queue import TimerQueue

if TYPE_CHECKING:
    from random import Random

    from pdserve.gossip.config import GossipConfig
    from pdserve.gossip.events import Effect
    from pdserve.gossip.messages import Message
    from pdserve.ids import Epoch, NodeId, Seconds

__all__ = ["GossipContext"]


class GossipContext:
    """Owned by the machine. Iteration follows insertion order, so that a seed repeats a run."""

    def __init__(self, me: NodeId, config: GossipConfig, random: Random) -> None:
        self.me = me
        self.config = config
        self.random = random
        self.now: Seconds = 0.0
        self.agenda = TimerQueue()
        self.health = LocalHealth(config.health_limit)
        self.links: dict[NodeId, Epoch] = {}
        self.effects: list[Effect] = []

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def send(self, node: NodeId, message: Message) -> bool:
        """Sends a message; False without a link."""
        if node not in self.links:
            return False
        self.effects.append(Send(node, message))
        return True

    def after(self, kind: str, whose: str | int, delay: Seconds) -> None:
        """Sets or moves a timer."""
        self.agenda.set((kind, whose), self.now + delay)

    def around(self, seconds: Seconds) -> Seconds:
        """A time within 50 % of the given one, so that nodes do not act in step."""
        return seconds * self.random.uniform(0.5, 1.5)

    def nonce(self) -> int:
        """A random number that a peer can only know from a message."""
        return self.random.getrandbits(62)
