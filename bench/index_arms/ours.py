"""pdserve's trees, compiled and pure, and its hashing."""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, Any

from bench.index_arms.world import Arm
from pdserve.blocks.hashing import HASH_SECRET_TEST, joined_hashes, root_hash
from pdserve.router.prefix_index.radix_tree import DEVICE, PureRadixTree, Tree

if TYPE_CHECKING:
    from bench.index_arms.world import Event

MAX_BLOCKS = 4_000_000
ROOT = root_hash(HASH_SECRET_TEST, "bench")


class Ours(Arm):
    """The tree in use: compiled, unless pdserve was installed without a compiler."""

    name = "pdserve"
    make = Tree

    def new(self) -> None:
        self.tree = self.make(MAX_BLOCKS)
        self.depths = array("I", bytes(4 * 1000))

    def pack_names(self, names: list[int]) -> Any:
        return struct.pack(f"<{len(names)}Q", *names)

    def pack_stored(self, event: Event) -> tuple[Any, ...]:
        return event.worker, DEVICE, event.parent, self.pack_names(event.names)

    def pack_removed(self, event: Event) -> tuple[Any, ...]:
        return event.worker, DEVICE, self.pack_names(event.names)

    def apply_stored(self, packed: list[Any]) -> None:
        stored = self.tree.stored
        for event in packed:
            stored(*event)

    def apply_removed(self, packed: list[Any]) -> None:
        removed = self.tree.removed
        for event in packed:
            removed(*event)

    def find(self, names: Any) -> object:
        return self.tree.match_into(names, self.depths)

    def find_dict(self, names: Any) -> object:
        return self.tree.match(names)

    def depth(self, names: Any, worker: int) -> int:
        return self.tree.match(names).get(worker, 0)

    def remove_workers(self, workers: range) -> None:
        for worker in workers:
            self.tree.drop(worker)

    def own_bytes(self) -> int:
        return self.tree.counters.bytes

    def hash(self, tokens: list[int], block_size: int) -> object:
        return joined_hashes(tokens, block_size, parent=ROOT, secret=HASH_SECRET_TEST)


class Pure(Ours):
    """The pure twin: what an installation without a compiler runs."""

    name = "pure"
    make = PureRadixTree
    calls = 30

    def hash(self, tokens: list[int], block_size: int) -> None:
        return None
