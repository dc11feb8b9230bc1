"""Defines the records of KV tiers: their settings, their statistics, and where a prefix is.

A worker's tiers are its device pool, its host memory and its disk; `messages.kv_events.Tier` names
them. A *source* says from where the KV of cached tokens came.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.messages.kv_events import Tier, TierNumber

KvFetchMode = Literal["auto", "always", "never"]
"""When a worker fetches a prefix from another one: if that is predicted to be sooner than to
compute it, whenever it can, or not at all."""

Admission = Literal["auto", "all", "reused"]
"""What a tier takes in: everything, or only blocks that were used again or belong to a
conversation. `auto` decides by how long the tier keeps blocks, and by the write budget."""

CacheScope = Literal["", "shared", "never"]
"""What a request's blocks may be used for. Empty and `shared`: by later requests of the same salt,
on every tier. `never`: they stay on the device and are not stored on lower tiers."""

SourceName = Literal["host", "disk", "peer"]
"""Where cached tokens were before they came to the device."""

LaneName = Literal["d2h", "h2d", "disk_read", "disk_write", "fetch"]
"""A path for bytes: device to host, host to device, from and to disk, from other workers."""

Bytes = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]


class TierSpec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Settings of the tiers below the device, for one engine core."""

    host_bytes: Bytes = 0
    """Size of the host tier; 0: none. With a disk alone, a small arena is allocated for reads."""
    disk_path: str = ""
    """Directory of the disk tier; empty: none."""
    disk_bytes: Bytes = 0
    """Most bytes that the disk tier takes."""
    disk_write_budget: Bytes = 0
    """Most bytes written to disk in a day; 0: the tier's own size."""
    disk_owner: str = ""
    """Name of the worker, which prefers the subdirectory that it had before."""
    host_admission: Admission = "auto"
    disk_admission: Admission = "auto"
    fetch: KvFetchMode = "auto"
    turn_bonus: Annotated[float, Meta(ge=0)] = 60.0
    """Seconds by which a conversation's blocks count as younger, for each of up to 4 earlier turns.
    0: plain LRU."""

    @property
    def is_used(self) -> bool:
        """True if there is a tier below the device."""
        return bool(self.host_bytes or self.disk_path)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tiers below the device."""
        return (*(("host",) if self.host_bytes else ()), *(("disk",) if self.disk_path else ()))


class LaneLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a lane of a worker does, for predictions."""

    lane: LaneName
    backlog: Bytes
    """Bytes that wait or are under way."""
    bandwidth: Annotated[float, Meta(ge=0)]
    """Bytes per second while it is busy; 0: not known yet."""
    latency: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds from the start of a job to its first byte."""


class TierStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A snapshot of one lower tier. Counters only grow during one life of the core."""

    tier: TierNumber
    blocks_total: Count = 0
    blocks_valid: Count = 0
    blocks_filling: Count = 0
    """Places that a copy or a read fills now."""
    blocks_claimed: Count = 0
    """Valid blocks that somebody reads now."""
    blocks_stored: Count = 0
    """Blocks that came in since the start."""
    blocks_evicted: Count = 0
    """Blocks that went out for lack of room."""
    blocks_refused: Count = 0
    """Blocks that admission did not take in."""
    blocks_unsaved: Count = 0
    """Blocks of the tier above that were evicted before they could be copied here."""
    hit_tokens: Count = 0
    """Tokens that came to the device from here."""
    failed: Count = 0
    """Reads that failed: blocks that could not be read or did not match their checksum."""
    read_bytes: Bytes = 0
    written_bytes: Bytes = 0
    retention: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds that a block stays before it is evicted, recently; 0: nothing was evicted yet."""
    trouble: str = ""
    """Why the tier works in part or not at all, in words for the operator; empty: it works."""
    shared_blocks: Count = 0
    """Blocks that other workers have sealed below the same directory, and that can be read."""
    shared_read: Count = 0
    """Blocks of them that were read."""
    shared_failed: Count = 0
    """Blocks of them that were gone or bad when they were read."""
    early_starts: Count = 0
    """Prompts that began before all layers of their blocks had come from here."""
    early_failed: Count = 0
    """Those of them that were computed again, since the other layers were late or did not come."""


class PlanStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a core's plans to fetch prefixes came to, of those whose last blocks were predicted to
    come from one source. Counters, of plans whose fetches have ended."""

    source: SourceName
    plans: Count = 0
    predicted: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds that the fetches were predicted to take."""
    actual: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds that they took."""
    gained: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds by which they were sooner than to compute what came."""
    lost: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds by which others were later than that."""


class KvSource(msgspec.Struct, frozen=True, array_like=True):
    """A worker that has the leading blocks of a prompt, as a router knows it. Only a hint: what the
    worker no longer has is computed."""

    node: str
    epoch: int
    """The life of the worker that is meant."""
    blocks: Count
    """Leading blocks of the prompt that it has in any tier."""
    device_blocks: Count = 0
    """Those of them that are on its device; the others are on lower tiers."""
    retain: bool = True
    """False: enough workers have them already. What is fetched is for this request, and is not
    worth keeping after it."""


class CachedSource(msgspec.Struct, frozen=True, array_like=True):
    """Cached prompt tokens that came from below the device, or from another worker."""

    source: SourceName
    tokens: Count
    node: str = ""
    """The other worker, for `peer`."""


class DropOrder(msgspec.Struct, frozen=True, array_like=True):
    """An operator's order to a worker to forget KV, as `DropKv` of the engine port."""

    owners: tuple[str, ...] | None = None
    """Owners of the cache salts of the prompts that are meant (`blocks.hashing.salt_owner`); None:
    all."""
    older: Annotated[float, Meta(ge=0)] = 0.0
    """Only blocks on lower tiers that nothing has used for so many seconds; 0: all."""


class DropReport(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has forgotten."""

    blocks: dict[Tier, Count] = {}
    """Blocks by tier."""
