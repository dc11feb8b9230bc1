"""A process full of nodes that join a cluster over TCP, live for a moment, and leave or crash.

    python -m tests.soak.members --join ADDRESS --keys FILE [--at-once N] [--seed S] [--fresh-names]

Reads numbers from its standard input; for each it lets so many nodes come and go, and answers with
a line of JSON once the last is gone. Workers have an engine inline and serve the model `churned`,
frontends ask for it, routers route. What clients hear is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.ids import NodeId
from pdserve.net.cluster_keys import read_keys
from pdserve.net.settings import NetSettings
from pdserve.net.transport.tcp import TcpNetwork
from pdserve.runtime.node import Node, NodeConfig
from pdserve.testing.fake_rdma import FakeFabric
from tests.text import builders
from tests.worlds import roles
from tests.worlds.load_clients import LoadClients

if TYPE_CHECKING:
    from tests.worlds.load_clients import TrackedRequest

MODEL = "churned"
LIFE = 0.5
"""Seconds that a node lives once it has begun, on average."""
ROLES = ("worker", "worker", "worker", "frontend", "frontend", "router")
PATIENCE = 30.0
"""Seconds for a node to begin or to end."""


class Nodes:
    """All of them, and what became of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.counts: Counter[str] = Counter()
        self.complaints: list[str] = []
        self._options = options
        self._keys = read_keys(options.keys)
        self._random = random.Random(options.seed)
        self._settings = NetSettings()
        self._number = 0
        self._tokenizer = builders.byte_level().to_str().encode()

    async def come_and_go(self, count: int) -> None:
        """So many of them, some at a time."""
        left = iter(range(count))

        async def slot(name: str) -> None:
            for _ in left:
                await self._one(name)

        async with asyncio.TaskGroup() as group:
            for number in range(self._options.at_once):
                group.create_task(slot(f"churn-{number}"))

    async def _one(self, name: str) -> None:
        self._number += 1
        if self._options.fresh_names:
            name = f"churn-{os.getpid()}-{self._number}"
        role = self._random.choice(ROLES)
        leave = self._random.random() < 0.5
        part = self._part(name, role)
        callers = self._callers(part, name) if isinstance(part, roles.Frontend) else None
        try:
            async with asyncio.timeout(PATIENCE):
                await part.start()
            if callers is not None:
                callers.start()
            await asyncio.sleep(self._random.expovariate(1 / LIFE))
        except TimeoutError:
            self.complaints.append(f"{name} did not begin")
        if callers is not None:
            await callers.close()
        async with asyncio.timeout(PATIENCE):
            await part.stop(leave=leave)
        self.counts[f"{role} {'left' if leave else 'crashed'}"] += 1

    def _part(self, name: str, role: str) -> roles.VirtualRole:
        config = NodeConfig(node=NodeId(name), role=role, join=(self._options.join,))
        node = Node(
            config,
            TcpNetwork(self._settings),
            keys=lambda: self._keys,
            entropy=os.urandom,
            random=random.Random(self._random.getrandbits(64)),
            wall=time.time,
        )
        settings = roles.NodeSettings(model=MODEL, load_time=0.02, tokenizer=self._tokenizer)
        if role == "worker":
            return roles.Worker(node, settings, FakeFabric(node.random))
        return (
            roles.Frontend(node, settings) if role == "frontend" else roles.Router(node, settings)
        )

    def _callers(self, part: roles.Frontend, name: str) -> LoadClients:
        def begin(account: TrackedRequest) -> None:
            account.on_end = lambda ended: self.counts.update([ended.outcome])

        return LoadClients(
            part,
            (MODEL,),
            f"{name}.{self._number}",
            random.Random(self._random.getrandbits(64)),
            rate=20.0,
            begin=begin,
            complain=self.complaints.append,
        )


async def main(options: argparse.Namespace) -> None:
    nodes = Nodes(options)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        await nodes.come_and_go(int(line))
        report = {"counts": dict(nodes.counts), "complaints": nodes.complaints}
        print(json.dumps(report), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--join", required=True)
    parser.add_argument("--keys", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fresh-names", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)
    asyncio.run(main(parse()))
