"""The input of every arm: which workers hold which chains, and how often each figure is measured.

It uses only the standard library, since the Python of another project runs it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

__all__ = [
    "Arm",
    "Event",
    "Shape",
    "branching",
    "decision",
    "removed",
    "shared",
    "stored",
    "unique",
]

BATCH = 64
"""Blocks per event."""


@dataclass(frozen=True)
class Shape:
    """Chains of names by worker."""

    chains: list[list[int]]
    workers: int
    fewest: int = 1000
    """Smallest number of blocks of its chain that a worker holds; the rest is random."""
    mixed: bool = False
    """True if the events of the workers are mixed; each worker's own events stay in order."""

    def chain(self, worker: int) -> list[int]:
        chain = self.chains[worker % len(self.chains)]
        return chain[: Random(worker).randint(min(self.fewest, len(chain)), len(chain))]


@dataclass(frozen=True)
class Event:
    """Names that a worker has stored behind `parent`, or removed."""

    worker: int
    parent: int | None
    names: list[int]


def _names(rng: Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]


def shared() -> Shape:
    """Makes 1,000 workers with 1,000 blocks: all share the first 500, then ten variants follow."""
    rng = Random(1)
    stem = _names(rng, 500)
    return Shape([stem + _names(rng, 500) for _ in range(10)], 1000)


def unique() -> Shape:
    """Makes 300 workers with 1,000 blocks each, none of them shared."""
    rng = Random(2)
    return Shape([_names(rng, 1000) for _ in range(300)], 300)


def decision() -> Shape:
    """Makes 256 workers with prompts of 128 k tokens in blocks of 32; they share half of it."""
    rng = Random(3)
    stem = _names(rng, 2048)
    return Shape([stem + _names(rng, 2048) for _ in range(16)], 256, fewest=4096)


def branching() -> Shape:
    """Makes 1,000 workers with 300 to 1,000 blocks of 400 chains that branch off anywhere."""
    rng = Random(6)
    chains = [_names(rng, 1000)]
    while len(chains) < 400:
        at = rng.randrange(1000)
        chains.append(rng.choice(chains)[:at] + _names(rng, 1000 - at))
    return Shape(chains, 1000, fewest=300, mixed=True)


def stored(shape: Shape, batch: int = BATCH, workers: int | None = None) -> list[Event]:
    """All held blocks as events of `batch` blocks, worker after worker."""
    events = []
    for worker in range(workers or shape.workers):
        chain = shape.chain(worker)
        for at in range(0, len(chain), batch):
            parent = chain[at - 1] if at else None
            events.append(Event(worker, parent, chain[at : at + batch]))
    return _mixed(events) if shape.mixed else events


def _mixed(events: list[Event]) -> list[Event]:
    order = [event.worker for event in events]
    Random(7).shuffle(order)
    queues: dict[int, list[Event]] = {}
    for event in reversed(events):
        queues.setdefault(event.worker, []).append(event)
    return [queues[worker].pop() for worker in order]


def removed(shape: Shape, workers: int) -> list[Event]:
    """Removals of the same blocks, the last one first, as pools evict them."""
    return [
        Event(event.worker, None, event.names[::-1])
        for event in reversed(stored(shape, workers=workers))
    ]


class Arm:
    """A tree behind calls whose arguments are made before the clock starts."""

    name: str
    calls = 2000
    """Number of look-ups per figure and round; the slow twin makes fewer."""

    def new(self) -> None:
        """Starts with an empty tree."""
        raise NotImplementedError

    def pack_stored(self, event: Event) -> tuple[object, ...]:
        raise NotImplementedError

    def pack_removed(self, event: Event) -> tuple[object, ...]:
        raise NotImplementedError

    def apply_stored(self, packed: list[tuple[object, ...]]) -> None:
        raise NotImplementedError

    def apply_removed(self, packed: list[tuple[object, ...]]) -> None:
        raise NotImplementedError

    def pack_names(self, names: list[int]) -> object:
        raise NotImplementedError

    def find(self, names: object) -> object:
        """Looks up a chain; the answer stays in the form that costs the arm least."""
        raise NotImplementedError

    def find_dict(self, names: object) -> object:
        """Looks up a chain; the answer is a dict by worker."""
        raise NotImplementedError

    def depth(self, names: object, worker: int) -> int:
        """The depth that `find_dict` gives for one worker, to check that all arms agree."""
        raise NotImplementedError

    def remove_workers(self, workers: range) -> None:
        """Removes all blocks of these workers before it returns."""
        raise NotImplementedError

    def own_bytes(self) -> int | None:
        """Memory by the arm's own counters; None if it has none."""
        return None

    def hash(self, tokens: list[int], block_size: int) -> object:
        """Hashes of a prompt's blocks; None if this arm has no hashing of its own."""
        return None
