"""The network in memory keeps the promises of every network, in real and in virtual time."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

import pytest

from pdserve.net.transport.memory import MemoryWorld
from pdserve.testing import virtual_time
from tests.support.net_conformance import ByteConformance, LinkConformance

if TYPE_CHECKING:
    from pdserve.net.base import ByteNetwork


class _Memory:
    @functools.cached_property
    def world(self) -> MemoryWorld:
        world = MemoryWorld(random.Random(0))
        self.prepare(world)
        return world

    def prepare(self, world: MemoryWorld) -> None:
        """Subclasses make the world harder."""

    def network(self, host: str) -> ByteNetwork:
        return self.world.network(host)

    def address(self, host: str) -> str:
        return f"{host}:0"


class BytesInMemory(_Memory, ByteConformance):
    pass


class LinksInMemory(_Memory, LinkConformance):
    pass


class BytesFarAway(BytesInMemory):
    def prepare(self, world: MemoryWorld) -> None:
        world.set_conditions(delay_min=0.0005, delay_max=0.003, segment=20_000)


class LinksFarAway(LinksInMemory):
    def prepare(self, world: MemoryWorld) -> None:
        world.set_conditions(delay_min=0.0005, delay_max=0.003, segment=20_000)


class LinksInPieces(LinksInMemory):
    """Reads of a few bytes, delays, a narrow network: every frame is cut somewhere."""

    def prepare(self, world: MemoryWorld) -> None:
        world.set_conditions(delay_max=0.001, capacity=3000, split=True)


def cases(suite: type) -> list[str]:
    return [name for name in dir(suite) if name.startswith("test_")]


PLACES = [BytesInMemory, BytesFarAway, LinksInMemory, LinksFarAway]
HEAVY = {
    "test_requests_do_not_wait_for_bulk",
    "test_payload_memory_can_be_reused_as_soon_as_it_is_reported",
}


@pytest.mark.parametrize(
    ("place", "case"), [(place, case) for place in PLACES for case in cases(place)]
)
def test_memory_conforms(place, case) -> None:
    virtual_time.run(getattr(place(), case)())


@pytest.mark.parametrize("case", sorted(set(cases(LinksInPieces)) - HEAVY))
def test_links_do_not_mind_how_bytes_are_cut(case) -> None:
    virtual_time.run(getattr(LinksInPieces(), case)())


class TestInRealTime(LinksInMemory):
    """Under the loop of production too."""
