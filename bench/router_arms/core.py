"""Measures the cost of one decision inside a router, by policy."""

from __future__ import annotations

import gc
import time
from importlib.metadata import entry_points
from random import Random
from typing import TYPE_CHECKING, Final

from bench.router_arms.prompts import BLOCK, Prompts
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.kv_events import HashesStored
from pdserve.messages.request import FirstTokenStats
from pdserve.messages.routing import RouteRequest, WorkerLoad
from pdserve.router.admission_queue import PlacedRequest
from pdserve.router.config import RouterConfig
from pdserve.router.core import RouterCore
from pdserve.router.policies.loader import load_policy
from pdserve.router.worker_table import WorkerFacts
from pdserve.runtime.registry import Member
from pdserve.sim.replay.metrics import quantile
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["CoreArm", "policies"]

_ASKER: Final = NodeLife(NodeId("frontend"), 1)
_OPEN_PER_WORKER: Final = 2
_WARM: Final = 200
_EACH: Final[Seconds] = 0.001
"""Seconds of the core's own clock between two requests."""


def policies() -> list[str]:
    """All installed policies."""
    return sorted(entry.name for entry in entry_points(group="pdserve.policies"))


class CoreArm:
    """A router's core; its workers hold prefixes and have work."""

    def __init__(self, policy: str, workers: int, blocks: int) -> None:
        self._random = Random(1)
        self._now = 0.0
        self._blocks = blocks
        self._prompts = Prompts(blocks, seed=1)
        config = RouterConfig(policy=policy)
        self._core = RouterCore(config, load_policy(policy), self._random, clock=lambda: self._now)
        self._workers = [NodeLife(NodeId(f"worker-{i:03}"), 1) for i in range(workers)]
        for worker in self._workers:
            self._start(worker)
        self._open: list[PlacedRequest] = []
        for _ in range(_WARM + _OPEN_PER_WORKER * workers):
            self._turn(_OPEN_PER_WORKER * workers)

    def _start(self, worker: NodeLife) -> None:
        core = self._core
        core.worker(0.0, WorkerFacts(worker, ("m",), max_sequences=256))
        core.index.worker_up(worker, events=True)
        feed = core.index.target(Member(node=worker.node, epoch=1, address="", role="worker"))
        stored = [
            HashesStored(tier=0, parent=bytes(8), names=prefix)
            for prefix in self._random.sample(self._prompts.prefixes, 4)
        ]
        feed.apply(encode(stored))
        self._report(worker)

    def _report(self, worker: NodeLife) -> None:
        load = WorkerLoad(
            ready=True,
            running=self._random.randrange(64),
            max_sequences=256,
            blocks_total=100_000,
            blocks_used=self._random.randrange(30_000),
            blocks_cached=20_000,
            kv_tokens=self._random.randrange(500_000),
        )
        self._core.load(worker, load, self._now)

    def _route_request(self) -> RouteRequest:
        names = self._prompts.draw()
        return RouteRequest(
            request_id="r",
            model="m",
            prompt_tokens=BLOCK * self._blocks + 5,
            max_tokens=256,
            names=names,
            block_size=BLOCK,
            session_id=str(self._random.randrange(1000)),
        )

    def _turn(self, most: int) -> Seconds:
        """Makes one request and all its follow-up events; returns this thread's time for the
        decision."""
        core, request = self._core, self._route_request()
        self._now += _EACH
        begin = time.thread_time()
        outcome = core.offer(self._now, _ASKER, request, lambda outcome: None)
        took = time.thread_time() - begin
        if not isinstance(outcome, PlacedRequest):
            raise TypeError("a worker should be open")
        booking = outcome.booking
        work = 0.005 + 1e-6 * (booking.prompt_tokens - booking.cached_tokens)
        started = FirstTokenStats(booking.cached_tokens, 0.0, work, work)
        core.holds(self._now, booking.worker, booking.id, started)
        self._open.append(outcome)
        if len(self._open) > most:
            done = self._open.pop(self._random.randrange(len(self._open))).booking
            core.bookings.release(done.id)
            core.let_go(done.worker, done.id)
        if self._random.random() < 0.1:
            self._report(self._random.choice(self._workers))
        return took

    def measure(self, count: int) -> tuple[Seconds, Seconds]:
        """Median and 99th percentile of a decision."""
        gc.collect()
        gc.freeze()
        most = _OPEN_PER_WORKER * len(self._workers)
        times = sorted(self._turn(most) for _ in range(count))
        gc.unfreeze()
        return quantile(times, 0.5), quantile(times, 0.99)
