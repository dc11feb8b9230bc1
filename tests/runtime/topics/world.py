"""Small nodes with topics in one in-memory network, in virtual time. Who is a member, and what its
card says, is up to the test."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.errors import DeadlineExceeded, LinkLost, ProtocolError
from pdserve.ids import Epoch, NodeId
from pdserve.messages.node import NodeCard
from pdserve.net.settings import NetSettings
from pdserve.net.timers import Timers
from pdserve.net.transport.memory import MemoryWorld
from pdserve.runtime.peers.handlers import ActorTable
from pdserve.runtime.peers.peer_ref import PeerRef
from pdserve.runtime.registry import Member, MemberAppeared, MemberChanged, MemberGone
from pdserve.runtime.tasks import Tasks
from pdserve.runtime.topics.config import LogConfig, TopicsConfig
from pdserve.runtime.topics.service import Topics
from tests.support.net_support import RecordingHandler, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.ids import Seconds
    from pdserve.net.base import IncomingStream, Link
    from pdserve.runtime.registry import MemberEvent
    from pdserve.wire.parser import Buffer

SETTINGS = NetSettings(ping_after=0.5, silent_after=1.5, dial_timeout=1.0, retire_after=2.0)
CONFIG = TopicsConfig(log=LogConfig(ring_bytes=20_000, ring_events=200, healthy=5.0))


class Party:
    """One node: an endpoint, a table of members that the test fills, topics."""

    def __init__(self, world: World, name: str, epoch: Epoch) -> None:
        self.world = world
        self.name = name
        self.id = NodeId(name)
        self.epoch = epoch
        self.random = random.Random(world.random.getrandbits(64))
        self.failures: list[str] = []
        self.tasks = Tasks(name, lambda task, error: self.failures.append(f"{task}: {error!r}"))
        self.timers = Timers(asyncio.get_running_loop())
        self.members: dict[NodeId, Member] = {}
        self._listeners: dict[Callable[[MemberEvent], None], None] = {}
        self._actors = ActorTable(self.tasks)
        handler = RecordingHandler()
        handler.on_stream_hook = self._on_stream
        self.endpoint = node(
            name, world.net.network(name), handler, epoch=epoch, settings=world.settings
        )
        self.topics = Topics(self, self.timers, world.config)

    def _on_stream(self, stream: IncomingStream, method: int, body: Buffer) -> None:
        if method not in self._actors.streams:
            raise ProtocolError("nobody takes this stream")
        self._actors.streams[method](stream, body)

    # ------------------------------------------------------------------ what topics need

    def now(self) -> Seconds:
        return asyncio.get_running_loop().time()

    def host(self, actor: object) -> None:
        self._actors.host(actor)

    def ref(self, node: NodeId, epoch: Epoch | None = None) -> PeerRef:
        return PeerRef(self, node, epoch)

    def link_nowait(self, node: NodeId) -> Link | None:
        return self.endpoint.link(node)

    def local_link(self, node: NodeId) -> None:
        return None

    def on_member(self, listener: Callable[[MemberEvent], None]) -> Callable[[], None]:
        self._listeners[listener] = None
        for member in tuple(self.members.values()):
            listener(MemberAppeared(member))
        return lambda: self._listeners.pop(listener, None)

    async def link(self, node: NodeId, *, timeout: Seconds) -> Link:
        if (found := self.endpoint.link(node)) is not None:
            return found
        if node not in self.members:
            raise LinkLost("no member", sent=False)
        try:
            async with asyncio.timeout(timeout):
                return await self.endpoint.dial(self.members[node].address, expect=node)
        except TimeoutError:
            raise DeadlineExceeded("no link in time") from None

    # ------------------------------------------------------------------ membership

    @property
    def card(self) -> NodeCard:
        return NodeCard(topics=self.topics.names)

    def meet(self, other: Party) -> None:
        """`other` is a member from now on, with its card as it is."""
        old = self.members.get(other.id)
        if old is not None and old.epoch != other.epoch:
            self.lose(other.id)
            old = None
        member = Member(other.id, other.epoch, f"{other.name}:7000", "worker", other.card)
        if old is None:
            bare = replace(member, card=None)
            self.members[other.id] = bare
            self._tell(MemberAppeared(bare))
            old = bare
        self.members[other.id] = member
        self._tell(MemberChanged(member, old))

    def lose(self, node: NodeId) -> None:
        """`node` is gone."""
        self._tell(MemberGone(self.members.pop(node), "died"))

    def _tell(self, event: MemberEvent) -> None:
        for listener in tuple(self._listeners):
            listener(event)

    async def close(self) -> None:
        self.topics.close()
        await self.tasks.close()
        await self.endpoint.close()
        self.timers.close()
        assert not self._listeners
        assert not self.failures


class World:
    """All nodes, each on a host of its name."""

    def __init__(self, seed: int, config: TopicsConfig, settings: NetSettings) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.settings = settings
        self.net = MemoryWorld(random.Random(seed + 1))
        self.parties: dict[str, Party] = {}
        self.loop = asyncio.get_running_loop()

    async def add(self, name: str, epoch: Epoch = 1) -> Party:
        party = self.parties[name] = Party(self, name, epoch)
        await party.endpoint.listen(f"{name}:7000")
        return party

    async def crash(self, name: str) -> None:
        """The process ends without a word; nobody is told."""
        party = self.parties.pop(name)
        self.net.crash(name)
        self.net.pause(name)
        await party.close()
        self.net.resume(name)

    def introduce(self) -> None:
        """Everybody knows everybody as they are now."""
        for party in self.parties.values():
            for other in self.parties.values():
                if other is not party:
                    party.meet(other)

    async def until(self, met: Callable[[], bool], timeout: Seconds = 60.0) -> None:
        """Wait until `met`."""
        end = self.loop.time() + timeout
        while not met():
            assert self.loop.time() < end, "it did not come about"
            await asyncio.sleep(0.01)

    def streams(self) -> int:
        """Streams under way, over all links."""
        links = [link for party in self.parties.values() for link in party.endpoint.links.values()]
        return sum(link.stats().streams for link in links)

    def granted(self) -> int:
        """Credit granted, over all links."""
        links = [link for party in self.parties.values() for link in party.endpoint.links.values()]
        return sum(link.stats().granted for link in links)


@asynccontextmanager
async def world(
    seed: int = 0, config: TopicsConfig = CONFIG, settings: NetSettings = SETTINGS
) -> AsyncIterator[World]:
    """A world; afterwards topics are closed while the links still stand, and nothing is left:
    no stream, no credit, no task, no connection."""
    made = World(seed, config, settings)
    yield made
    made.net.heal()
    made.net.set_conditions(bandwidth=0)
    for name, party in made.parties.items():
        made.net.resume(name)
        party.topics.close()
    await made.until(lambda: made.streams() == 0)
    assert made.granted() == 0
    for party in made.parties.values():
        for name, numbers in party.topics.stats().items():
            assert not numbers.get("subscribers"), name
        await party.close()
    await asyncio.sleep(0)
    assert made.net.connections == 0
