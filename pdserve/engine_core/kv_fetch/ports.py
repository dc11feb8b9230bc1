"""Defines what the parts of a KV fetch need of each other: keys, ends, and three ports.

ServedPool     has the blocks that peers may have
PullListener   is told how a pull ends, and when its blocks are free of writers
StageBlocks    brings blocks of lower tiers to the device before they are served
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol

from pdserve.messages.engine import (
    AbsorbKv,
    KvAbsorbed,
    KvChainsListed,
    KvPullAnswer,
    KvPullServed,
    ListKvChains,
    ServeKvPull,
    StopKvPull,
)
from pdserve.messages.kv_pull import KvChains, KvPullGrant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.messages.engine import Event

__all__ = [
    "FetchCommand",
    "PullEnd",
    "PullListener",
    "ServedPool",
    "StageBlocks",
    "is_pull",
    "refusal_of",
]

FetchCommand = KvPullAnswer | ServeKvPull | StopKvPull | AbsorbKv | ListKvChains
"""Commands for KV fetches."""

PullEnd = Literal[
    "",
    "absent",
    "busy",
    "cancelled",
    "closed",
    "corrupt",
    "deadline",
    "epoch",
    "gone",
    "misfit",
    "transfer",
    "unready",
]
"""Why a pull brought fewer blocks than wanted. Empty: the owner had only those, or all came.

    absent     the owner has none of the blocks any more
    busy       the owner serves as much as it may
    cancelled  the requester does not want it any more
    closed     the requester's core ends
    corrupt    a block's bytes differ from the owner's checksum
    deadline   not everything came in time
    epoch      another life of the owner, or of the requester, was meant
    gone       the owner is dead or cannot be reached
    misfit     the owner cannot serve such a request, or has answered what does not fit
    transfer   the transports failed
    unready    an engine is not ready to move KV
"""

REASONS: Final = frozenset(PullEnd.__args__) - {""}  # type: ignore[attr-defined]


def is_pull(handle: int) -> bool:
    """Return True for the handle of a pull. Handles of requests are positive, those of pulls
    negative."""
    return handle < 0


def refusal_of(command: FetchCommand) -> Event | None:
    """The answer of a core that fetches no KV; None: the command needs none."""
    match command:
        case ServeKvPull():
            return KvPullServed(command.number, KvPullGrant(refused="misfit"))
        case AbsorbKv():
            return KvAbsorbed(command.number, 0, 0, "misfit")
        case ListKvChains():
            return KvChainsListed(command.number, KvChains())
        case KvPullAnswer() | StopKvPull():
            return None


class ServedPool(Protocol):
    """Blocks of the connector's region that peers may have, by hash. The device's `BlockPool` is
    one; an engine whose device no transport can reach shows frames of its host tier."""

    @property
    def num_blocks(self) -> int:
        """Blocks that can hold KV."""
        ...

    def match(self, hashes: Iterable[bytes], /) -> list[int]:
        """Blocks of the longest leading run of `hashes` that is in the pool. Takes no
        reference."""
        ...

    def parent(self, block: int, /) -> bytes:
        """Hash of the block with which alone this one may be held; the name of none: it may be held
        by itself."""
        ...

    def acquire(self, blocks: Sequence[int], /) -> None:
        """Hold these blocks, which `match` has returned: they keep their content."""
        ...

    def release(self, blocks: Sequence[int], /) -> None:
        """Hold them no more."""
        ...


class PullListener(Protocol):
    """Receives the end of a pull, in the core's thread."""

    def on_pulled(self, number: int, blocks_ok: int, error: str) -> None:
        """The pull has ended: its first `blocks_ok` blocks are complete and verified, and no peer
        can write to them. The others may still be written to until `on_fenced`. `error` is a
        `PullEnd`. Called once, unless the pull is cancelled."""
        ...

    def on_fenced(self, number: int) -> None:
        """No peer can write to the pull's blocks any more. Called once, after `on_pulled` or
        `cancel`, unless all blocks were complete."""
        ...


class StageBlocks(Protocol):
    """Brings further blocks to the pool that is served, from wherever this worker has them."""

    def begin(self, hashes: Sequence[bytes], done: Callable[[], None]) -> int:
        """Begin to bring the leading run of `hashes` that this worker has to the pool. Returns a
        number above 0, or 0 if there is nothing to bring or no room for it.

        `done` is called once, in the core's thread and never within this call, when no more blocks
        come. At that moment the blocks that came are in the pool under their hashes, so that the
        caller can take references of its own."""
        ...

    def cancel(self, number: int) -> None:
        """`done` is not called any more. Ignores numbers whose `done` was called."""
        ...
