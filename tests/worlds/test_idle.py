"""Counts what wakes an idle cluster up, in virtual time. A new poller is one name more."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from pdserve.blocks.hashing import HASH_SECRET_TEST
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.node import FrontendNode
from pdserve.net.timers import Timer, Timers
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.runtime.hash_secret import FixedHashSecret
from pdserve.runtime.paced_timer import PacedTimer
from pdserve.testing import virtual_time
from tests.runtime.cluster import cluster
from tests.worker.disagg.test_end_to_end import Whole

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

SETTLE = 30.0
WATCHED = 60.0
NODES = 4
ELSE = "_set_result_unless_cancelled"
"""A sleep of the test itself."""
WORKERS, ROUTERS = 2, 1
PER_MINUTE = {
    "WorkerAgent._watch": 61 * WORKERS,
    "WorkerService._watch": 61 * WORKERS,
    "TransferRpc._look": 61 * WORKERS,
    "FirstGuess._look": 7 * WORKERS,
    "RouterService._sweep": 7 * ROUTERS,
    "RouterService._beat": 7 * ROUTERS,
    "RouterService._rebalance": 7 * ROUTERS,
    "ClusterClient._sweep": 13,
    "PeerLink._keepalive": 12 * NODES * (NODES - 1) + NODES,
    "_Subscriber._on_timer": 12,
}
"""Most calls by timers. Who adds a timer adds it here, or lets it rest without work."""


class Wakeups:
    """Calls by timers, and the moments of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.moments: defaultdict[int, set[float]] = defaultdict(set)
        """Of each node, by the identity of its timers."""
        self.tasks: Counter[str] = Counter()
        """Sleeps and timeouts of tasks, by what they wake."""
        self._patch = patch
        expire, run, call_at = Timer.expire, Timers._run, asyncio.BaseEventLoop.call_at

        def note_expiry(timer: Timer) -> None:
            if timer._callback is not None:
                self.calls[name_of(timer._callback)] += 1
            expire(timer)

        def note_run(timers: Timers) -> None:
            self.moments[id(timers)].add(round(timers.now(), 3))
            run(timers)

        def note_call(loop: Any, when: float, callback: Any, *args: Any, **kw: Any) -> Any:
            self.tasks[name_of(callback)] += 1
            return call_at(loop, when, callback, *args, **kw)

        note_run.__qualname__ = run.__qualname__
        patch.setattr(Timer, "expire", note_expiry)
        patch.setattr(Timers, "_run", note_run)
        patch.setattr(asyncio.BaseEventLoop, "call_at", note_call)

    def clear(self) -> None:
        for counts in (self.calls, self.moments, self.tasks):
            counts.clear()

    def stop(self) -> None:
        self._patch.undo()


def name_of(callback: Callable[..., object]) -> str:
    """The name of a function, also of one that is bound to arguments."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, PacedTimer):
        callback = owner._call
    callback = getattr(callback, "func", callback)
    return getattr(callback, "__qualname__", repr(callback))


async def idle(wakeups: Wakeups) -> None:
    """Watches a router, a frontend, a prefill and a decode worker to which nothing happens."""
    async with cluster() as nodes:
        whole = Whole(nodes)
        await whole.begin("p")
        node = nodes.make("f", role="frontend")
        nodes.nodes["f"] = node
        secret, degraded = FixedHashSecret(HASH_SECRET_TEST), Degradations(Metrics())
        frontend = FrontendNode(node, FrontendConfig(), secret, degraded)
        await frontend.join()
        await asyncio.sleep(SETTLE)
        wakeups.clear()
        await asyncio.sleep(WATCHED)
        wakeups.stop()
        await frontend.close(leave=False)
        await whole.close()


def test_what_wakes_an_idle_cluster_up(monkeypatch: pytest.MonkeyPatch) -> None:
    wakeups = Wakeups(monkeypatch)
    virtual_time.run(idle(wakeups))
    assert set(wakeups.calls) == set(PER_MINUTE)
    for name, most in PER_MINUTE.items():
        assert wakeups.calls[name] <= most, name
    # The timers of one node fall on the same moments.
    assert max(map(len, wakeups.moments.values())) <= 66
    assert set(wakeups.tasks) <= {"GossipService._tick", "Timers._run", ELSE}
    assert wakeups.tasks["GossipService._tick"] <= NODES * 150
