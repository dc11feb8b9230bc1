"""What the whole router role does in a second, over the bus: decisions, bookings, first tokens.

    python bench/router_bus.py [--workers 8] [--blocks 64] [--seconds 5]

One process is a router; another plays a frontend that keeps 64 questions under way, and workers
that say of each request that they hold it, how its first token came, and that it has ended, as real
ones do. Both talk TCP on this machine. What counts is the router's own CPU time per decision: a
core that is shared with other work gives fewer decisions per second of the wall's clock.
Writes bench/results/router_bus.md.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.machine import facts
from pdserve.ids import NodeId
from pdserve.messages.node import ModelOffer, NodeCard, part_hash
from pdserve.messages.request import Started
from pdserve.messages.routing import (
    LOAD,
    SEQUENCES,
    Release,
    Route,
    WorkerLoad,
    booking_key,
)
from pdserve.net.tcp import TcpNetwork
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.router.config import RouterConfig
from pdserve.router.policies.load import load_policy
from pdserve.router.service import RouterService
from pdserve.runtime.methods import RELEASE, ROUTE
from pdserve.runtime.node import Node, NodeConfig
from pdserve.runtime.topics.service import Topics
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from pdserve.net.base import Link

RESULT = Path(__file__).parent / "results" / "router_bus.md"
KEY = bytes(32)
UNDER_WAY = 64
BLOCK = 32


def _loop() -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def make_node(name: str, role: str, *join: str) -> Node:
    """On a free port of this machine."""
    config = NodeConfig(
        node=NodeId(name), role=role, listen="127.0.0.1:0", join=join, cluster="bench"
    )
    return Node(
        config,
        TcpNetwork(config.net, None),
        keys=lambda: (KEY,),
        entropy=os.urandom,
        random=random.Random(name),
        wall=time.time,
    )


async def _route(pipe: Connection) -> None:
    node = make_node("router", "router")
    topics = Topics(node, node.timers)
    config = RouterConfig()
    service = RouterService(
        config,
        load_policy(config.policy),
        node,
        topics,
        NodeCard(role="router"),
        Degradations(Metrics()),
    )
    await node.start()
    service.open()
    pipe.send(node.address)
    while True:
        await asyncio.sleep(0.02)
        if pipe.poll():
            if pipe.recv() == "end":
                return
            numbers = service.desk.numbers
            serving = sum(service.desk.pool.models().get("m", {}).values())
            pipe.send((time.process_time(), numbers.placed, numbers.held, serving))


def _router(pipe: Connection) -> None:
    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(_route(pipe))


class Worker:
    """One that serves nothing and says all that a worker says."""

    def __init__(self, name: str, seed: str) -> None:
        self.node = make_node(name, "worker", seed)
        self.topics = Topics(self.node, self.node.timers)
        self.sequences = self.topics.publish_set(SEQUENCES)
        self.load = self.topics.publish_state(LOAD, encode)

    async def start(self) -> None:
        await self.node.start()
        model = ModelOffer(
            name="m",
            max_model_len=1 << 20,
            vocab_size=1000,
            block_size=BLOCK,
            tokenizer=part_hash(b"t"),
            tokenizer_config=part_hash(b"c"),
        )
        card = NodeCard(
            role="worker", topics=self.topics.names, models=(model,), max_sequences=4096
        )
        self.node.publish_card(card, {})
        self.load.set(WorkerLoad(ready=True, max_sequences=4096))


async def _ask(
    link: Link, workers: dict[NodeId, Worker], blocks: int, until: float, times: list[float]
) -> None:
    loop, draw = asyncio.get_running_loop(), random.Random(id(times))
    prefixes = [draw.randbytes(8 * blocks) for _ in range(4)]
    while loop.time() < until:
        names = draw.choice(prefixes)[: 8 * draw.randrange(1, blocks + 1)]
        question = Route(
            request_id="r",
            model="m",
            prompt_tokens=len(names) // 8 * BLOCK + 5,
            max_tokens=100,
            names=names,
            block_size=BLOCK,
        )
        asked = loop.time()
        routed = await link.request(ROUTE, question, timeout=30.0)
        times.append(loop.time() - asked)
        sequences, key = workers[routed.worker].sequences, booking_key(routed.booking)
        sequences.put(key)
        sequences.flush()
        await asyncio.sleep(0)
        sequences.put(key, encode(Started(0, 0.0, 1e-4, 1e-6 * question.prompt_tokens)))
        sequences.flush()
        await asyncio.sleep(0)
        sequences.drop(key)
        sequences.flush()
        link.tell(RELEASE, encode(Release(routed.booking, "finished")))


async def _drive(pipe: Connection, count: int, blocks: int, seconds: float) -> str:
    loop = asyncio.get_running_loop()
    address = await loop.run_in_executor(None, pipe.recv)
    workers = [Worker(f"worker-{i}", address) for i in range(count)]
    for worker in workers:
        await worker.start()
    front = make_node("frontend", "frontend", address)
    await front.start()
    link = await front.link(NodeId("router"), timeout=5.0)
    by_name = {worker.node.id: worker for worker in workers}

    def numbers() -> tuple[float, int, int, int]:
        pipe.send("numbers")
        told: tuple[float, int, int, int] = pipe.recv()
        return told

    while (await loop.run_in_executor(None, numbers))[3] < count:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    times: list[float] = []

    async def rounds(length: float) -> None:
        until = loop.time() + length
        asking = (_ask(link, by_name, blocks, until, times) for _ in range(UNDER_WAY))
        await asyncio.gather(*asking)

    await rounds(1.0)  # to learn how long prompts take
    cpu, placed, held, _ = await loop.run_in_executor(None, numbers)
    times.clear()
    await rounds(seconds)
    cpu2, placed2, held2, _ = await loop.run_in_executor(None, numbers)
    pipe.send("end")
    done, used = placed2 - placed, cpu2 - cpu
    times.sort()
    return (
        f"| {count} | {blocks} | {done / used:,.0f} | {used / done * 1e6:.0f} | "
        f"{done / seconds:,.0f} | {times[len(times) // 2] * 1e3:.1f} | {held2 - held} |"
    )


def measure(workers: int, blocks: int, seconds: float) -> str:
    """A row of the table."""
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_router, args=(its,), daemon=True)
    process.start()
    try:
        with asyncio.Runner(loop_factory=_loop) as runner:
            return runner.run(_drive(mine, workers, blocks, seconds))
    finally:
        process.terminate()
        process.join()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 8, 32])
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    text = "\n".join(
        [
            "# The router role over the bus",
            "",
            "Default policy, 64 questions under way, TCP between two processes; each request is",
            "decided, booked, held, started, ended and released. Repeat with",
            "`python bench/router_bus.py`.",
            "",
            *(f"- {fact}" for fact in facts()),
            "",
            "| workers | blocks | decisions per second of the router's CPU | us of it each | "
            "per second of the clock | answer p50, ms | held |",
            "|---:|---:|---:|---:|---:|---:|---:|",
            *(measure(count, options.blocks, options.seconds) for count in options.workers),
            "",
        ]
    )
    print(text)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
