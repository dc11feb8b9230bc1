"""Reads SGLang's KV events and renames their blocks, so that routers know them. Imports no SGLang.

Batches come over a socket that may lose some; `BatchOrder` finds gaps by their numbers. `decode`
reads a batch. `NamedBlocks` makes pdserve's hashes from the tokens in the events.

Pure: sockets are `event_feed`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve_engines.renamed_blocks import RenamedBlocks, root_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pdserve.ids import TokenId
    from pdserve.messages.kv_events import KvEvent, Tier

__all__ = ["END", "BatchOrder", "NamedBlocks", "decode"]

END: Final = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""

_TIERS: Final[Mapping[str | None, Tier]] = {
    None: "device",
    "GPU": "device",
    "CPU_PINNED": "host",
    "DISK": "disk",
    "EXTERNAL": "remote",
}
"""SGLang's `medium` -> tier."""

_POSITIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""Fields of the events by place, as releases sent them before events became maps."""


def decode(payload: bytes) -> list[dict[str, Any]]:
    """The events of one batch, each a map with its class's name as `type`.

    Raises `ValueError` for bytes that are no batch.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
        return [_event(event) for event in batch[1]]
    except (msgspec.DecodeError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error


def _event(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return {"type": event["type"], **event}
    kind, *values = event
    return {"type": kind, **dict(zip(_POSITIONS[kind], values, strict=False))}


class BatchOrder:
    """Puts batches in order by their numbers, which begin with 0."""

    def __init__(self) -> None:
        self.next = 0
        """The number of the next batch."""
        self.lost = 0
        """Batches that never came."""

    def due(self, number: int) -> bool:
        """Take the next number; False for a batch that has come before.

        A gap must be filled before: `gap`.
        """
        if number < self.next:
            return False
        self.lost += number - self.next
        self.next = number + 1
        return True

    def gap(self, number: int) -> bool:
        """Whether batches before this one are missing and must be asked for, from `next` on."""
        return number > self.next


class NamedBlocks(RenamedBlocks):
    """The names of all blocks that one SGLang engine holds."""

    def translate(self, events: Iterable[Mapping[str, Any]]) -> list[KvEvent]:
        """Our events for SGLang's."""
        return [ours for event in events for ours in self._one(event)]

    def _one(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        match event["type"]:
            case "AllBlocksCleared":
                yield from self.clear()
            case "BlockStored":
                yield from self._stored(event)
            case "BlockRemoved":
                yield from self.remove(event["block_hashes"], _tier(event))

    def _stored(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        parent = self._parent(event)
        if parent is None or event["block_size"] != self._block_size:
            return  # a chain that is not known or not made by pdserve, or a partial block
        names = self.hashes([_token(token) for token in event["token_ids"]], parent)
        yield from self.store(event["block_hashes"], names, parent, _tier(event))

    def _parent(self, event: Mapping[str, Any]) -> bytes | None:
        """Our hash of the block before; None: it is not known."""
        before = event.get("parent_block_hash")
        return root_of(event.get("cache_salt")) if before is None else self.name_of(before)


def _tier(event: Mapping[str, Any]) -> Tier:
    return _TIERS.get(event.get("medium"), "remote")


def _token(token: TokenId | Sequence[TokenId]) -> TokenId:
    """With some kinds of speculative decoding a block holds pairs of neighbouring tokens; the first
    of each is its own."""
    return token if isinstance(token, int) else token[0]
