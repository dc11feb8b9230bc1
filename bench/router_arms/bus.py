"""A router in a process and on a core of its own; frontends and workers in another, over TCP.

The workers serve nothing, but send all that real ones send: load reports, the start of a request,
its first token, the blocks that their pools store and remove, and the end of the request."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import multiprocessing
import os
import pstats
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bench.router_arms.prompts import BLOCK, NAME, Prompts
from pdserve.ids import NodeId
from pdserve.messages.kv_events import KV, HashesRemoved, HashesStored, PoolDigest
from pdserve.messages.node import ModelSummary, NodeCard, part_hash
from pdserve.messages.request import FirstTokenStats
from pdserve.messages.routing import (
    LOAD,
    SEQUENCES,
    ReleaseBooking,
    RouteRequest,
    WorkerLoad,
    booking_key,
)
from pdserve.net.transport.tcp import TcpNetwork
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.router.config import RouterConfig
from pdserve.router.policies.loader import load_policy
from pdserve.router.service import RouterService
from pdserve.runtime.node import Node, NodeConfig
from pdserve.runtime.rpc_methods import RELEASE, ROUTE
from pdserve.runtime.topics.service import Topics
from pdserve.sim.replay.metrics import quantile
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from pdserve.ids import Seconds

__all__ = ["Bus", "Seen", "measure"]

ROUTER: Final = NodeId("router")
_KEY: Final = bytes(32)
_WORKED_OFF: Final[Seconds] = 0.05
"""Seconds from a request's first token to its end, at low rate."""
_TOP: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """The settings of a measurement."""

    blocks: int
    """Blocks of a prompt."""
    workers: int = 16
    frontends: int = 4
    under_way: int = 64
    """Concurrent requests when throughput is measured."""
    rate: float = 100.0
    """Requests per second when latency is measured."""
    seconds: Seconds = 5.0
    policy: str = "ttft"
    pool_blocks: int = 32_768
    """Blocks of a worker's pool; the oldest prompt's blocks are removed first."""
    profile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The results."""

    decisions: int
    cpu: Seconds
    """CPU time of the router's process for these decisions."""
    wall: Seconds
    held: int
    p50: Seconds
    """Seconds from request to answer, at low rate."""
    p99: Seconds
    events: int
    """Events of the workers' pools that the router's index applied."""
    top: list[tuple[float, int, str]]
    """(share of the time, calls, function), the largest first; only with `profile`."""


def make_node(name: str, role: str, *join: str) -> Node:
    """Makes a node on a free port of this machine."""
    config = NodeConfig(
        node=NodeId(name), role=role, listen="127.0.0.1:0", join=join, cluster="bench"
    )
    return Node(
        config,
        TcpNetwork(config.net, None),
        keys=lambda: (_KEY,),
        entropy=os.urandom,
        random=random.Random(name),
        wall=time.time,
    )


def _loop() -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# ---------------------------------------------------------------------- the router's process


async def _route(pipe: Connection, policy: str, profile: cProfile.Profile | None) -> None:
    node = make_node(ROUTER, "router")
    topics = Topics(node, node.timers)
    config = RouterConfig(policy=policy)
    service = RouterService(
        config,
        load_policy(policy),
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
            word = pipe.recv()
            if word == "end":
                return
            if word == "profile" and profile is not None:
                profile.enable()
            elif profile is not None:
                profile.disable()
            numbers = service.core.numbers
            serving = sum(service.core.pool.models().get("m", {}).values())
            events = service.core.index.counters["events"]
            pipe.send((time.process_time(), numbers.placed, numbers.held, events, serving))


def _router(pipe: Connection, core: int | None, bus: Bus) -> None:
    _pin(core)
    profile = cProfile.Profile() if bus.profile else None
    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(_route(pipe, bus.policy, profile))
    pipe.send([] if profile is None else _top(profile))


def _top(profile: cProfile.Profile) -> list[tuple[float, int, str]]:
    stats = pstats.Stats(profile)
    rows = [
        (own, calls, _place(*where))
        for where, (_, calls, own, _, _) in stats.stats.items()  # type: ignore[attr-defined]
    ]
    total = sum(own for own, _, _ in rows)
    return [(own / total, calls, where) for own, calls, where in sorted(rows)[: -_TOP - 1 : -1]]


def _place(path: str, line: int, name: str) -> str:
    if "pdserve" in path:
        return f"{path.rpartition('pdserve/')[2]}: {name}"
    return name if line == 0 else f"{os.path.basename(path)}: {name}"


# ---------------------------------------------------------------------- frontends and workers


class _Pool:
    """The content of a worker's pool, as the source of its log; lighter than a real pool."""

    def __init__(self, bus: Bus, prompts: Prompts) -> None:
        self._beginnings: list[HashesStored] = []
        self._ends: deque[HashesStored] = deque()
        """Ends of prompts, oldest first; common beginnings are never removed."""
        self._shared = set(prompts.prefixes)
        """Common beginnings that are not stored yet."""
        self._own: set[bytes] = set()
        self._half = NAME * (bus.blocks // 2)
        self._most = bus.pool_blocks
        self._digest = PoolDigest()
        self.blocks = 0

    def store(self, names: bytes) -> bytes:
        """The event of a prompt that was computed; empty if the pool did not change."""
        shared, own = names[: self._half], names[self._half :]
        changes: list[HashesStored | HashesRemoved] = []
        if shared in self._shared:
            self._shared.remove(shared)
            self._beginnings.append(self._add(bytes(NAME), shared))
            changes.append(self._beginnings[-1])
        if own not in self._own:
            self._own.add(own)
            self._ends.append(self._add(shared[-NAME:], own))
            changes.append(self._ends[-1])
        while self.blocks > self._most and len(self._ends) > 1:
            changes.append(self._remove())
        return encode(changes) if changes else b""

    def _add(self, parent: bytes, names: bytes) -> HashesStored:
        self._digest.change(0, names)
        self.blocks += len(names) // NAME
        return HashesStored(0, parent, names)

    def _remove(self) -> HashesRemoved:
        names = self._ends.popleft().names
        self._own.discard(names)
        self._digest.change(0, names)
        self.blocks -= len(names) // NAME
        return HashesRemoved(0, names)

    def snapshot(self) -> Iterator[bytes]:
        """The stored blocks, in pieces; see `LogSource.snapshot`."""
        return iter([encode([stored]) for stored in (*self._beginnings, *self._ends)])

    def digest(self) -> int:
        """The digest of the stored blocks; see `LogSource.digest`."""
        return self._digest.value()


class Worker:
    """A worker that serves nothing and publishes everything that a worker publishes."""

    def __init__(self, name: str, seed: str, bus: Bus, prompts: Prompts) -> None:
        self.node = make_node(name, "worker", seed)
        self.topics = Topics(self.node, self.node.timers)
        self.sequences = self.topics.publish_set(SEQUENCES)
        self._load = self.topics.publish_state(LOAD, encode)
        self._pool = _Pool(bus, prompts)
        self._kv = self.topics.publish_log(KV, self._pool)
        self._room = bus.pool_blocks
        self.running = 0

    async def start(self) -> None:
        """Joins the cluster and publishes the model."""
        await self.node.start()
        model = ModelSummary(
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
        self.report()

    def report(self) -> None:
        """Reports the load ten times a second."""
        self._load.set(
            WorkerLoad(
                ready=True,
                running=self.running,
                max_sequences=4096,
                blocks_total=self._room,
                blocks_used=min(self._room, self.running * 8),
                blocks_cached=self._pool.blocks,
            )
        )

    def take(self, names: bytes, booking: int) -> None:
        """Reports that the request has arrived."""
        self.running += 1
        self.sequences.put(booking_key(booking))
        self.sequences.flush()

    def start_answer(self, names: bytes, booking: int, overlap: int) -> None:
        """Reports that the prompt is computed."""
        tokens = BLOCK * (len(names) // NAME - overlap) + 5
        work = 1e-4 + 1e-6 * tokens
        self.sequences.put(
            booking_key(booking), encode(FirstTokenStats(BLOCK * overlap, 0.0, work, work))
        )
        self.sequences.flush()
        if event := self._pool.store(names):
            self._kv.append(event)

    def end(self, booking: int) -> None:
        """Reports that the answer is complete."""
        self.running -= 1
        self.sequences.drop(booking_key(booking))
        self.sequences.flush()


class _Load:
    """The clients, and the workers that answer them."""

    def __init__(self, bus: Bus, fronts: list[Node], workers: dict[NodeId, Worker]) -> None:
        self._bus = bus
        self._fronts = fronts
        self._workers = workers
        self._prompts = Prompts(bus.blocks, seed=1)
        self._asked = 0
        self.times: list[Seconds] = []

    async def ask(self, *, linger: Seconds = 0.0) -> None:
        """Sends one request and runs it to its end."""
        self._asked += 1
        front = self._fronts[self._asked % len(self._fronts)]
        names = self._prompts.draw()
        request = RouteRequest(
            request_id="r",
            model="m",
            prompt_tokens=BLOCK * self._bus.blocks + 5,
            max_tokens=100,
            names=names,
            block_size=BLOCK,
        )
        asked = time.perf_counter()
        link = await front.link(ROUTER, timeout=5.0)  # the last one may have been replaced
        routed = await link.request(ROUTE, request, timeout=30.0)
        self.times.append(time.perf_counter() - asked)
        worker = self._workers[routed.worker]
        worker.take(names, routed.booking)
        await asyncio.sleep(0)
        worker.start_answer(names, routed.booking, routed.overlap_blocks)
        await asyncio.sleep(linger)
        worker.end(routed.booking)
        link = await front.link(ROUTER, timeout=5.0)
        link.tell(RELEASE.id, encode(ReleaseBooking(routed.booking, "finished")))

    async def crowd(self, seconds: Seconds) -> None:
        """Sends requests as fast as they are answered."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds

        async def one() -> None:
            while loop.time() < until:
                await self.ask()

        await asyncio.gather(*(one() for _ in range(self._bus.under_way)))

    async def trickle(self, seconds: Seconds) -> None:
        """Sends requests at a low rate and does not wait for answers."""
        loop, draw = asyncio.get_running_loop(), random.Random(1)
        asked = []
        until = loop.time() + seconds
        while loop.time() < until:
            asked.append(loop.create_task(self.ask(linger=_WORKED_OFF)))
            await asyncio.sleep(draw.expovariate(self._bus.rate))
        await asyncio.gather(*asked)

    async def report(self) -> None:
        """Reports the load of all workers until it is cancelled."""
        while True:
            for worker in self._workers.values():
                worker.report()
            await asyncio.sleep(0.1)


async def _drive(pipe: Connection, bus: Bus) -> Seen:
    loop = asyncio.get_running_loop()
    address = await loop.run_in_executor(None, pipe.recv)
    prompts = Prompts(bus.blocks, seed=1)
    workers = [Worker(f"worker-{i:02}", address, bus, prompts) for i in range(bus.workers)]
    fronts = [make_node(f"frontend-{i}", "frontend", address) for i in range(bus.frontends)]
    for worker in workers:
        await worker.start()
    for front in fronts:
        await front.start()
    for front in fronts:
        await front.link(ROUTER, timeout=5.0)

    async def numbers(word: str = "numbers") -> tuple[float, int, int, int, int]:
        def asked() -> tuple[float, int, int, int, int]:
            pipe.send(word)
            told: tuple[float, int, int, int, int] = pipe.recv()
            return told

        return await loop.run_in_executor(None, asked)

    while (await numbers())[-1] < bus.workers:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    load = _Load(bus, fronts, {worker.node.id: worker for worker in workers})
    reports = loop.create_task(load.report())
    await load.crowd(1.5)  # the router learns how long prompts take, and the pools fill
    load.times.clear()
    await load.trickle(bus.seconds)
    times = sorted(load.times)
    cpu, placed, held, events, _ = await numbers("profile")
    begin = loop.time()
    await load.crowd(bus.seconds)
    wall = loop.time() - begin
    cpu2, placed2, held2, events2, _ = await numbers()
    reports.cancel()
    pipe.send("end")
    top = await loop.run_in_executor(None, pipe.recv)
    return Seen(
        decisions=placed2 - placed,
        cpu=cpu2 - cpu,
        wall=wall,
        held=held2 - held,
        events=events2 - events,
        p50=quantile(times, 0.5),
        p99=quantile(times, 0.99),
        top=top,
    )


def _pin(core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})


def _cores() -> tuple[int | None, int | None]:
    """The router's core, and the core of all other processes."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        return None, None
    first, second, *_ = sorted(os.sched_getaffinity(0))
    return first, second


def measure(bus: Bus) -> Seen:
    """Measures once, in two processes."""
    mine, its = multiprocessing.Pipe()
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    core, other = _cores()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_router, args=(its, core, bus), daemon=True)
    process.start()
    _pin(other)
    try:
        with asyncio.Runner(loop_factory=_loop) as runner:
            return runner.run(_drive(mine, bus))
    finally:
        process.terminate()
        process.join()
        if before is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, before)
