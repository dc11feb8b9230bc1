"""Nodes on one in-memory network, in virtual time."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pdserve.ids import NodeId
from pdserve.net.transport.memory import MemoryWorld
from pdserve.runtime.node import Node, NodeConfig
from pdserve.runtime.peers.local_link import Neighbours
from tests.support.net_support import KEY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Cluster:
    """Every node on a host of its own name, port 7000; the first is everybody's seed."""

    def __init__(self, seed: int = 0, *, together: bool = False) -> None:
        """`together`: all nodes are of one process."""
        self.neighbours = Neighbours() if together else None
        self.random = random.Random(seed)
        self.world = MemoryWorld(random.Random(seed + 1))
        self.nodes: dict[str, Node] = {}
        self.loop = asyncio.get_running_loop()

    def make(
        self,
        name: str,
        *,
        role: str = "worker",
        join: tuple[str, ...] | None = None,
        keys: tuple[bytes, ...] = (KEY,),
        cluster: str = "test",
        host: str = "",
    ) -> Node:
        if join is None:
            join = tuple(f"{other}:7000" for other in list(self.nodes)[:1])
        config = NodeConfig(
            node=NodeId(name), role=role, listen=f"{host or name}:7000", join=join, cluster=cluster
        )
        source = random.Random(self.random.getrandbits(64))
        return Node(
            config,
            self.world.network(host or name),
            keys=lambda: keys,
            entropy=source.randbytes,
            random=random.Random(self.random.getrandbits(64)),
            wall=lambda: 1_700_000_000 + self.loop.time(),
            neighbours=self.neighbours,
        )

    async def add(self, name: str, *, role: str = "worker") -> Node:
        node = self.make(name, role=role)
        self.nodes[name] = node
        await node.start()
        return node

    async def until(self, met: Callable[[], bool], timeout: float = 30.0) -> float:
        """Wait until `met`; returns how long it took."""
        start = self.loop.time()
        while not met():
            assert self.loop.time() - start < timeout, "it did not come about"
            await asyncio.sleep(0.01)
        return self.loop.time() - start

    def converged(self) -> bool:
        """Everybody knows everybody else, in the right life."""
        truth = {node.id: node.epoch for node in self.nodes.values()}
        return all(
            {member.node: member.epoch for member in node.registry} | {node.id: node.epoch} == truth
            for node in self.nodes.values()
        )

    async def crash(self, name: str) -> None:
        """The process ends without a word."""
        node = self.nodes.pop(name)
        self.world.crash(name)
        self.world.pause(name)  # whatever it still does reaches nobody
        await node.close()
        self.world.resume(name)


@asynccontextmanager
async def cluster(seed: int = 0, *, together: bool = False) -> AsyncIterator[Cluster]:
    """A cluster; afterwards nothing is left of it."""
    made = Cluster(seed, together=together)
    try:
        yield made
    finally:
        made.world.heal()
        for name in made.nodes:
            made.world.resume(name)
        for node in made.nodes.values():
            await node.close()
    await asyncio.sleep(0)
    assert made.world.connections == 0
