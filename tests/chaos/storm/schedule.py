"""Which fault befalls whom, and when: drawn from a seed, before anything runs. Pure.

Kinds come from a shuffled deck, so that a short storm meets every one of them. What is drawn is a
wish: whether a fault may happen is decided at its moment by `refusal`, from what is up then. So no
storm leaves the cluster without a router, a frontend or a worker that takes requests, and no engine
dies more often than its supervisor allows.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

Part = Literal["worker", "prefill", "router", "frontend"]


@dataclass(frozen=True)
class Kind:
    """One sort of fault."""

    name: str
    parts: tuple[Part, ...]
    """Roles that it may happen to; empty: no role in particular."""
    lasting: tuple[float, float] = (0.0, 0.0)
    """Seconds, between which its length is drawn; 0 for what is over at once."""
    needs: str = ""
    """What the site must offer: `network` (hosts with rules between them), `proxy` (a way that
    faults are put on), `disk` (of our own, to fill), `trouble` (an engine that fails on demand)."""
    restarts_node: bool = False
    """The node is gone afterwards, and started again after a pause."""
    ends_engine: bool = False
    """Counts against what a worker's supervisor bears."""
    cards: int = 1
    """How often it is in the deck."""


EVERYBODY: tuple[Part, ...] = ("worker", "prefill", "router", "frontend")
WORKERS: tuple[Part, ...] = ("worker", "prefill")

KINDS = (
    Kind("kill node", EVERYBODY, restarts_node=True, cards=4),
    Kind("kill engine", WORKERS, ends_engine=True, cards=2),
    Kind("stop node", EVERYBODY, (0.5, 15.0), cards=2),
    Kind("stop engine", WORKERS, (0.5, 15.0), ends_engine=True, cards=2),
    Kind("stop both", WORKERS, (0.5, 15.0)),
    Kind("terminate", EVERYBODY, restarts_node=True, cards=3),
    Kind("loss", EVERYBODY, (2.0, 8.0), needs="network"),
    Kind("partition", EVERYBODY, (1.0, 12.0), needs="network"),
    Kind("silence", EVERYBODY, (0.5, 12.0), needs="network"),
    Kind("cut", (), needs="proxy"),
    Kind("delay", (), (2.0, 8.0), needs="proxy"),
    Kind("black hole", (), (0.5, 8.0), needs="proxy"),
    Kind("trickle", (), (1.0, 5.0), needs="proxy"),
    Kind("disk full", (), (2.0, 6.0), needs="disk"),
    Kind("failing step", WORKERS, needs="trouble", cards=2),
    Kind("hanging step", WORKERS, (1.0, 15.0), needs="trouble", ends_engine=True),
)
BY_NAME = {kind.name: kind for kind in KINDS}

FIRST = 2.0
"""Seconds of peace at the beginning."""
ENGINE_ENDS, ENGINE_WINDOW = 3, 60.0
"""At most this many engines of a worker may end within this many seconds; its supervisor allows
five."""


@dataclass(frozen=True)
class Node:
    """A node that faults may happen to."""

    name: str
    part: Part
    proxied: bool = False


@dataclass(frozen=True)
class Fault:
    """One wish of the schedule."""

    number: int
    at: float
    """Seconds after the storm's beginning."""
    kind: str
    target: str
    lasting: float
    pause: float
    """Seconds until a node that is gone is started again."""
    peer: str = ""
    """The other side of a partition."""
    draw: int = 0
    """A random number for choices that are made when the fault happens."""

    def __str__(self) -> str:
        whom = self.target + (f" and {self.peer}" if self.peer else "")
        span = f" for {self.lasting:.1f} s" if self.lasting else ""
        return f"#{self.number} at {self.at:.1f} s: {self.kind}, {whom}{span}"


def draw(
    seed: int | str,
    seconds: float,
    nodes: Sequence[Node],
    *,
    offers: Collection[str],
    every: float,
    kinds: Collection[str] = (),
) -> list[Fault]:
    """Faults until `seconds`, one in `every` seconds on the average, of those kinds (empty: all)
    for which the site offers what they need."""
    rng = random.Random(f"storm {seed}")
    usable = [
        kind
        for kind in KINDS
        if (not kinds or kind.name in kinds)
        and (not kind.needs or kind.needs in offers)
        and _victims(kind, nodes)
    ]
    deck = _deck(rng, usable)
    faults: list[Fault] = []
    at = FIRST
    while usable and at < seconds:
        faults.append(_fault(rng, len(faults) + 1, at, next(deck), nodes))
        at += every * rng.uniform(0.4, 1.6)
    return faults


def _deck(rng: random.Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    cards = [kind for kind in kinds for _ in range(kind.cards)]
    while cards:
        rng.shuffle(cards)
        yield from cards


def _victims(kind: Kind, nodes: Sequence[Node]) -> list[Node]:
    if kind.needs == "proxy":
        return [node for node in nodes if node.proxied]
    return [node for node in nodes if not kind.parts or node.part in kind.parts]


def _fault(rng: random.Random, number: int, at: float, kind: Kind, nodes: Sequence[Node]) -> Fault:
    target = rng.choice([node.name for node in _victims(kind, nodes)])
    peer = ""
    if kind.name == "partition":
        peer = rng.choice([node.name for node in nodes if node.name != target])
    return Fault(
        number=number,
        at=at,
        kind=kind.name,
        target="disk" if kind.needs == "disk" else target,
        lasting=rng.uniform(*kind.lasting) if kind.lasting[1] else 0.0,
        pause=rng.choice([0.0, rng.uniform(0.0, 5.0)]),
        peer=peer,
        draw=rng.getrandbits(32),
    )


# ---------------------------------------------------------------------- at the moment


@dataclass
class Standing:
    """The nodes that are up and the faults of each. The storm updates it, `refusal` reads it."""

    nodes: dict[str, Node]
    up: set[str]
    """Ready, and under no fault."""
    disk_full: bool = False
    engine_ends: dict[str, deque[float]] = field(default_factory=dict)
    """When, per worker."""

    def note_engine_end(self, name: str, now: float) -> None:
        """An engine has ended, or may have."""
        ends = self.engine_ends.setdefault(name, deque())
        ends.append(now)
        while ends[0] < now - ENGINE_WINDOW:
            ends.popleft()

    def recent_engine_ends(self, name: str, now: float) -> int:
        """Ends of engines in the last minute."""
        return sum(at >= now - ENGINE_WINDOW for at in self.engine_ends.get(name, ()))

    def others_up(self, name: str) -> int:
        """Number of other nodes of the same role that are up."""
        part = self.nodes[name].part
        return sum(self.nodes[one].part == part for one in self.up - {name})


def refusal(fault: Fault, standing: Standing, now: float) -> str:
    """Why this fault must not happen now, in a few words; empty: it may."""
    kind = BY_NAME[fault.kind]
    if kind.needs == "disk":
        return "the disk is full already" if standing.disk_full else ""
    for name in filter(None, (fault.target, fault.peer)):
        if name not in standing.up:
            return f"{name} is not up"
        if standing.nodes[name].part != "prefill" and not standing.others_up(name):
            return f"{name} is the last of its kind"
    if kind.ends_engine and standing.recent_engine_ends(fault.target, now) >= ENGINE_ENDS:
        return f"the engine of {fault.target} has ended often enough"
    target, peer = standing.nodes[fault.target], standing.nodes.get(fault.peer)
    both = peer is not None and peer.part == target.part == "worker"
    if both and standing.others_up(target.name) < 2:
        return "no third worker is up"
    return ""
