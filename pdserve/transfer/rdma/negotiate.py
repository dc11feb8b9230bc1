"""What two adapters agree on before a queue pair connects: addresses, MTU, who takes which rail.

It is pure: records in, records out.

    RoCE        both ends by GID; RoCE v2 over IPv4 first, then IPv6, then link-local addresses.
                RoCE v1 does not cross routers and is taken only when it is named
    InfiniBand  by LID; the GID goes along where the subnets differ
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.transfer.copy_plan import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DeviceName",
    "Gid",
    "LinkLayer",
    "RailOffer",
    "RdmaDetails",
    "choose_gid",
    "common_mtu",
    "pair_rails",
]

ROCE_V2: Final = 2
"""`ibv_gid_type`."""
MAX_RAILS: Final = 64

LinkLayer = Literal["roce", "infiniband"]


class RailOffer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One rail's queue pair, as its peer needs to know it."""

    device: Annotated[int, Meta(ge=0, lt=MAX_RAILS)]
    """Which of its node's adapters: it says which of a region's keys are this rail's."""
    link: LinkLayer
    number: Annotated[int, Meta(ge=0, lt=1 << 24)]
    sequence: Annotated[int, Meta(ge=0, lt=1 << 24)]
    """Its first packet's."""
    gid: Annotated[bytes, Meta(min_length=16, max_length=16)]
    lid: Annotated[int, Meta(ge=0, lt=1 << 16)]
    mtu: Annotated[int, Meta(ge=1, le=5)]
    """As verbs number them: 1 is 256 bytes, 5 is 4096."""
    reads: Annotated[int, Meta(ge=0, le=255)]
    """How many reads and atomics it can answer at once. None are sent."""


class RdmaDetails(msgspec.Struct, frozen=True, array_like=True):
    """Of Hello and Welcome."""

    devices: Annotated[int, Meta(ge=1, le=MAX_RAILS)]
    """Of the node; each has its own keys of every region."""
    offers: Annotated[tuple[RailOffer, ...], Meta(min_length=1, max_length=MAX_RAILS)]


@dataclass(frozen=True, slots=True)
class DeviceName:
    """`mlx5_0`, `mlx5_0:1` (port), `mlx5_0:1:3` (port and GID index)."""

    name: str
    port: int = 1
    gid_index: int | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Raises `PlanError`."""
        name, *numbers = text.split(":")
        if not name or len(numbers) > 2 or not all(n.isdecimal() for n in numbers):
            raise PlanError(f"{text!r} is no device, device:port or device:port:gid-index")
        port, gid_index = (*(int(n) for n in numbers), None, None)[:2]
        return cls(name, 1 if port is None else port, gid_index)

    def __str__(self) -> str:
        index = "" if self.gid_index is None else f":{self.gid_index}"
        return f"{self.name}:{self.port}{index}"


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of an adapter's table."""

    index: int
    kind: int
    """`ibv_gid_type`."""
    value: bytes


def choose_gid(table: Sequence[Gid], link: LinkLayer, wanted: int | None = None) -> Gid:
    """The entry to use. Raises `PlanError` when there is none."""
    if wanted is not None:
        named = [gid for gid in table if gid.index == wanted]
        if not named:
            raise PlanError(f"there is no GID {wanted}")
        return named[0]
    usable = [gid for gid in table if any(gid.value)]
    if link == "roce":
        usable = [gid for gid in usable if gid.kind == ROCE_V2]
    if not usable:
        raise PlanError("no GID of RoCE v2: has the interface an address?")
    return min(usable, key=lambda gid: (_distance(gid.value), gid.index))


def _distance(value: bytes) -> int:
    address = ipaddress.IPv6Address(value)
    if address.ipv4_mapped is not None:
        return 0
    return 2 if address.is_link_local else 1


def common_mtu(ours: RailOffer, theirs: RailOffer) -> int:
    """The larger one is cut to the smaller. Raises `PlanError` between two kinds of network."""
    if ours.link != theirs.link:
        raise PlanError(f"{ours.link} here and {theirs.link} there are two networks")
    return min(ours.mtu, theirs.mtu)


def pair_rails(offers: Sequence[RailOffer], links: Sequence[LinkLayer]) -> list[int]:
    """For each rail of the peer the place of this node's adapter that takes it: in turn, among
    those on the same kind of network. Raises `PlanError` when there is none."""
    chosen = []
    for turn, offer in enumerate(offers):
        same = [place for place, link in enumerate(links) if link == offer.link]
        if not same:
            raise PlanError(f"no adapter on {offer.link} here")
        chosen.append(same[turn % len(same)])
    return chosen
