"""Drives vLLM's engine core in pdserve's engine process: one step of vLLM is one step of the core.

vLLM schedules, computes and samples; its block pool holds the KV. The core submits each choice of a
request as a request of vLLM, renames its KV events, reads its statistics, and lets pdserve's
grammar states mask its tokens. It reaches into vLLM at the places that tests/contracts/vllm.toml
lists, and nowhere else.

An exception of vLLM's step leaves its state undefined, so it ends the core; the node starts another
one and continues the requests.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.blocks.hashing import hash_secret_id
from pdserve.engine_core.staged_kv.core import StagedCore
from pdserve.engine_core.staged_kv.port import HeldFrames
from pdserve.errors import (
    ConfigError,
    EngineDied,
    InvalidRequest,
    Overloaded,
    PdserveError,
    StepFailed,
)
from pdserve.messages.engine import LoadProgress
from pdserve_engines.vllm.block_names import BlockNames
from pdserve_engines.vllm.choices import VllmChoice, request_id
from pdserve_engines.vllm.engine import WORKER_DIED, Engine, load_engine, uses_tiers
from pdserve_engines.vllm.grammar import grammar_text
from pdserve_engines.vllm.image_queue import ImageQueue
from pdserve_engines.vllm.kv_tiers.tiers import VllmTiers, open_tiers
from pdserve_engines.vllm.kv_transfer.copy_planner import Copied
from pdserve_engines.vllm.kv_transfer.disagg import VllmStaging, movable_refusal
from pdserve_engines.vllm.params import given_output, inexact, sampling_arguments
from pdserve_engines.vllm.step_counts import StepCounts
from pdserve_engines.vllm.step_watch import StepWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pdserve.blocks.hashing import BlockHash
    from pdserve.clock import Clock
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.engine_core.staged_kv.pool import StagingPool
    from pdserve.engine_core.staged_kv.port import StagedBlocks
    from pdserve.engine_core.tiers.frames.frame_fetches import FrameFetches
    from pdserve.engine_core.tiers.frames.frame_holds import FrameHolds
    from pdserve.ids import Seconds
    from pdserve.messages.engine import (
        EngineCapabilities,
        EngineSpec,
        EngineStats,
        Event,
    )
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.tiers import CachedSource
    from pdserve.transfer.base import Region
    from pdserve_engines.vllm.image_reader import ReadPrompt

__all__ = ["VllmCore"]

_LOG = logging.getLogger("pdserve.engines.vllm")

_PAUSE: Seconds = 0.001
"""Seconds until the next step after one that computed nothing: all requests wait for a grammar or
for KV, whose arrival vLLM does not announce."""


@dataclasses.dataclass(slots=True)
class _Submission:
    """A request, and its choices that have not ended."""

    request: GenerateRequest
    choices: dict[int, VllmChoice]
    later: list[VllmChoice]
    """Choices that are submitted once the first one has its first token, so that the prompt is
    computed once and found in the prefix cache by the others."""
    features: list[Any] | None = None
    """vLLM's records of its images."""


class VllmCore(StagedCore):
    """A core around vLLM's `EngineCore`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._engine: Engine | None = None
        self._names: BlockNames | None = None
        self._limit = 0
        self._submissions_here: dict[int, _Submission] = {}
        self._choices: dict[str, VllmChoice] = {}
        """By id inside of vLLM: those that vLLM has."""
        self._counts = StepCounts()
        self._staged: VllmStaging | None = None
        """Set while KV is exchanged with other workers."""
        self._tiers: VllmTiers | None = None
        """Set while KV leaves vLLM's cache for host memory and disk."""
        self._tiers_woken = False
        """Whether the tiers have something to take in."""
        self._images = ImageQueue(self._read_images, lambda: self.wake())
        """Requests that wait until their images have been read."""
        self._watch: StepWatch | None = None
        """Tells the node of progress within a step; None on GPUs."""
        self._resume_at: Seconds | None = None
        """When the next step is due after one that computed nothing."""

    # ------------------------------------------------------------------ life

    def open(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Load the model. Raises `ConfigError` for what vLLM refuses of the configuration."""
        self._engine = engine = load_engine(
            spec, progress, self._on_executor_failure, self._exchanges(spec)
        )
        if engine.capabilities.device != "cpu":  # there `StepWatch` sees what compiles
            progress(LoadProgress(stage="warming up"))
            engine.warm_up()
        engine.while_computing(lambda: self.flush_events())
        self._limit = spec.max_sequences + spec.max_waiting
        if engine.names_blocks:
            secret = spec.hash_secret or secrets.token_bytes(32)
            capabilities = engine.capabilities
            self._names = BlockNames(
                secret, capabilities.block_size, capabilities.compat_hash, engine.named_group
            )
            if uses_tiers(spec):
                self._open_tiers(spec, engine, self._names, secret)
        if engine.capabilities.device == "cpu":
            self._watch = StepWatch(lambda: self.keep_alive())
            self._watch.start()
        if self._tiers is None or spec.tiers is None:
            return engine.capabilities
        return msgspec.structs.replace(engine.capabilities, tiers=spec.tiers.names)

    def _open_tiers(
        self, spec: EngineSpec, engine: Engine, names: BlockNames, secret: bytes
    ) -> None:
        """Open the tiers; a model whose KV cannot leave vLLM's cache is served without. Raises
        `ConfigError` for settings that cannot be met."""
        assert spec.tiers is not None
        reason = engine.immovable or movable_refusal(engine.core.scheduler.connector)
        if reason:
            _LOG.warning("KV that vLLM evicts is lost, since there are no tiers: %s", reason)
            return
        staging = self.make_staging(spec) if self._exchanges(spec) else None
        frames = None if staging is None else staging.frames()
        try:
            self._tiers = open_tiers(
                spec.tiers, engine.core, engine.capabilities, names, secret, self.clock, frames
            )
        except BaseException:
            if staging is not None:
                staging.close()
            raise
        engine.after_preemptions(self._tiers.preempted)
        self._tiers.start(self._on_tier_done)
        self._tiers_woken = True  # routers hear at once of what is on disk

    def _on_tier_done(self) -> None:
        self._tiers_woken = True
        self.wake()

    def _exchanges(self, spec: EngineSpec) -> bool:
        """An aggregated worker computes a moved request again: only workers that must exchange KV
        pay for staging blocks and give up what the connector rules out."""
        return self.wants_kv(spec) and not spec.moves_optionally

    def _on_executor_failure(self) -> None:
        self.post_failure(EngineDied(WORKER_DIED))

    def shutdown(self) -> int:
        """End vLLM and its worker processes."""
        self._stop_threads()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._close_tiers()
        self._choices.clear()
        self._submissions_here.clear()
        self._staged = None
        return 0

    def _close_tiers(self) -> None:
        """Give up the tiers, once vLLM makes no step any more."""
        tiers, self._tiers = self._tiers, None
        if tiers is not None:
            tiers.close()

    def _stop_threads(self) -> None:
        self._images.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    @property
    def _vllm(self) -> Engine:
        assert self._engine is not None, "the engine is not loaded"
        return self._engine

    # ------------------------------------------------------------------ submissions

    def add(self, handle: int, request: GenerateRequest) -> None:
        """Submit the first live choice to vLLM, and the others with it or after its first token.

        Raises `Overloaded` if too many choices run or wait, and `InvalidRequest` for what vLLM
        refuses of the request."""
        self.check_submission(request)
        if request.images:
            self._images.submit(handle, request, self.clock.now())
        else:
            self._begin(handle, request)

    def check_submission(self, request: GenerateRequest) -> None:
        """Raise `Overloaded` if too many choices run or wait, and `InvalidRequest` for an adapter
        that is not here."""
        if self.sequences > self._limit:
            raise Overloaded(f"{self._limit} sequences run or wait", retry_after=1.0)
        self._vllm.lora(request.lora)

    def _read_images(self, request: GenerateRequest) -> ReadPrompt:
        """Read the images of a request, in the thread of `ImageQueue`."""
        return self._vllm.images.read(request, self._vllm.lora(request.lora))

    def _begin_read(self) -> None:
        """Submit requests whose images have been read, and end those whose images cannot be."""
        for handle, submitted, read in self._images.take():
            if isinstance(read, PdserveError):
                self.reject(handle, read)
                continue
            self._counts.note_images(read)
            self.note_prompt(handle, sum(read.tokens) - len(read.tokens))
            try:
                self._begin(handle, read.request, read, submitted)
            except PdserveError as error:
                self.reject(handle, error)
            if handle not in self._submissions_here:
                self._images.begun(handle)

    def _begin(
        self,
        handle: int,
        request: GenerateRequest,
        read: ReadPrompt | None = None,
        submitted: Seconds | None = None,
    ) -> None:
        """`read`: what its images have become, if it has any; `submitted`: when it came, if that
        was before."""
        now = self.clock.now() if submitted is None else submitted
        submission = _Submission(request, {}, [], read.features if read else None)
        for number in request.live:
            choice = VllmChoice(handle, number, request, now, read.tokens if read else ())
            ended = choice.ended_before(now, self._vllm.capabilities.max_model_len)
            if ended is not None:
                self.deltas.append(ended)
            else:
                submission.later.append(choice)
        self._note_inexact(request)
        if submission.later:
            self._submissions_here[handle] = submission
            self._submit_first(handle, submission)

    def _note_inexact(self, request: GenerateRequest) -> None:
        """Count a continuation that vLLM cannot repeat exactly; the first one is logged."""
        what = inexact(request)
        if not what:
            return
        if not self._counts.inexact:
            _LOG.warning(
                "a request continues here with another %s than it began with: vLLM takes its "
                "earlier output as a part of the prompt; counted in inexact_continuations_total",
                what,
            )
        self._counts.inexact += 1

    def _submit_first(self, handle: int, submission: _Submission) -> None:
        """A rejected first choice rejects the request; vLLM keeps nothing of it."""
        together = submission.request.diverged
        first = submission.later if together else submission.later[:1]
        submission.later = [] if together else submission.later[1:]
        try:
            for choice in first:
                self._submit_choice(submission, choice)
        except PdserveError:
            self.drop(handle)
            raise

    def _submit_choice(self, submission: _Submission, choice: VllmChoice) -> None:
        request = submission.request
        salt = self._salt(request)
        constrained = self._vllm.constrains(request.sampling)
        given = given_output(request, choice.number)
        text = grammar_text(choice.id, request.sampling, given) if constrained else ""
        arguments = sampling_arguments(
            request,
            choice.number,
            self._vllm.capabilities.max_model_len,
            constrained=constrained,
        )
        features = submission.features
        if self._tiers is not None:
            self._tiers.expect(choice.id, request)
        try:
            self._vllm.submit(choice.id, request, given, arguments, text, salt, features=features)
        except PdserveError:
            if self._tiers is not None:
                self._tiers.forget(choice.id)
            raise
        if features is not None:
            choice.entered = self.clock.now()
        submission.choices[choice.number] = choice
        self._choices[choice.id] = choice
        self._resume_at = None

    def _salt(self, request: GenerateRequest) -> str | None:
        names = self._names
        return None if names is None else names.salt(request.cache_salt, request.lora)

    def drop(self, handle: int) -> None:
        """Abort the request's choices in vLLM, which frees their blocks at once."""
        if self._images.drop(handle):
            return
        submission = self._submissions_here.pop(handle, None)
        if submission is None:
            return
        for choice in submission.choices.values():
            self._choices.pop(choice.id, None)
        self._vllm.abort([choice.id for choice in submission.choices.values()])
        self._report_copies()

    # ------------------------------------------------------------------ steps

    @property
    def busy(self) -> bool:
        """Return whether vLLM has something to do now, or images have been read, or tiers have
        something to take in."""
        return self._images.ready or self._computes or self._tiers_due

    @property
    def _tiers_due(self) -> bool:
        if self._tiers is None or self._engine is None:
            return False
        due = self._tiers.next_deadline()
        return (
            self._tiers_woken
            or self._tiers.has_events
            or (due is not None and self.clock.now() >= due)
        )

    @property
    def _computes(self) -> bool:
        if self._engine is None or not self._engine.has_work:
            return False
        return self._resume_at is None or self.clock.now() >= self._resume_at

    def next_due(self) -> Seconds | None:
        """When to look again for requests that wait for a grammar or for KV, or at the tiers."""
        if self._engine is None:
            return None
        due = None if self._tiers is None else self._tiers.next_deadline()
        resume = self._resume_at if self._engine.has_work else None
        return min((time for time in (due, resume) if time is not None), default=None)

    @property
    def waiting(self) -> int:
        """Choices that vLLM has not begun, or has not been given."""
        later = sum(len(each.later) for each in self._submissions_here.values())
        later += self._images.live()
        return later + (0 if self._engine is None else self._engine.waiting)

    def advance(self, now: Seconds) -> None:
        """One step of vLLM."""
        if self._images.ready:
            self.flush_events()  # the images may take longer than the rest until workers compute
            self._begin_read()
        self._advance_tiers(now)
        if not self._computes:
            return
        outputs, computed = self._watched_step()
        done = self.clock.now()
        idle = not (computed or outputs or self._vllm.in_flight)
        self._resume_at = done + _PAUSE if idle else None
        if not computed:
            self._give_prefixes_up()
        for output in outputs:
            if (choice := self._choices.get(output.request_id)) is not None:
                choice.note_cached(output)
        if computed:
            chunks = self._counts.note_step(done - now, self._choices.values(), self._progress)
            if self._tiers is not None:
                self._tiers.note_step(chunks, done - now)
        if self._names is not None:
            events = self._names.translate(self._vllm.take_kv_events())
            self.kv_events += events
            self._follow_pool(events)
        self._report_copies()
        for output in outputs:
            self._take(output, done)
        self._end_faulty()

    def _progress(self, key: str) -> tuple[int, int] | None:
        """As `Engine.progress`. vLLM counts what a request loads before it has come."""
        if self._tiers is not None and self._tiers.loads.loading(key):
            return 0, 0
        return self._vllm.progress(key)

    def _advance_tiers(self, now: Seconds) -> None:
        """Take in what tiers have copied and read, and let requests go on that waited for it."""
        tiers = self._tiers
        if tiers is None:
            return
        if self._tiers_woken:
            self._tiers_woken, self._resume_at = False, None
            self.note_change()
        for done in tiers.advance(now):
            choice = self._choices.get(done.key)
            if choice is not None:
                choice.note_loaded(done.sources)
            self._vllm.end_load(done.key, done.local, done.loaded, whole=done.whole)
            self._resume_at = None
        if not self._vllm.has_requests:
            tiers.clean(self._blocks_of_a_step, now, busy=False)
            if tiers.waits:
                self._resume_at = None
        self.kv_events += tiers.follow((), now)

    @property
    def _blocks_of_a_step(self) -> int:
        capabilities = self._vllm.capabilities
        return capabilities.max_batch_tokens // capabilities.block_size

    def _follow_pool(self, events: Sequence[KvEvent]) -> None:
        """Tell the tiers what a step has stored and evicted, and store what is evicted next."""
        if self._tiers is None:
            return
        now = self.clock.now()
        self.kv_events += self._tiers.follow(events, now)
        self._tiers.clean(self._blocks_of_a_step, now, busy=self._vllm.has_requests)
        if self._tiers.waits:
            self._resume_at = None

    def _watched_step(self) -> tuple[list[Any], bool]:
        if self._watch is None:
            return self._vllm.step()
        self._watch.begin()
        try:
            return self._vllm.step()
        finally:
            self._watch.end()

    def _take(self, output: Any, now: Seconds) -> None:
        choice = self._choices.get(output.request_id)
        if choice is None:
            return  # dropped while the step ran
        if output.pooling_output is not None:
            delta = choice.vector(output, now)
        else:
            taken = choice.take(output, now)
            if taken is None:
                return
            delta = taken
        if delta.finish is not None and delta.finish.reason in ("error", "abort"):
            self._fail(choice, delta.finish.message)
            return
        if delta.started is not None:
            self._images.begun(choice.handle)
            self._counts.note_start(choice)
            self._submit_later(choice.handle)
        self.deltas.append(delta)
        if delta.finish is not None:
            self._end(choice)

    def _submit_later(self, handle: int) -> None:
        submission = self._submissions_here.get(handle)
        if submission is None or not submission.later:
            return
        later, submission.later = submission.later, []
        for choice in later:
            self._submit_choice(submission, choice)

    def _end(self, choice: VllmChoice) -> None:
        """Forget a choice that vLLM has ended."""
        self._choices.pop(choice.id, None)
        self._vllm.forget(choice.id)
        submission = self._submissions_here.get(choice.handle)
        if submission is not None:
            submission.choices.pop(choice.number, None)
            if not submission.choices and not submission.later:
                del self._submissions_here[choice.handle]

    def _fail(self, choice: VllmChoice, message: str) -> None:
        """End a request of which vLLM ended a choice with an error."""
        fault = self._vllm.take_fault(choice.id)
        self.drop(choice.handle)
        if fault is not None and fault.lasting:
            self.reject(choice.handle, InvalidRequest(str(fault)))
        else:
            self.reject(choice.handle, StepFailed(str(fault) if fault else message))

    def _end_faulty(self) -> None:
        for key in self._vllm.faulty():
            choice = self._choices.get(key)
            if choice is not None:
                self.deltas = [each for each in self.deltas if each.handle != choice.handle]
                self._fail(choice, "its tokens do not fit its grammar")
            else:
                self._vllm.take_fault(key)

    # ------------------------------------------------------------------ staged KV

    def make_staging(self, spec: EngineSpec) -> StagingPool:
        """Allocate the staging blocks. Raises `ConfigError` if KV is not to be exchanged, or cannot
        be."""
        if not self._exchanges(spec) or spec.transfer is None:
            raise ConfigError("aggregated workers with vLLM compute moved requests again")
        if self._staged is None:  # with tiers it is made before them
            vllm = self._vllm
            unfilled, tiers = spec.transfer.unfilled, spec.tiers if uses_tiers(spec) else None
            self._staged = VllmStaging(vllm.core, vllm.capabilities, unfilled, tiers)
        return self._staged.pool

    def fetch_region(self) -> Region | None:
        """The memory with the frames of the host tier."""
        return None if self._tiers is None else self._tiers.frames.region

    def fetch_by(self, mover: KvConnector, say: Callable[[Event], None]) -> FrameFetches:
        """Exchange blocks of the host tier with other workers."""
        assert self._tiers is not None
        return self._tiers.fetch_by(mover, say)

    @property
    def _staging(self) -> VllmStaging:
        assert self._staged is not None, "KV is not exchanged"
        return self._staged

    def _cached(self, request: GenerateRequest) -> list[int]:
        if request.images:
            return []  # what they become is not known yet, and no KV is exchanged for them
        lora = self._vllm.lora(request.lora)
        return self._staging.holds.find(request, self._salt(request), lora)

    def cached_blocks(self, request: GenerateRequest) -> int:
        """Leading blocks of the request that vLLM has cached."""
        return len(self._cached(request))

    def hold_prefix(self, request: GenerateRequest) -> list[int]:
        """Keep those blocks from being evicted."""
        return self._staging.holds.hold(self._cached(request))

    def release_prefix(self, blocks: Sequence[int]) -> None:
        """Give them back."""
        if self._staged is not None:
            self._staged.holds.release(blocks)

    def bring_frames(self, request: GenerateRequest) -> frozenset[bytes]:
        """Begin to read what the disk has behind those blocks."""
        holds, tiers = self._frame_holds, self._tiers
        if holds is None or tiers is None or tiers.lower.disk is None:
            return frozenset()
        hashes = self._prefix_hashes(request)
        return holds.bring(hashes, self.cached_blocks(request), self.clock.now())

    def hold_frames(
        self, request: GenerateRequest, first: int, read: Collection[bytes]
    ) -> HeldFrames:
        """Keep frames of the host tier for a prompt that a peer computes."""
        holds = self._frame_holds
        return (
            HeldFrames() if holds is None else holds.hold(self._prefix_hashes(request), first, read)
        )

    def release_frames(self, blocks: Sequence[int]) -> None:
        """Give them back."""
        if blocks and self._frame_holds is not None:
            self._frame_holds.release(blocks)

    def loaded_frames(self, sources: Sequence[CachedSource]) -> None:
        """Count what was loaded from frames."""
        if self._frame_holds is not None:
            self._frame_holds.loaded(sources)
        self._counts.note_frames(sum(source.tokens for source in sources))

    @property
    def _frame_holds(self) -> FrameHolds | None:
        return None if self._tiers is None else self._tiers.holds

    def _prefix_hashes(self, request: GenerateRequest) -> list[BlockHash]:
        """Hashes of the blocks that can be loaded for the first live choice of a request."""
        assert self._names is not None
        salt = self._names.salt(request.cache_salt, request.lora)
        tokens = [*request.prompt, *given_output(request, next(iter(request.live)))]
        blocks = (len(tokens) - 1) // self._vllm.capabilities.block_size
        return self._names.chain(tokens, salt)[:blocks]

    def _give_prefixes_up(self) -> None:
        """Held blocks may be what vLLM's first waiting request lacks, while those that would let
        them go stand behind it: then nothing would ever run again."""
        if self._staged is not None and self._vllm.only_waits:
            given = self._staged.holds.give_up()
            if given:
                _LOG.info("%d held blocks are given up: requests wait and none runs", given)

    def load_staged(self, handle: int, request: GenerateRequest, blocks: StagedBlocks) -> None:
        """Submit a request whose first live choice vLLM loads from staging blocks."""
        self._staging.planner.expect_load(self._stem(handle, request), blocks)
        self._add_staged(handle, request)

    def prefill_staged(self, handle: int, request: GenerateRequest, blocks: StagedBlocks) -> None:
        """Submit a request whose blocks are copied to staging blocks as they are computed."""
        self._staging.planner.expect_save(self._stem(handle, request), blocks)
        self._add_staged(handle, request)

    @staticmethod
    def _stem(handle: int, request: GenerateRequest) -> str:
        return request_id(handle, next(iter(request.live)))

    def _add_staged(self, handle: int, request: GenerateRequest) -> None:
        key = self._stem(handle, request)
        try:
            self._begin(handle, request)
            if key not in self._choices:
                raise InvalidRequest("the given output is already complete")
        except PdserveError:
            self._staging.planner.forget(key)
            raise

    def _report_copies(self) -> None:
        """Tell what has happened to staging blocks."""
        if self._staged is None:
            return
        for handle, event in self._staged.events():
            if isinstance(event, Copied):
                self.copied(handle, event.tokens)
            else:
                self.let_go(handle, event.failed)

    # ------------------------------------------------------------------ cache and statistics

    def clear_cache(self) -> None:
        """Drop cached blocks; vLLM does it only while no request holds any. Its own event comes
        with the next step, which an engine at rest does not make."""
        if self._vllm.reset_prefix_cache() and self._names is not None:
            events = self._names.clear()
            self.kv_events += events
            if self._tiers is not None:
                self.kv_events += self._tiers.follow(events, self.clock.now())
        if self._tiers is not None:
            self._tiers.clear()
            self.kv_events += self._tiers.follow((), self.clock.now())

    def rekey(self, hash_secret: bytes) -> None:
        """Name blocks by another secret; what vLLM has cached is not found any more."""
        if self._names is not None:
            events = self._names.rekey(hash_secret)
            self.kv_events += events
            if self._tiers is not None:
                self._tiers.rename(hash_secret_id(hash_secret))
                self.kv_events += self._tiers.follow(events, self.clock.now())
            self._vllm.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """The kit's statistics with vLLM's blocks and the counts of its steps."""
        basic = super().stats()
        if self._engine is None:
            return basic
        blocks = self._engine.block_counts()
        choices = self._choices.values()
        tiers = self._tiers
        complete = msgspec.structs.replace(
            basic,
            **blocks,
            **self._counts.fields(),
            uncomputed_tokens=sum(each.uncomputed for each in choices if each.first is None),
            kv_tokens=sum(each.computed for each in choices),
            tiers=() if tiers is None else tiers.stats(self.clock.now()),
            lanes=() if tiers is None else tiers.lanes(),
        )
        if tiers is not None:
            complete = tiers.loads.counts.add_stats(complete)
        return self.add_fetches(complete)
