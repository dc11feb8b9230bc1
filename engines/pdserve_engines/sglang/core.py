"""Drives SGLang's engine from pdserve's engine process.

SGLang schedules, computes and samples in child processes; its interface is asynchronous. The core
keeps a thread with a loop for it. Each choice of a request is a request of SGLang and a task on
that loop, which posts deltas. What belongs to requests is touched by the loop's thread only; the
core's thread hands over new and dropped ones, in order.

If a process of SGLang dies, SGLang ends this process with SIGQUIT; the node starts another one.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import tempfile
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.engine_core.kit import SelfSchedulingCore
from pdserve.errors import InvalidRequest, Overloaded, PdserveError, StepFailed
from pdserve.messages.engine import LoadProgress
from pdserve_engines.loop_thread import LoopThread, pause
from pdserve_engines.sglang.choices import SglangChoice
from pdserve_engines.sglang.engine import import_sglang, load_engine
from pdserve_engines.sglang.event_feed import EventFeed, zmq_sockets
from pdserve_engines.sglang.events import NamedBlocks
from pdserve_engines.sglang.options import event_endpoints
from pdserve_engines.sglang.params import check, inexact, request_arguments
from pdserve_engines.sglang.process_guard import child_processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.clock import Clock
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineCapabilities, EngineSpec, EngineStats
    from pdserve.messages.request import GenerateRequest
    from pdserve_engines.loop_thread import LoopTask
    from pdserve_engines.sglang.engine import SglangEngine, SglangPackage
    from pdserve_engines.sglang.event_feed import EventSockets

__all__ = ["SglangCore"]

_log = logging.getLogger(__name__)

STOP_TIMEOUT: Seconds = 10.0
"""Seconds for the end of all tasks at shutdown; SGLang's processes are killed afterwards."""
MAX_PENDING_BATCHES = 100_000
"""Batches of KV events that wait for the core's thread; more count as lost. As many as SGLang
queues."""


@dataclass(slots=True, eq=False)
class _Submission:
    """A request with its choices that have not ended; the loop's thread owns it."""

    handle: int
    request: GenerateRequest
    later: list[SglangChoice]
    """Choices that begin once the first one has its first token, so that the prompt is computed
    once and found in the prefix cache by the others."""
    running: dict[SglangChoice, LoopTask[None]] = field(default_factory=dict)


class SglangCore(SelfSchedulingCore):
    """A core around SGLang's `Engine`."""

    def __init__(
        self,
        clock: Clock,
        *,
        find: Callable[[], SglangPackage] = import_sglang,
        sockets: Callable[[str, str], EventSockets] = zmq_sockets,
        children: Callable[[], frozenset[int]] = child_processes,
        poll_interval: Seconds = 1.0,
    ) -> None:
        """`find` and `sockets` import SGLang and pyzmq, `children` lists this process's children,
        and `poll_interval` is between two looks at SGLang's load."""
        super().__init__(clock)
        self.inexact: Counter[str] = Counter()
        """Requests by what SGLang did only nearly for them."""
        self._find = find
        self._make_sockets = sockets
        self._children = children
        self._poll_interval = poll_interval
        self._engine: SglangEngine | None = None
        self._loop: LoopThread | None = None
        self._folder = ""
        self._limit = 0
        self._names: NamedBlocks | None = None
        self._batches: deque[list[dict[str, Any]] | None] = deque()
        """Batches of KV events for the core's thread; None: some were lost."""
        self._live: dict[int, _Submission] = {}
        self._load: Any = None
        self._other_load = False
        """The load differs from the one before. Nothing else may report it: SGLang's pool becomes
        empty a moment after the last request has ended."""
        self._cached_tokens = 0
        self._preemptions = 0
        self._inexact_continuations = 0

    # ------------------------------------------------------------------ life

    def open(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Load the model. Raises `ConfigError` for what SGLang refuses of the configuration."""
        progress(LoadProgress(stage="importing SGLang"))
        sglang = self._find()
        if spec.prefix_cache:
            self._folder = tempfile.mkdtemp(prefix="pdserve-sglang-")
        self._engine = engine = load_engine(sglang, spec, self._folder, progress, self._children)
        self._limit = spec.max_sequences + spec.max_waiting
        self._loop = LoopThread("sglang", self._on_error)
        self._loop.start()
        self._loop.submit(self._poll(), "sglang-load")
        if engine.capabilities.kv_events:
            secret = spec.hash_secret or secrets.token_bytes(32)
            self._names = NamedBlocks(secret, engine.page, engine.capabilities.compat_hash)
            self._loop.submit(self._follow(), "sglang-kv-events")
        return engine.capabilities

    def _on_error(self, name: str, error: BaseException) -> None:
        _log.error("%s failed: %s", name, error)
        self.post_failure(error)

    def shutdown(self) -> int:
        """End the loop, then SGLang's processes."""
        loop, self._loop = self._loop, None
        engine, self._engine = self._engine, None
        if loop is not None:
            loop.stop(STOP_TIMEOUT)
        if engine is not None:
            engine.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._live.clear()
        return 0

    @property
    def _sglang(self) -> SglangEngine:
        assert self._engine is not None, "the engine is not loaded"
        return self._engine

    def _call(self, function: Callable[..., object], *args: Any) -> None:
        """Call in the loop's thread, in order; nothing after the end."""
        if self._loop is not None:
            self._loop.call_soon(function, *args)

    # ------------------------------------------------------------------ in the core's thread

    def add(self, handle: int, request: GenerateRequest) -> None:
        """Check the request and hand it over.

        Raises `Overloaded` if too many choices run or wait, and `InvalidRequest` for what SGLang
        cannot do.
        """
        engine = self._sglang
        if self.sequences > self._limit:
            raise Overloaded(f"{self._limit} sequences run or wait", retry_after=1.0)
        check(request, min_p=not engine.seeded, reasoning=engine.reasoning)
        if request.lora and not engine.has_lora(request.lora):
            raise InvalidRequest(f"this worker has no LoRA adapter {request.lora!r}", param="model")
        now, limit = self.clock.now(), engine.capabilities.max_model_len
        submission = _Submission(handle, request, [])
        for number in request.live:
            choice = SglangChoice(handle, number, request, now, limit)
            ended = choice.ended_before(now)
            if ended is None:
                submission.later.append(choice)
            else:
                self.deltas.append(ended)
        self._count_inexact(request, seeded=engine.seeded)
        if submission.later:
            self._call(self._begin, submission)

    def _count_inexact(self, request: GenerateRequest, *, seeded: bool) -> None:
        """Count what is not exact, and say so at the first request of each kind."""
        names = inexact(request, seeded=seeded)
        if names and any(request.output):
            self._inexact_continuations += 1
        for name in names:
            if not self.inexact[name]:
                _log.warning("SGLang does %s only nearly as pdserve's own engine", name)
            self.inexact[name] += 1

    def drop(self, handle: int) -> None:
        """Abort the request's choices in SGLang."""
        self._call(self._cancel, handle)

    @property
    def busy(self) -> bool:
        """Return whether KV events or another load have come."""
        return bool(self._batches) or self._other_load

    def advance(self, now: Seconds) -> None:
        """Rename the blocks of the KV events that have come, and report another load."""
        if self._other_load:
            self._other_load = False
            self.note_change()
        names = self._names
        for _ in range(len(self._batches)):
            batch = self._batches.popleft()
            if names is not None:
                self.kv_events += names.clear() if batch is None else names.translate(batch)

    @property
    def waiting(self) -> int:
        """Choices without a token."""
        waiting = 0
        for submission in list(self._live.values()):
            waiting += len(submission.later)
            waiting += sum(not choice.begun for choice in list(submission.running))
        return min(waiting, self.sequences)

    def clear_cache(self) -> None:
        """Drop cached blocks; SGLang does it only while no request runs."""
        if self._loop is not None:
            self._loop.submit(self._clear(), "sglang-clear-cache")

    async def _clear(self) -> None:
        try:
            await self._sglang.clear_cache()
        except Exception as error:
            _log.warning("SGLang has not dropped its cache: %s", error)

    def rekey(self, hash_secret: bytes) -> None:
        """Name blocks by another secret; what SGLang has cached is not found any more."""
        if self._names is not None:
            self.kv_events += self._names.rekey(hash_secret)

    def stats(self) -> EngineStats:
        """The kit's statistics with SGLang's newest record of its load."""
        basic = msgspec.structs.replace(
            super().stats(),
            cached_tokens=self._cached_tokens,
            preemptions=self._preemptions,
            inexact_continuations=self._inexact_continuations,
        )
        load = self._load
        if load is None or self._engine is None:
            return basic
        page, total = self._engine.page, self._engine.capabilities.num_blocks
        used = min(total, -(-load.num_used_tokens // page))
        return msgspec.structs.replace(
            basic,
            blocks_total=total,
            blocks_used=used,
            # SGLang does not say which of the others hold something.
            blocks_free=total - used,
            uncomputed_tokens=load.num_waiting_uncached_tokens,
            kv_tokens=load.num_used_tokens,
        )

    # ------------------------------------------------------------------ in the loop's thread

    def _begin(self, submission: _Submission) -> None:
        self._live[submission.handle] = submission
        # Choices that go on from different places share no more than the prompt.
        together = submission.request.diverged or self._names is None
        self._start(submission, len(submission.later) if together else 1)

    def _start(self, submission: _Submission, count: int) -> None:
        loop = self._loop
        if loop is None:  # shutting down
            return
        first, submission.later = submission.later[:count], submission.later[count:]
        for choice in first:
            task = loop.submit(self._serve(submission, choice), choice.id)
            submission.running[choice] = task

    def _cancel(self, handle: int) -> None:
        submission = self._live.pop(handle, None)
        if submission is not None:
            submission.later.clear()
            for task in submission.running.values():
                task.cancel()

    async def _serve(self, submission: _Submission, choice: SglangChoice) -> None:
        """Follow one choice to its end; when cancelled, abort it."""
        try:
            await self._stream(submission, choice)
        except PdserveError as error:
            self._fail(submission, choice, error)
        except ValueError as error:
            self._fail(submission, choice, InvalidRequest(f"SGLang refuses this request: {error}"))
        except Exception as error:
            _log.exception("request %s failed in SGLang", choice.id)
            self._fail(submission, choice, StepFailed(f"SGLang: {type(error).__name__}: {error}"))
        finally:
            submission.running.pop(choice, None)
            if not submission.running and not submission.later:
                self._live.pop(submission.handle, None)

    async def _stream(self, submission: _Submission, choice: SglangChoice) -> None:
        request, engine = submission.request, self._sglang
        arguments = request_arguments(request, choice.number, engine.capabilities.max_model_len)
        salt = "" if self._names is None else self._names.salt(request.cache_salt, request.lora)
        over = False
        chunks = await engine.generate(choice.id, arguments, salt, request.lora)
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    over = chunk["meta_info"]["finish_reason"] is not None
                    if self._take(submission, choice, chunk):
                        return
            raise StepFailed("SGLang has ended a stream without a reason")
        finally:
            if not over:
                # Closing the stream has done it; a release that does not do it there needs this.
                engine.abort(choice.id)

    def _take(self, submission: _Submission, choice: SglangChoice, chunk: Any) -> bool:
        """Post what a chunk brings; True if the choice has ended."""
        delta = choice.take(chunk, self.clock.now())
        if delta is None:
            return False
        if delta.started is not None:
            self._cached_tokens += choice.cached
            self._start(submission, len(submission.later))
        self.post(delta)
        if delta.finish is None:
            return False
        self._preemptions += choice.preemptions
        return True

    def _fail(self, submission: _Submission, choice: SglangChoice, error: PdserveError) -> None:
        """End the request with an error, and its other choices with it."""
        submission.running.pop(choice, None)
        if self._live.get(submission.handle) is submission:
            self._cancel(submission.handle)
            self.post_error(submission.handle, error)

    # ------------------------------------------------------------------ tasks for the engine's life

    async def _poll(self) -> None:
        failing = False
        while True:
            try:
                load = await self._sglang.load()
                failing = False
            except Exception as error:
                # Requests show whether the engine works; statistics alone do not end it.
                if not failing:
                    _log.warning("SGLang does not report its load: %s", error)
                load, failing = None, True
            if load is not None:
                before, self._load = self._load, load
                if before is None or before.num_used_tokens != load.num_used_tokens:
                    self._other_load = True
                    self.wake()
            await pause(self._poll_interval)

    async def _follow(self) -> None:
        sockets = self._make_sockets(*event_endpoints(self._folder))
        await EventFeed(sockets, self._on_batch, self._on_lost).run()

    def _on_batch(self, events: list[dict[str, Any]]) -> None:
        if len(self._batches) >= MAX_PENDING_BATCHES:
            self._batches.clear()
            self._batches.append(None)
        self._batches.append(events)
        self.wake()

    def _on_lost(self) -> None:
        self._batches.append(None)
        self.wake()
