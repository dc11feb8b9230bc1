"""One replay, from a configuration and a trace to its numbers.

The result is a function of both: no wall-clock time, no order of a hash is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pdserve
from pdserve.sim.replay.callers import Callers
from pdserve.sim.replay.cluster import Cluster
from pdserve.sim.replay.cold import cold_times
from pdserve.sim.replay.loop import ReplayLoop
from pdserve.sim.replay.metrics import summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.ids import Seconds
    from pdserve.messages.handoff import Mode
    from pdserve.sim.replay.cluster import Worker
    from pdserve.sim.replay.config import ReplayConfig
    from pdserve.sim.replay.record import Record
    from pdserve.sim.traces.base import TraceRequest

__all__ = ["ReplayFailed", "Result", "replay"]

_SETTLE_LOOKS: Final = 30
"""Once a second after the last request: prefills that nobody wanted may still be under way."""
_DIGITS: Final = 6
"""Microseconds."""


class ReplayFailed(RuntimeError):
    """Production code raised what nobody caught, or lost count: a bug."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it."""

    records: list[Record]
    summary: dict[str, Any]
    workers: list[dict[str, Any]]
    """Each one's counters at the end."""
    load: list[tuple[float, list[int]]]
    """(seconds, sequences that each worker had)."""

    def plain(self, *, requests: bool = True) -> dict[str, Any]:
        """For JSON: numbers rounded to microseconds."""
        made: dict[str, Any] = {
            "version": pdserve.__version__,
            "summary": self.summary,
            "workers": self.workers,
            "load": self.load,
        }
        if requests:
            made["requests"] = [record.plain() for record in self.records]
        rounded: dict[str, Any] = _rounded(made)
        return rounded


def replay(
    config: ReplayConfig,
    trace: Iterator[TraceRequest],
    on_end: Callable[[Record, Seconds], None] = lambda record, now: None,
) -> Result:
    """Run it; `on_end` hears of each request that has ended, and when.

    Raises `ConfigError` for what can never work, and what reading the trace raises.
    """
    config.validate()
    loop = ReplayLoop()
    with _collecting_rarely():
        try:
            return loop.run_until_complete(_run(config, trace, on_end, loop))
        finally:
            _close(loop)


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Prompts are long lists in cycles of nobody: the collector would look at them all day."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _close(loop: ReplayLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


async def _run(
    config: ReplayConfig,
    trace: Iterator[TraceRequest],
    on_end: Callable[[Record, Seconds], None],
    loop: ReplayLoop,
) -> Result:
    cluster = Cluster(config)
    await cluster.start()
    backends = [frontend.backend for frontend in cluster.frontends]
    callers = Callers(
        backends, trace, on_end=lambda r: on_end(r, callers.now()), patience=config.patience
    )
    sampler = _Sampler(cluster, callers, config.sample_every)
    await callers.run()
    sampler.stop()
    left = await _settled(cluster)
    workers = [_counters(worker) for worker in cluster.workers]
    moved = _moved(cluster)
    await cluster.stop()
    if left:
        raise ReplayFailed(f"when all requests had ended there were still {', '.join(left)}")
    if loop.problems:
        raise ReplayFailed(f"{len(loop.problems)} errors in callbacks: {loop.problems[0]}")
    longest = max((r.prompt_tokens for r in callers.records if r.completed), default=1)
    cold = cold_times(cluster.quiet_spec, longest)
    modes: dict[str, Mode] = {worker.node.id: worker.mode for worker in cluster.workers}
    numbers = summary(callers.records, config.slo, cold, modes)
    numbers["transfers"] = moved
    return Result(callers.records, numbers, workers, sampler.seen)


async def _settled(cluster: Cluster) -> list[str]:
    """What is left of requests once the last releases and reports have come."""
    left: list[str] = []
    for _ in range(_SETTLE_LOOKS):
        await asyncio.sleep(1.0)
        left = cluster.leftovers()
        if not left:
            break
    return left


def _moved(cluster: Cluster) -> dict[str, Any]:
    """KV that went from worker to worker."""
    paths = [path for worker in cluster.workers for path in worker.engine.paths()]
    ended: Counter[str] = Counter()
    for worker in cluster.workers:
        if worker.member.decode is not None:
            ended.update(worker.member.decode.numbers().ended)
    tokens = sum(worker.engine.statistics().received_tokens for worker in cluster.workers)
    return {
        "bytes": tokens * (cluster.wire.token_bytes if cluster.wire is not None else 0),
        "seconds": sum(path.sent_seconds for path in paths),
        "attempts": dict(sorted(ended.items())),
        "attempts_lost": sum(count for outcome, count in ended.items() if outcome != "done"),
    }


class _Sampler:
    """Looks at the workers' load now and then."""

    def __init__(self, cluster: Cluster, callers: Callers, every: Seconds) -> None:
        self.seen: list[tuple[float, list[int]]] = []
        self._cluster = cluster
        self._callers = callers
        self._every = every
        self._loop = asyncio.get_running_loop()
        self._look()

    def _look(self) -> None:
        load = [worker.member.requests for worker in self._cluster.workers]
        self.seen.append((self._callers.now(), load))
        self._timer = self._loop.call_later(self._every, self._look)

    def stop(self) -> None:
        """No more."""
        self._timer.cancel()


def _counters(worker: Worker) -> dict[str, Any]:
    stats = worker.engine.statistics()
    return {
        "worker": worker.node.id,
        "mode": worker.mode,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "computed_tokens": stats.computed_tokens,
        "output_tokens": stats.output_tokens,
        "finished": stats.finished,
        "preemptions": stats.preemptions,
        "busy_seconds": stats.step_seconds,
        "received_tokens": stats.received_tokens,
        "attempts": stats.attempts,
        "attempts_failed": stats.attempts_failed,
    }


def _rounded(value: Any) -> Any:
    """The same with every number of a size that no rounding of a sum can show in."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
