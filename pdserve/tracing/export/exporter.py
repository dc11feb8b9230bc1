"""Exports traces to a collector in the background; a request never waits for it.

    add      queue a trace, or drop and count it
    run      wait for a batch or a second, encode it a few spans per turn of the loop, deliver it
    close    deliver what is queued within two seconds, drop and count the rest

The queue, the batch under way and each wait are bounded, so that a collector that is slow, broken
or gone costs a fixed amount of memory and nothing else. `delivery.py` makes the decisions. The
frontend's start-up owns it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Final

from pdserve.tracing.export.delivery import RETRY_FOR, SpanQueue, judge, pause_before
from pdserve.tracing.export.otlp import encode_span

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.messages.trace import Trace
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Metrics
    from pdserve.tracing.export.collector_http import Collector
    from pdserve.tracing.export.delivery import DeliveryVerdict, DropReason, SpanBatch
    from pdserve.tracing.export.otlp import RequestFrame

__all__ = ["FLUSH", "SLICE_SPANS", "TraceExporter"]

_log = logging.getLogger(__name__)

SLICE_SPANS: Final = 64
"""Spans that are encoded in one turn of the event loop: about 0.3 ms."""
FLUSH: Final[Seconds] = 2.0
"""Longest time for the last spans at shutdown."""

_LINGER: Final[Seconds] = 1.0
"""How long spans wait for others to fill a request."""
_SAY_EVERY: Final[Seconds] = 60.0
_LONGEST_WAIT: Final[Seconds] = 300.0
"""Longest time for which a collector can ask not to be called."""
_SHORTEST_TRY: Final[Seconds] = 0.1
_REPORT_AFTER: Final = 3
"""Failed attempts in a row from which on the process reports it: one that is repeated with success
is no news."""
_DEGRADATION: Final = "trace_export"


class TraceExporter:
    """A `TraceSink` that exports. `start`, then `close`, on one event loop."""

    def __init__(
        self,
        collector: Collector,
        frame: RequestFrame,
        metrics: Metrics,
        degradations: Degradations,
        *,
        where: str,
        timeout: Seconds = 10.0,
        gzip: bool = True,
        random: Random | None = None,
        wall: Callable[[], Seconds] = time.time,
    ) -> None:
        """Args: `where` names the collector to operators; `timeout` is for one request."""
        self._collector = collector
        self._frame = frame
        self._exported = metrics.trace_spans_exported
        self._dropped = metrics.trace_spans_dropped
        self._degradations = degradations
        self._where = where
        self._timeout = timeout
        self._gzip = gzip
        self._random = random or Random()
        self._wall = wall
        self._queue = SpanQueue()
        self._under_way = 0
        """Spans of the batch that is being delivered."""
        self._due = asyncio.Event()
        """Set when a batch is due, or at the end."""
        self._closing = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        """Failed attempts in a row."""
        self._call_at: Seconds = 0.0
        """No request before this time: the collector has asked for it, or has just failed."""
        self._problem = ""
        """What is reported as wrong now."""
        self._say_at: Seconds = 0.0
        """Nothing is reported before this time."""
        self._lost = 0
        """Spans that were dropped."""
        metrics.trace_spans_waiting.read_from(lambda: self.waiting)

    @property
    def waiting(self) -> int:
        """Spans that are not delivered yet."""
        return self._queue.spans + self._under_way

    @property
    def started(self) -> bool:
        """True from `start` on."""
        return self._task is not None

    def start(self) -> None:
        """Begin to export."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="trace export")

    def add(self, trace: Trace) -> None:
        """Queue a trace. It is dropped if there is no room, and after the end."""
        if self._task is None or self._closing.is_set():
            self._drop(len(trace.spans), "shutdown")
        elif not self._queue.add(trace):
            self._drop(len(trace.spans), "queue_full")
            if not self._failures:
                self._report("it takes them slower than they come", repeat=True)
        elif self._queue.full_batch:
            self._due.set()
        elif self._linger is None:
            self._linger = self._loop.call_later(_LINGER, self._due.set)

    async def close(self) -> None:
        """Deliver what is queued, for `FLUSH` seconds at most. Idempotent."""
        lost = self._lost
        self._closing.set()
        self._due.set()
        if self._task is not None and not self._task.done():
            _, late = await asyncio.wait({self._task}, timeout=FLUSH)
            for task in late:
                task.cancel()
                await asyncio.wait({task})
        self._drop(self.waiting, "shutdown")
        self._queue, self._under_way = SpanQueue(), 0
        self._stop_lingering()
        self._tell_lost(self._lost - lost)
        await self._collector.close()

    def _tell_lost(self, spans: int) -> None:
        """Tell of spans that were dropped at the end: nobody reads the metrics any more."""
        if spans:
            why = self._problem or "it did not take them in time"
            _log.warning("the last %d spans were not exported to %s: %s", spans, self._where, why)

    # ------------------------------------------------------------------ the task

    async def _run(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            self._stop_lingering()
            while (batch := self._queue.take()) is not None:
                await self._export(batch)
            if self._closing.is_set():
                return

    def _stop_lingering(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    async def _export(self, batch: SpanBatch) -> None:
        self._under_way = batch.spans
        try:
            await self._deliver(await self._encode(batch))
        except Exception:
            # A defect here must not end the export of what follows.
            _log.exception("%d spans could not be exported", self._under_way)
            self._drop(self._under_way, "invalid")
        self._under_way = 0

    async def _encode(self, batch: SpanBatch) -> bytes:
        """The request's body. Other tasks get their turn before each slice."""
        await asyncio.sleep(0)
        body = self._frame.body(gzip=self._gzip)
        for trace in batch.traces():
            for span in trace.spans:
                body.add(encode_span(trace, span))
                if body.spans % SLICE_SPANS == 0:
                    await asyncio.sleep(0)
        return body.finish()

    async def _deliver(self, body: bytes) -> None:
        """Post until it is taken or refused, for `RETRY_FOR` seconds at most."""
        until = self._loop.time() + RETRY_FOR
        while True:
            await self._rest(min(self._call_at, until))
            left = until - self._loop.time()
            if left <= 0:
                self._drop(self._under_way, "undelivered")
                return
            timeout = max(_SHORTEST_TRY, min(self._timeout, left))
            answer = await self._collector.post(body, gzip=self._gzip, timeout=timeout)
            verdict = judge(answer, self._wall())
            if not verdict.retry:
                self._settle(verdict)
                return
            self._note_failure(verdict)
            if self._closing.is_set():
                self._drop(self._under_way, "shutdown")
                return

    async def _rest(self, until: Seconds) -> None:
        """Wait until a time, or for the end of the process."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._closing.wait()

    # ------------------------------------------------------------------ what came of it

    def _settle(self, verdict: DeliveryVerdict) -> None:
        """Count a batch that was answered."""
        spans, self._failures = self._under_way, 0
        if verdict.refused:
            self._drop(spans, "refused")
            self._report(verdict.problem, repeat=False)
            return
        rejected = min(verdict.rejected, spans)
        self._exported.value += spans - rejected
        self._drop(rejected, "rejected")
        if verdict.problem:
            self._report(verdict.problem, repeat=True)
        elif self._problem:
            self._problem = ""
            self._degradations.clear(_DEGRADATION)

    def _note_failure(self, verdict: DeliveryVerdict) -> None:
        self._failures += 1
        pause = pause_before(self._failures, verdict.wait, self._random.random())
        self._call_at = self._loop.time() + min(pause, _LONGEST_WAIT)
        if self._failures >= _REPORT_AFTER:
            self._report(verdict.problem, repeat=True)

    def _drop(self, spans: int, reason: DropReason) -> None:
        if spans:
            self._lost += spans
            self._dropped.labels(reason).value += spans

    def _report(self, problem: str, *, repeat: bool) -> None:
        """Report what is wrong, at most once a minute: as a degradation, and, with `repeat`, as a
        line in the log for as long as it is so."""
        now = self._loop.time()
        if now < self._say_at:
            return
        if problem != self._problem:
            self._problem = problem
            self._degradations.clear(_DEGRADATION)
            self._degradations.add(
                _DEGRADATION,
                f"traces are not all exported to {self._where}: {problem}. Requests are served as "
                "ever; spans that do not get there are dropped and counted",
            )
        elif repeat:
            _log.warning(
                "traces are still not all exported to %s: %s (%d spans dropped so far)",
                *(self._where, problem, self._lost),
            )
        else:
            return
        self._say_at = now + _SAY_EVERY
