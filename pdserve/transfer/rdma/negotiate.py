"""Decides what two adapters use before their queue pairs connect: addresses, MTU, who takes which
rail. Pure: records in, records out.

    RoCE        both ends by GID; RoCE v2 over IPv4 first, then IPv6, then link-local addresses.
                RoCE v1 does not cross routers and is used only if it is named
    InfiniBand  by LID; with the GID where the subnets differ
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
    """Index of the adapter on its node; selects the rail's keys of each region."""
    link: LinkLayer
    number: Annotated[int, Meta(ge=0, lt=1 << 24)]
    sequence: Annotated[int, Meta(ge=0, lt=1 << 24)]
    """Number of its first packet."""
    gid: Annotated[bytes, Meta(min_length=16, max_length=16)]
    lid: Annotated[int, Meta(ge=0, lt=1 << 16)]
    mtu: Annotated[int, Meta(ge=1, le=5)]
    """MTU in the numbering of verbs: 1 is 256 bytes, 5 is 4096."""
    reads: Annotated[int, Meta(ge=0, le=255)]
    """Most RDMA reads and atomics that it can answer at a time. None are sent."""


class RdmaDetails(msgspec.Struct, frozen=True, array_like=True):
    """The details of PathHello and PathWelcome."""

    devices: Annotated[int, Meta(ge=1, le=MAX_RAILS)]
    """Number of the node's adapters; each has its own keys of every region."""
    offers: Annotated[tuple[RailOffer, ...], Meta(min_length=1, max_length=MAX_RAILS)]


@dataclass(frozen=True, slots=True)
class DeviceName:
    """`mlx5_0`, `mlx5_0:1` (port), `mlx5_0:1:3` (port and GID index)."""

    name: str
    port: int = 1
    gid_index: int | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Parse one device name. Errors: `PlanError`."""
        name, *numbers = text.split(":")
        if not name or len(numbers) > 2 or not all(n.isdecimal() for n in numbers):
            raise PlanError(
                f"{text!r} is not of the form device, device:port or device:port:gid-index"
            )
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
    """The table entry to use. Errors: `PlanError` if there is none."""
    if wanted is not None:
        named = [gid for gid in table if gid.index == wanted]
        if not named:
            raise PlanError(f"there is no GID {wanted}")
        return named[0]
    usable = [gid for gid in table if any(gid.value)]
    if link == "roce":
        usable = [gid for gid in usable if gid.kind == ROCE_V2]
    if not usable:
        raise PlanError("the port has no RoCE v2 GID; check that its interface has an IP address")
    return min(usable, key=lambda gid: (_distance(gid.value), gid.index))


def _distance(value: bytes) -> int:
    address = ipaddress.IPv6Address(value)
    if address.ipv4_mapped is not None:
        return 0
    return 2 if address.is_link_local else 1


def common_mtu(ours: RailOffer, theirs: RailOffer) -> int:
    """The smaller MTU of two ports. Errors: `PlanError` between two kinds of network."""
    if ours.link != theirs.link:
        raise PlanError(f"this adapter is on {ours.link}, the peer's on {theirs.link}")
    return min(ours.mtu, theirs.mtu)


def pair_rails(offers: Sequence[RailOffer], links: Sequence[LinkLayer]) -> list[int]:
    """For each rail of the peer, the index of this node's adapter that takes it: in turn, among
    adapters on the same kind of network. Errors: `PlanError` if there is none."""
    chosen = []
    for turn, offer in enumerate(offers):
        same = [place for place, link in enumerate(links) if link == offer.link]
        if not same:
            raise PlanError(f"this node has no adapter on {offer.link}")
        chosen.append(same[turn % len(same)])
    return chosen
