"""Runs one replay: a configuration and a trace to its metrics.

The result depends on these two only, not on wall-clock time or hash order.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol

import pdserve
from pdserve.messages.kv_events import TIERS
from pdserve.sim.replay.cluster import ReplayCluster
from pdserve.sim.replay.cold_ttft import cold_ttft_by_length
from pdserve.sim.replay.loop import ReplayLoop
from pdserve.sim.replay.metrics import summary
from pdserve.sim.replay.trace_clients import TraceClients
from pdserve.sim.verdicts import ReplayJudge

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.handoff import WorkerMode
    from pdserve.messages.tiers import TierStats
    from pdserve.sim.replay.cluster import ReplayWorker
    from pdserve.sim.replay.config import ReplayConfig
    from pdserve.sim.replay.record import ReplayRecord
    from pdserve.sim.replay.scaling import Scaler
    from pdserve.sim.verdicts import Verdicts
    from pdserve.sim.workloads.trace_request import TraceRequest

__all__ = ["ReplayFailed", "ReplayResult", "ReplayStopped", "ReplayWatch", "replay"]

_SETTLE_LOOKS: Final = 30
"""Number of checks after the last request, once a second; unwanted prefills may still run."""
_DIGITS: Final = 6
"""Microseconds."""


class ReplayWatch(Protocol):
    """Sees what a replay does, and changes nothing."""

    def begin(self, workers: list[ReplayWorker], now: Callable[[], Seconds]) -> None:
        """The first request is next. `now` returns seconds since the trace's beginning."""
        ...

    def asked(self, number: int, tokens: int, names: bytes) -> None:
        """A request is sent: its number, the length of its prompt, and the prompt's block
        hashes."""
        ...


class _NoWatch:
    def begin(self, workers: list[ReplayWorker], now: Callable[[], Seconds]) -> None:
        pass

    def asked(self, number: int, tokens: int, names: bytes) -> None:
        pass


class ReplayFailed(RuntimeError):
    """Production code raised an unhandled exception, or its counts do not add up: a bug."""


class ReplayStopped(Exception):
    """The caller of a replay has seen enough."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay."""

    records: list[ReplayRecord]
    summary: dict[str, Any]
    workers: list[dict[str, Any]]
    """Each worker's counters at the end."""
    load: list[tuple[float, list[int]]]
    """Samples of (seconds, sequences at each worker)."""

    def plain(self, *, requests: bool = True) -> dict[str, Any]:
        """The result for JSON, with numbers rounded to microseconds."""
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
    on_end: Callable[[ReplayRecord, Seconds], None] = lambda record, now: None,
    watch: ReplayWatch | None = None,
    enough: Callable[[], bool] = lambda: False,
    scaler: Scaler | None = None,
    most_idle: Seconds = inf,
) -> ReplayResult:
    """Run a replay; `on_end` is called with each request that ends, and the time. The result does
    not depend on `watch`. `enough` is asked after each request. `scaler` changes the cluster, and
    its account is `scaling` in the summary. Of times without any request the last `most_idle`
    seconds are replayed: an idle cluster costs a second of CPU an hour, and more with more workers.

    Errors: `ConfigError` for values that cannot work, `ReplayFailed` as soon as a callback has
    raised an exception, `ReplayStopped` as soon as `enough` is true, and what reading the trace
    raises.
    """
    config.validate()
    loop = ReplayLoop()
    with _collecting_rarely():
        try:
            work = _run(config, trace, on_end, enough, watch or _NoWatch(), scaler, most_idle)
            return _until_a_problem(loop, work)
        finally:
            _close(loop)


def _until_a_problem(loop: ReplayLoop, work: Coroutine[Any, Any, ReplayResult]) -> ReplayResult:
    """What `work` returns, unless a callback raises an exception before."""
    task = loop.create_task(work)
    loop.on_problem = task.cancel
    try:
        result = loop.run_until_complete(task)
    except asyncio.CancelledError:
        if not loop.problems:
            # Without a problem the cancellation comes from outside.
            raise
    if loop.problems:
        raise ReplayFailed(f"{len(loop.problems)} errors in callbacks: {loop.problems[0]}")
    return result


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Runs the garbage collector rarely. Prompts are long lists without cycles, and it would scan
    them again and again. At the end it scans what the replay has made; what the process had before
    is frozen until then, and a large process would pay for it in each replay. What a caller has
    frozen stays so."""
    before, frozen = gc.get_threshold(), _has_frozen()
    if not frozen:
        gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.collect()
        if not frozen:
            gc.unfreeze()


@functools.cache
def _has_frozen() -> bool:
    """True if the process had frozen objects at its first replay. It is asked once: the count goes
    through all of them, which takes longer than a short replay."""
    return gc.get_freeze_count() > 0


def _close(loop: ReplayLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


async def _run(
    config: ReplayConfig,
    trace: Iterator[TraceRequest],
    on_end: Callable[[ReplayRecord, Seconds], None],
    enough: Callable[[], bool],
    watch: ReplayWatch,
    scaler: Scaler | None,
    most_idle: Seconds,
) -> ReplayResult:
    def ended(record: ReplayRecord) -> None:
        on_end(record, callers.now())
        if enough():
            callers.stop(ReplayStopped())

    cluster = ReplayCluster(config)
    gone: list[_WorkerEnd] = []
    cluster.on_removed = lambda worker: gone.append(_WorkerEnd.of(worker))
    await cluster.start()
    backends = [frontend.backend for frontend in cluster.frontends]
    callers = TraceClients(
        backends,
        trace,
        on_end=ended,
        on_asked=watch.asked,
        patience=config.patience,
        judge=_no_verdicts if scaler is None else _judge(cluster, config),
        most_idle=most_idle,
    )
    watch.begin(cluster.workers, callers.now)
    sampler = _Sampler(cluster, callers, config.sample_every)
    if scaler is not None:
        await scaler.begin(cluster, callers.now)
    try:
        await callers.run()
    except ReplayStopped:
        await cluster.stop()
        raise
    finally:
        sampler.stop()
        if scaler is not None:
            await scaler.end()
    left = await _settled(cluster)
    ends = sorted([*gone, *map(_WorkerEnd.of, cluster.workers)], key=lambda one: one.order)
    token_bytes = 0 if cluster.wire is None else cluster.wire.token_bytes
    await cluster.stop()
    if left:
        raise ReplayFailed(
            f"all requests have ended, but these are still in flight: {', '.join(left)}"
        )
    longest = max((r.prompt_tokens for r in callers.records if r.completed), default=1)
    cold = cold_ttft_by_length(cluster.quiet_spec, longest)
    modes: dict[str, WorkerMode] = {end.counters["worker"]: end.mode for end in ends}
    counted = [record for record in callers.records if record.arrival >= config.warm_up]
    numbers = summary(counted, config.slo, cold, modes)
    numbers["transfers"] = _moved(ends, token_bytes)
    if scaler is not None:
        numbers["scaling"] = scaler.summary()
    return ReplayResult(callers.records, numbers, [end.counters for end in ends], sampler.seen)


def _no_verdicts(record: ReplayRecord) -> Verdicts:
    """No verdicts: a replay without a planner has no reader of them."""
    return ()


def _judge(cluster: ReplayCluster, config: ReplayConfig) -> ReplayJudge:
    """Judges requests while the cluster serves. Times of the longest prompts are extrapolated."""
    longest = min(config.kv_tokens, config.max_model_len) // 2
    return ReplayJudge(config.slo, cold_ttft_by_length(cluster.quiet_spec, max(2, longest)))


async def _settled(cluster: ReplayCluster) -> list[str]:
    """What is left of requests once the last releases and reports have come."""
    left: list[str] = []
    for _ in range(_SETTLE_LOOKS):
        await asyncio.sleep(1.0)
        left = cluster.leftovers()
        if not left:
            break
    return left


@dataclass(frozen=True, slots=True)
class _WorkerEnd:
    """What a worker has done, seen when it left or at the end."""

    order: int
    """Workers are listed as they came."""
    mode: WorkerMode
    counters: dict[str, Any]
    sent_seconds: Seconds
    attempts: Mapping[str, int]
    """Handoffs that it received, by what became of them."""

    @classmethod
    def of(cls, worker: ReplayWorker) -> _WorkerEnd:
        decode = worker.agent.decode
        return cls(
            worker.order,
            worker.mode,
            _counters(worker),
            sum(path.sent_seconds for path in worker.engine.paths()),
            {} if decode is None else dict(decode.numbers().ended),
        )


def _moved(ends: Sequence[_WorkerEnd], token_bytes: Bytes) -> dict[str, Any]:
    """KV that went from worker to worker."""
    ended: Counter[str] = Counter()
    for end in ends:
        ended.update(end.attempts)
    return {
        "bytes": sum(end.counters["received_tokens"] for end in ends) * token_bytes,
        "seconds": sum(end.sent_seconds for end in ends),
        "attempts": dict(sorted(ended.items())),
        "attempts_lost": sum(count for outcome, count in ended.items() if outcome != "done"),
    }


class _Sampler:
    """Looks at the workers' load now and then."""

    def __init__(self, cluster: ReplayCluster, callers: TraceClients, every: Seconds) -> None:
        self.seen: list[tuple[float, list[int]]] = []
        self._cluster = cluster
        self._callers = callers
        self._every = every
        self._loop = asyncio.get_running_loop()
        self._look()

    def _look(self) -> None:
        load = [worker.agent.requests for worker in self._cluster.workers]
        self.seen.append((self._callers.now(), load))
        self._timer = self._loop.call_later(self._every, self._look)

    def stop(self) -> None:
        """No more."""
        self._timer.cancel()


def _counters(worker: ReplayWorker) -> dict[str, Any]:
    stats = worker.engine.stats()
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
        "tiers": {TIERS[one.tier]: _tier(one) for one in stats.tiers},
        "fetches": _fetches(worker),
    }


def _fetches(worker: ReplayWorker) -> dict[str, int]:
    """Blocks that were known to be below the device or elsewhere, by what became of them."""
    core = worker.engine.core
    scheduler = None if core is None else getattr(core, "scheduler", None)
    onboarder = None if scheduler is None else scheduler.onboarder
    return {} if onboarder is None else dict(sorted(onboarder.outcomes.items()))


def _tier(stats: TierStats) -> dict[str, Any]:
    return {
        "blocks_total": stats.blocks_total,
        "blocks_valid": stats.blocks_valid,
        "stored": stats.blocks_stored,
        "evicted": stats.blocks_evicted,
        "refused": stats.blocks_refused,
        "unsaved": stats.blocks_unsaved,
        "hit_tokens": stats.hit_tokens,
        "failed": stats.failed,
        "read_bytes": stats.read_bytes,
        "written_bytes": stats.written_bytes,
        "early_starts": stats.early_starts,
        "early_failed": stats.early_failed,
        "retention": stats.retention,
    }


def _rounded(value: Any) -> Any:
    """Returns the value with its numbers rounded so far that the rounding of sums does not show."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
