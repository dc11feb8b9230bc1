"""Dynamo's own radix tree and block hash, by its Python binding (PyPI ai-dynamo-runtime)."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bench.index_arms.world import Arm

if TYPE_CHECKING:
    from bench.index_arms.world import Event


class Dynamo(Arm):
    """Dynamo's tree. Events are JSON, as its binding takes them. A block's hash serves as both of
    Dynamo's hashes."""

    name = "Dynamo"

    def __init__(self) -> None:
        self.core: Any = import_module("dynamo._core")
        self.sent = 0

    def new(self) -> None:
        self.tree: Any = self.core.RadixTree()

    def _event(self, worker: int, data: dict[str, object]) -> tuple[Any, ...]:
        self.sent += 1
        event = {"event_id": self.sent, "data": data, "dp_rank": 0}
        return worker, json.dumps(event, separators=(",", ":")).encode()

    def pack_stored(self, event: Event) -> tuple[Any, ...]:
        blocks = [{"block_hash": name, "tokens_hash": name} for name in event.names]
        stored = {"parent_hash": event.parent, "blocks": blocks}
        return self._event(event.worker, {"stored": stored})

    def pack_removed(self, event: Event) -> tuple[Any, ...]:
        return self._event(event.worker, {"removed": {"block_hashes": event.names}})

    def apply_stored(self, packed: list[Any]) -> None:
        apply = self.tree.apply_event
        for event in packed:
            apply(*event)
        self.tree.find_matches([1])  # its thread answers this after all earlier events

    apply_removed = apply_stored

    def pack_names(self, names: list[int]) -> Any:
        return names

    def find(self, names: Any) -> object:
        return self.tree.find_matches(names)

    def find_dict(self, names: Any) -> object:
        return self.tree.find_matches(names).scores

    def depth(self, names: Any, worker: int) -> int:
        return int(self.tree.find_matches(names).scores.get((worker, 0), 0))

    def remove_workers(self, workers: range) -> None:
        for worker in workers:
            self.tree.remove_worker(worker)
        self.tree.find_matches([1])

    def hash(self, tokens: list[int], block_size: int) -> object:
        return self.core.compute_block_hash_for_seq(tokens, block_size)
