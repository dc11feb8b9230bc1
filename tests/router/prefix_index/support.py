"""Names, and a pool at its worker that can be changed by hand."""

from __future__ import annotations

from pdserve.ids import NodeId, NodeLife
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared
from pdserve.router.config import RouterConfig
from pdserve.router.prefix_index.index import PrefixIndex
from pdserve.runtime.registry import Member
from pdserve.worker.kv_event_publisher import KvEventPublisher

ROOT = b"R" * 16


def block(number: int) -> bytes:
    """A hash of 16 bytes; no two numbers share a short name."""
    return number.to_bytes(8, "little") + bytes(8)


def names(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def life(node: str, epoch: int = 1) -> NodeLife:
    return NodeLife(NodeId(node), epoch)


def member(node: str, epoch: int = 1) -> Member:
    return Member(
        node=NodeId(node),
        epoch=epoch,
        role="worker",
        address=f"{node}:7000",
        card=None,
        suspect=False,
        reachable=True,
    )


def index(*, remember: bool = False, **config: float) -> PrefixIndex:
    settings: dict[str, float] = {"index_max_blocks": 1000, "approximate_blocks": 400, **config}
    return PrefixIndex(RouterConfig(**settings), remember=remember)  # type: ignore[arg-type]


class Pool:
    """What a worker tells, and a reader without a network between."""

    def __init__(self, index: PrefixIndex, node: str, epoch: int = 1) -> None:
        self.log = KvEventPublisher()
        self.index = index
        self.life = life(node, epoch)
        self.feed = index.target(member(node, epoch))
        self.log.connect(self.feed.apply)

    def stored(self, *numbers: int, tier: str = "device", parent: bytes = ROOT) -> None:
        self.log.apply([BlockStored([block(n) for n in numbers], parent, tier)])  # type: ignore[arg-type]

    def removed(self, *numbers: int, tier: str = "device") -> None:
        self.log.apply([BlockRemoved([block(n) for n in numbers], tier)])  # type: ignore[arg-type]

    def cleared(self) -> None:
        self.log.apply([PoolCleared()])

    def snapshot(self) -> None:
        """The reader starts over."""
        self.feed.reset()
        for piece in self.log.snapshot():
            self.feed.load(piece)
        self.feed.commit()
