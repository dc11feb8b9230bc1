"""A cluster in one process under virtual time: real machines, a network with TCP's manners.

Connections deliver in order or break, never lose a message. A crashed process resets them and
refuses new ones; a dead host says nothing; a partition holds what is sent, one way or both, and
breaks connections that stay cut for `SILENT`. A paused node receives everything at the pause's end,
timers and messages in an order drawn from the seed. A node told of its own death starts a new life
at once.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from pdserve.gossip import events as ev
from pdserve.gossip.config import GossipConfig
from pdserve.gossip.core import Gossip, GossipPhase
from pdserve.gossip.messages import MemberRecord, decode
from pdserve.ids import NodeId
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve.gossip.messages import Message

SILENT = 15.0
DIAL_TIMEOUT = 5.0


@dataclass
class Host:
    """One node name: its present life, if any."""

    name: NodeId
    epoch: int
    core: Gossip
    up: bool = True
    silent: bool = False
    paused_until: float = 0.0
    inbox: deque[ev.Event] = field(default_factory=deque)
    tick_at: float = float("inf")
    links: dict[NodeId, Wire] = field(default_factory=dict)
    lives: int = 1


@dataclass(eq=False)
class Wire:
    """One connection; `sent` is when the last message of each direction arrives."""

    ends: dict[NodeId, int]
    arrives: dict[NodeId, float] = field(default_factory=dict)
    held: dict[NodeId, list[Message]] = field(default_factory=dict)
    open: bool = True


class World:
    """All nodes, the network and the clock; `log` is everything but the messages."""

    def __init__(
        self, seed: int, *, config: GossipConfig | None = None, codec: bool = True
    ) -> None:
        self.random = Random(seed)
        self.config = config or GossipConfig()
        self.codec = codec
        self.now = 0.0
        self.hosts: dict[NodeId, Host] = {}
        self.log: list[tuple[float, NodeId, ev.Effect]] = []
        self.messages = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._cut: set[tuple[NodeId, NodeId]] = set()

    # ------------------------------------------------------------------------ what tests do

    def add(
        self, name: str, seeds: Iterable[str] = (), start: ev.StartGossip | None = None
    ) -> Host:
        """A new node, or a new life of an old one; `seeds` are names."""
        node = NodeId(name)
        old = self.hosts.get(node)
        epoch = max(int(self.now * 1000) + 1, old.epoch + 1 if old else 0)
        record = MemberRecord(node, epoch, address=f"{name}:1", role="worker")
        core = Gossip(record, self.config, Random(self.random.getrandbits(64)))
        host = Host(node, epoch, core, lives=old.lives + 1 if old else 1)
        self.hosts[node] = host
        self._deliver(host, start or ev.StartGossip(tuple(f"{seed}:1" for seed in seeds)))
        return host

    def grow(self, n: int) -> list[Host]:
        """`n` nodes that join through the first one and have found each other."""
        hosts = [self.add("n0")] + [self.add(f"n{i}", ["n0"]) for i in range(1, n)]
        self.until(self.converged, 20.0)
        self.run(2.0)
        return hosts

    def crash(self, name: str) -> None:
        """The process ends: its kernel resets what is open and refuses what comes."""
        host = self.hosts[NodeId(name)]
        host.up = False
        for wire in list(host.links.values()):
            self._break(wire)

    def die(self, name: str) -> None:
        """The host is gone without a word."""
        host = self.hosts[NodeId(name)]
        host.up, host.silent = False, True
        for wire in list(host.links.values()):
            self._at(self.now + SILENT, lambda wire=wire: self._break(wire))  # type: ignore[misc]

    def restart(self, name: str) -> Host:
        """A new process of that name, with everybody it can think of as seeds."""
        return self.add(name, [other for other in self.hosts if other != name])

    def pause(self, name: str, seconds: float) -> None:
        """The process stands still; its host goes on answering for it."""
        host = self.hosts[NodeId(name)]
        host.paused_until = self.now + seconds
        self._at(host.paused_until, lambda: self._resume(host))

    def cut(self, sources: Iterable[str], targets: Iterable[str], *, both: bool = True) -> None:
        """Nothing gets from `sources` to `targets`, nor, with `both`, back."""
        for a in sources:
            for b in targets:
                self._cut.add((NodeId(a), NodeId(b)))
                if both:
                    self._cut.add((NodeId(b), NodeId(a)))
        for host in list(self.hosts.values()):
            for wire in list(host.links.values()):
                if self._is_cut(wire):
                    self._at(self.now + SILENT, lambda wire=wire: self._give_up(wire))  # type: ignore[misc]

    def heal(self) -> None:
        """Every cut is mended; what was held flows."""
        self._cut.clear()
        wires = {id(w): w for host in self.hosts.values() for w in host.links.values()}
        for wire in wires.values():
            for target, held in wire.held.items():
                messages, held[:] = list(held), []
                for message in messages:
                    self._transmit(wire, target, message)

    def tell(self, name: str, event: ev.Event) -> None:
        self._deliver(self.hosts[NodeId(name)], event)

    def run(self, seconds: float) -> None:
        """Let that much time pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end

    def until(self, condition: Callable[[], bool], most: float, step: float = 0.02) -> float:
        """Run until `condition`; returns how long it took. Fails after `most` seconds."""
        start = self.now
        while not condition():
            assert self.now - start < most, f"not within {most} s: {self.describe()}"
            self.run(step)
        return self.now - start

    # ------------------------------------------------------------------------ what they see

    def live(self) -> dict[NodeId, int]:
        """The truth."""
        return {
            host.name: host.epoch
            for host in self.hosts.values()
            if host.up and host.core.phase not in (GossipPhase.LEAVING, GossipPhase.OUT)
        }

    def view(self, name: str) -> dict[NodeId, int]:
        """Whom a node takes for a member, in which life."""
        members = self.hosts[NodeId(name)].core.members
        return {record.node: record.epoch for record in members if not record.state.final}

    def converged(self) -> bool:
        live = self.live()
        return all(self.view(name) == live for name in live)

    def seen(self, kind: type, of: str = "", since: float = 0.0) -> list[tuple[float, NodeId]]:
        """When and where effects of a kind happened."""
        return [
            (at, where)
            for at, where, effect in self.log
            if isinstance(effect, kind)
            and at >= since
            and (not of or getattr(effect, "record", None) is None or effect.record.node == of)  # type: ignore[union-attr]
            and (not of or getattr(effect, "node", of) == of)
        ]

    def describe(self) -> str:
        live = self.live()
        wrong = {name: set(self.view(name).items()) ^ set(live.items()) for name in live}
        return str({name: sorted(odd)[:4] for name, odd in wrong.items() if odd})

    # ------------------------------------------------------------------------ how it works

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (when, self._serial, action))

    def _delay(self) -> float:
        return self.random.uniform(0.0002, 0.003)

    def _post(self, host: Host, event: ev.Event, delay: float) -> None:
        self._at(self.now + delay, lambda: self._deliver(host, event))

    def _deliver(self, host: Host, event: ev.Event) -> None:
        if not host.up or self.hosts[host.name] is not host:
            return
        if host.paused_until > self.now:
            host.inbox.append(event)
            return
        for effect in host.core.step(self.now, event):
            self._perform(host, effect)
        due = host.core.due
        if due is not None and due < host.tick_at and self.hosts[host.name] is host:
            host.tick_at = due
            self._at(max(due, self.now), lambda: self._tick(host, due))

    def _tick(self, host: Host, due: float) -> None:
        if host.tick_at == due:
            host.tick_at = float("inf")
            self._deliver(host, ev.Tick())

    def _resume(self, host: Host) -> None:
        if host.paused_until > self.now:
            return
        events: list[ev.Event] = [event for event in host.inbox if not isinstance(event, ev.Tick)]
        host.inbox.clear()
        events.insert(self.random.randint(0, min(3, len(events))), ev.Tick())
        for event in events:
            self._deliver(host, event)

    def _perform(self, host: Host, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Send):
            wire = host.links.get(effect.node)
            if wire is not None and wire.open:
                self._transmit(wire, effect.node, effect.message)
        elif isinstance(effect, ev.Dial):
            self._dial(host, effect.address)
        elif isinstance(effect, ev.Close):
            if effect.node in host.links:
                self._break(host.links[effect.node])
        else:
            self.log.append((self.now, host.name, effect))
            if isinstance(effect, (ev.Rejoin, ev.GossipStopped)):
                self._end_life(host, effect)

    def _end_life(self, host: Host, effect: ev.Effect) -> None:
        for wire in list(host.links.values()):
            self._break(wire)
        if isinstance(effect, ev.Rejoin):
            self.add(host.name, start=effect.start)
        else:
            host.up = False

    def _transmit(self, wire: Wire, target: NodeId, message: Message) -> None:
        (source,) = (end for end in wire.ends if end != target)
        held = wire.held.setdefault(target, [])
        if held or (source, target) in self._cut:
            held.append(message)
            return
        self.messages += 1
        arrives = max(self.now + self._delay(), wire.arrives.get(target, 0.0))
        wire.arrives[target] = arrives
        if self.codec:
            message = decode(encode(message))
        event = ev.MessageReceived(source, wire.ends[source], message)
        host = self.hosts[target]
        self._at(arrives, lambda: self._arrive(wire, host, event))

    def _arrive(self, wire: Wire, host: Host, event: ev.Event) -> None:
        if wire.open:
            self._deliver(host, event)

    def _dial(self, host: Host, address: str) -> None:
        name = NodeId(address.partition(":")[0])
        delay = self._delay() * 3
        self._at(self.now + delay, lambda: self._connect(host, name, self.now + DIAL_TIMEOUT))

    def _connect(self, host: Host, name: NodeId, deadline: float) -> None:
        if not host.up or self.hosts[host.name] is not host:
            return
        target = self.hosts.get(name)
        failed = ev.DialAttemptFailed(f"{name}:1", refused=True)
        cut = (host.name, name) in self._cut or (name, host.name) in self._cut
        if target is not None and (target.silent or cut or target.paused_until > self.now):
            if self.now >= deadline:
                self._deliver(host, ev.DialAttemptFailed(f"{name}:1", refused=False))
            else:
                self._at(self.now + 0.2, lambda: self._connect(host, name, deadline))
        elif target is None or not target.up:
            self._deliver(host, failed)
        else:
            self._link(host, target)

    def _link(self, host: Host, target: Host) -> None:
        wire = host.links.get(target.name)
        if wire is None or wire.ends.get(target.name) != target.epoch:
            if wire is not None:
                self._break(wire)
            wire = Wire({host.name: host.epoch, target.name: target.epoch})
            host.links[target.name] = target.links[host.name] = wire
            self._deliver(target, ev.LinkUp(host.name, host.epoch, f"{host.name}:1"))
        self._deliver(host, ev.LinkUp(target.name, target.epoch, f"{target.name}:1"))

    def _break(self, wire: Wire) -> None:
        if not wire.open:
            return
        wire.open = False
        for end, epoch in wire.ends.items():
            (other,) = (name for name in wire.ends if name != end)
            host = self.hosts[end]
            if host.epoch == epoch and host.links.get(other) is wire:
                del host.links[other]
                self._post(host, ev.LinkDown(other, wire.ends[other]), self._delay())

    def _is_cut(self, wire: Wire) -> bool:
        a, b = wire.ends
        return (a, b) in self._cut or (b, a) in self._cut

    def _give_up(self, wire: Wire) -> None:
        if self._is_cut(wire):
            self._break(wire)
