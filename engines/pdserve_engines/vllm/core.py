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

from pdserve.engine_core.kit import SelfSchedulingCore
from pdserve.errors import EngineDied, InvalidRequest, Overloaded, PdserveError, StepFailed
from pdserve_engines.vllm.block_names import BlockNames
from pdserve_engines.vllm.choices import VllmChoice
from pdserve_engines.vllm.engine import Engine, load_engine
from pdserve_engines.vllm.grammar import grammar_text
from pdserve_engines.vllm.params import given_output, inexact, sampling_arguments
from pdserve_engines.vllm.step_counts import StepCounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.clock import Clock
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineCapabilities, EngineSpec, EngineStats, LoadProgress
    from pdserve.messages.request import GenerateRequest

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


class VllmCore(SelfSchedulingCore):
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
        self._resume_at: Seconds | None = None
        """When the next step is due after one that computed nothing."""

    # ------------------------------------------------------------------ life

    def open(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Load the model. Raises `ConfigError` for what vLLM refuses of the configuration."""
        self._engine = engine = load_engine(spec, progress, self._on_executor_failure)
        self._limit = spec.max_sequences + spec.max_waiting
        if engine.names_blocks:
            secret = spec.hash_secret or secrets.token_bytes(32)
            capabilities = engine.capabilities
            self._names = BlockNames(secret, capabilities.block_size, capabilities.compat_hash)
        return engine.capabilities

    def _on_executor_failure(self) -> None:
        self.post_failure(EngineDied("a worker process of vLLM has died"))

    def shutdown(self) -> int:
        """End vLLM and its worker processes."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._choices.clear()
        self._submissions_here.clear()
        return 0

    @property
    def _vllm(self) -> Engine:
        assert self._engine is not None, "the engine is not loaded"
        return self._engine

    # ------------------------------------------------------------------ submissions

    def add(self, handle: int, request: GenerateRequest) -> None:
        """Submit the first live choice to vLLM, and the others with it or after its first token.

        Raises `Overloaded` if too many choices run or wait, and `InvalidRequest` for what vLLM
        refuses of the request."""
        if self.sequences > self._limit:
            raise Overloaded(f"{self._limit} sequences run or wait", retry_after=1.0)
        now = self.clock.now()
        submission = _Submission(request, {}, [])
        for number in request.live:
            choice = VllmChoice(handle, number, request, now)
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
        salt = None
        if self._names is not None:
            salt = self._names.salt(request.cache_salt, request.lora)
        constrained = self._vllm.constrains(request.sampling)
        given = given_output(request, choice.number)
        text = grammar_text(choice.id, request.sampling, given) if constrained else ""
        arguments = sampling_arguments(
            request,
            choice.number,
            self._vllm.capabilities.max_model_len,
            constrained=constrained,
        )
        self._vllm.submit(choice.id, request, given, arguments, text, salt)
        submission.choices[choice.number] = choice
        self._choices[choice.id] = choice
        self._resume_at = None

    def drop(self, handle: int) -> None:
        """Abort the request's choices in vLLM, which frees their blocks at once."""
        submission = self._submissions_here.pop(handle, None)
        if submission is None:
            return
        for choice in submission.choices.values():
            self._choices.pop(choice.id, None)
        self._vllm.abort([choice.id for choice in submission.choices.values()])

    # ------------------------------------------------------------------ steps

    @property
    def busy(self) -> bool:
        """Return whether vLLM has something to do now."""
        if self._engine is None or not self._engine.has_work:
            return False
        return self._resume_at is None or self.clock.now() >= self._resume_at

    def next_due(self) -> Seconds | None:
        """When to look again for requests that wait for a grammar or for KV."""
        return self._resume_at if self._engine is not None and self._engine.has_work else None

    @property
    def waiting(self) -> int:
        """Choices that vLLM has not begun, or has not been given."""
        later = sum(len(each.later) for each in self._submissions_here.values())
        return later + (0 if self._engine is None else self._engine.waiting)

    def advance(self, now: Seconds) -> None:
        """One step of vLLM."""
        if not self.busy:
            return
        outputs, computed = self._vllm.step()
        done = self.clock.now()
        self._resume_at = None if computed else done + _PAUSE
        for output in outputs:
            if (choice := self._choices.get(output.request_id)) is not None:
                choice.note_cached(output)
        if computed:
            self._counts.note_step(done - now, self._choices.values(), self._vllm.progress)
        if self._names is not None:
            self.kv_events += self._names.translate(self._vllm.take_kv_events())
        for output in outputs:
            self._take(output, done)
        self._end_faulty()

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

    # ------------------------------------------------------------------ cache and statistics

    def clear_cache(self) -> None:
        """Drop cached blocks; vLLM does it only while no request holds any."""
        self._vllm.reset_prefix_cache()

    def rekey(self, hash_secret: bytes) -> None:
        """Name blocks by another secret; what vLLM has cached is not found any more."""
        if self._names is not None:
            self.kv_events += self._names.rekey(hash_secret)
            self._vllm.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """The kit's statistics with vLLM's blocks and the counts of its steps."""
        basic = super().stats()
        if self._engine is None:
            return basic
        blocks = self._engine.block_counts()
        choices = self._choices.values()
        return msgspec.structs.replace(
            basic,
            **blocks,
            **self._counts.fields(),
            uncomputed_tokens=sum(each.uncomputed for each in choices if each.first is None),
            kv_tokens=sum(each.computed for each in choices),
        )
