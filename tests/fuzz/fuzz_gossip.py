"""Fuzz target: everything an authenticated peer can say about membership, at any time.

    python -m tests.fuzz gossip -max_total_time=60

An input is a list of things that happen to a node with three peers: bytes they say, time that
passes, links that come and go. What is no message is a `ProtocolError`; what is one never makes the
machine fail, speak nonsense, bury itself, end a life twice or fall into a loop.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, cast

from pdserve.errors import ProtocolError
from pdserve.gossip import events as ev
from pdserve.gossip import messages as m
from pdserve.gossip.config import GossipConfig
from pdserve.gossip.core import Gossip, GossipPhase
from pdserve.ids import NodeId
from pdserve.wire.codec import encode
from tests.fuzz.input import Input
from tests.gossip.test_messages import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterable

ME = NodeId("me")
PEERS = (NodeId("a"), NodeId("b"), NodeId("c"))
CONFIG = GossipConfig(max_members=64)
AT_MOST = 4096
"""Effects of one step: a message names at most 1,024 members, and little follows from each."""
SAY, WAIT, UP, DOWN, REFUSED, CARD, WANT, LEAVE = range(8)
_PER_SECOND = 16


class Watched:
    """The machine, and what must hold of everything it wants."""

    def __init__(self, *, joins: bool) -> None:
        self.core = Gossip(m.MemberRecord(ME, 5, address="me:1", role="worker"), CONFIG, Random(1))
        self.now = 0.0
        self.lives: dict[NodeId, int] = {}
        self.ended: set[tuple[NodeId, int]] = set()
        self.step(ev.StartGossip(("a:1", "b:1") if joins else ()))
        for peer in PEERS:
            self.step(ev.LinkUp(peer, 1, f"{peer}:1"))

    def step(self, event: ev.Event) -> None:
        out = self.core.phase is GossipPhase.OUT
        effects = self.core.step(self.now, event)
        assert not (out and effects), "a word from a life that is over"
        assert len(effects) <= AT_MOST
        for effect in effects:
            self.check(effect)
        assert len(self.core.members) <= CONFIG.max_members + 1
        mine = self.core.members.get(ME)
        assert (
            mine is None
            or not mine.state.final
            or self.core.phase in (GossipPhase.LEAVING, GossipPhase.OUT)
        )

    def check(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Send):
            assert m.decode(encode(effect.message)) == effect.message, effect
        elif isinstance(effect, ev.Joined):
            node, epoch = effect.record.node, effect.record.epoch
            assert node not in self.lives, "one life at a time"
            assert (node, epoch) not in self.ended, "dead is dead"
            self.lives[node] = epoch
        elif isinstance(effect, ev.Died | ev.Departed):
            node, epoch = effect.record.node, effect.record.epoch
            self.ended.add((node, epoch))
            if self.lives.get(node) == epoch:
                del self.lives[node]

    def wait(self, seconds: float) -> None:
        """Let time pass, every appointment kept."""
        end = self.now + seconds
        at_once = 0
        while (due := self.core.due) is not None and due <= end:
            at_once = at_once + 1 if due <= self.now else 0
            assert at_once < 100, "appointments without end"
            self.now = max(due, self.now)
            self.step(ev.Tick())
        self.now = end


def fuzz(data: bytes) -> None:
    """One input: its first byte says how the node starts, and whether all that follows is seen."""
    source = Input(data)
    how = source.number()
    node = Watched(joins=bool(how & 1))
    while source:
        what = source.number()
        peer = PEERS[(what >> 3) % len(PEERS)]
        match what & 7:
            case 0:  # SAY
                hear(node, peer, source.bytes(source.number(2)))
            case 1:  # WAIT
                node.wait(source.number() / _PER_SECOND)
            case 2:  # UP
                node.step(ev.LinkUp(peer, 1 + source.number() % 3, f"{peer}:1"))
            case 3:  # DOWN
                node.step(ev.LinkDown(peer, 1 + source.number() % 3))
            case 4:  # REFUSED
                node.step(ev.DialAttemptFailed(f"{peer}:1", refused=bool(what & 0x80)))
            case 5:  # CARD
                node.step(ev.SetCard(m.Card(source.bytes(source.number()))))
            case 6:  # WANT
                node.step(ev.WantPart(peer, bytes(16)))
            case _:  # LEAVE
                node.step(ev.Leave())
    node.wait(30.0 if how & 2 else 1.0)


def hear(node: Watched, peer: NodeId, body: bytes) -> None:
    """Over the link that stands."""
    try:
        message = m.decode(body)
    except ProtocolError:
        return
    epoch = node.core.context.links.get(peer, 1)
    node.step(ev.MessageReceived(peer, epoch, message))


def said(message: m.Message, peer: int = 0) -> bytes:
    """A piece of an input: a peer says that."""
    body = encode(message)
    return bytes([SAY | peer << 3]) + len(body).to_bytes(2, "big") + body


def passed(sixteenths: int) -> bytes:
    """A piece of an input: time passes."""
    return bytes([WAIT, sixteenths])


def rumour(node: str, state: m.MemberState, by: str = "") -> m.News:
    """Of its life that the links lead to."""
    record = m.MemberRecord(NodeId(node), 1, 0, state, 1, f"{node}:1", "worker")
    return m.News((m.Rumour(record, by=NodeId(by)),))


def introductions() -> list[bytes]:
    """Pieces of an input: all peers say that they live."""
    return [said(rumour(peer, m.MemberState.ALIVE), number) for number, peer in enumerate(PEERS)]


def seeds() -> list[bytes]:
    """Each message alone, in a row, and a suspicion from its beginning to its end."""

    def of(pieces: Iterable[bytes]) -> bytes:
        return b"\2" + b"".join(pieces)

    everything = [said(cast("m.Message", example)) for example in EXAMPLES]
    alive = introductions()
    suspected = [said(rumour("d", m.MemberState.SUSPECT, by), i) for i, by in enumerate("abc")]
    dead = [said(rumour("d", m.MemberState.DEAD, ""))]
    me = [said(m.News((m.Rumour(m.MemberRecord(ME, 5, 3, m.MemberState.SUSPECT), by=PEERS[0]),)))]
    events = [bytes([kind | 8, 1]) for kind in (DOWN, UP, REFUSED, CARD, WANT, LEAVE)]
    return [
        *map(of, ([piece] for piece in everything)),
        of(everything),
        of([*alive, *suspected, passed(160)]),
        of([*alive, *suspected, *dead, *alive, passed(16)]),
        of([*alive, *me, passed(16)]),
        of([*alive, *events, passed(255)]),
    ]
