"""The public kit for engines that schedule themselves: the `Core` port and what such cores share.

An engine author subclasses `SelfSchedulingCore` and says how tokens come about; commands, refusals,
deadlines, the order of events, statistics and results of other threads are done here. It knows
neither pdserve's scheduler nor KV: an engine that is driven by the scheduler implements
`executor.Executor` instead. docs/engines.md says how to write one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sortedcontainers import SortedDict

from pdserve.engine_core.kv_fetch.ports import refusal_of
from pdserve.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PdserveError,
    TransferRefused,
)
from pdserve.messages.engine import (
    Abort,
    AbsorbKv,
    ClearCache,
    CoreFailed,
    DropKv,
    EngineCapabilities,
    EngineStats,
    KvDropped,
    KvEvents,
    ListKvChains,
    PrefillForPeer,
    QueryStats,
    Rejected,
    ServeKvPull,
    SetHashSecret,
    StartCore,
    Stats,
    StepOutput,
    StopCore,
    Submit,
    SubmitRemote,
)
from pdserve.messages.engine_errors import failed_event, kind_and_message, rejected_event
from pdserve.messages.request import Finish, FirstTokenStats, TokenDelta
from pdserve.token_ids import largest_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.clock import Clock
    from pdserve.ids import Seconds, TokenId
    from pdserve.messages.engine import Command, EngineSpec, Event, LoadProgress
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.request import FinishReason, GenerateRequest, TokenLogprob

__all__ = [
    "STATS_INTERVAL",
    "ChoiceOutput",
    "Core",
    "ModelLimits",
    "RequestDeadlines",
    "RequestQueue",
    "SelfSchedulingCore",
    "capabilities_without_kv",
    "check_options",
    "check_request",
    "kv_transfer_unsupported",
    "read_json",
    "read_model_limits",
]

STATS_INTERVAL: Seconds = 0.5
"""Seconds between two `Stats` events while an engine works; one more follows when it becomes
idle."""

_MAX_PROMPT_LOGPROBS = 1 << 21
"""Most logprob entries for one prompt: they travel in one frame, and each takes up to 23 bytes."""


class Core(Protocol):
    """What the `CoreLoop` of the engine process drives. One thread calls all methods, one at a
    time.

    Only `load` and `step` may take time. Four attributes are optional; the `CoreLoop` sets them
    after `load`: `on_freed(handle, phase)`, which the core calls once for every `Abort` when the
    submission holds nothing any more; `wake()`, which the core calls from any thread when
    `has_work` has become true without a command; `keep_alive()`, by which any thread says that a
    step makes progress, and without which a step of more than `--stall-timeout` counts as stalled;
    and `flush_events()`, which writes the last step's events to the node. A core calls it in every
    `step` once other processes compute and it would only wait; others never call it.
    """

    def load(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Load the model; called once, first. Raises `PdserveError` if it cannot."""
        ...

    def handle(self, command: Command) -> None:
        """Take a command in; its results come from `step`. Returns at once.

        A submission that cannot be served ends with a `Rejected` event. An exception ends the core.
        """
        ...

    def step(self) -> list[Event]:
        """Do one step's work and return everything that has happened, in order.

        An exception, or a `CoreFailed` as the last event, ends the core: only `close` is called
        then, and the node starts another one.
        """
        ...

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to do now."""
        ...

    def wake_at(self) -> Seconds | None:
        """When `step` is due if `has_work` stays False and no command comes; None: never.

        Time of the clock that the core was made with.
        """
        ...

    def close(self) -> int:
        """Drop and free everything; returns leaked KV blocks."""
        ...


def check_request(
    request: GenerateRequest,
    *,
    max_model_len: int,
    vocab_size: int,
    embeds: bool = False,
    images: int = 0,
) -> None:
    """Check a request against the engine's limits; every core calls it once per submission.

    `embeds`: the engine makes embeddings. `images`: most images of a prompt. Raises
    `InvalidRequest` or `ContextLengthExceeded` for a request that this engine could never serve.
    """
    prompt = request.prompt
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if request.pooling:
        _check_pooling(request, max_model_len, embeds=embeds)
    elif len(prompt) >= max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens; a context of {max_model_len} tokens leaves no "
            "room for output",
            param="prompt",
        )
    if request.images:
        _check_images(request, images)
    top = request.sampling.prompt_logprobs
    if top is not None and len(prompt) * (1 + top) > _MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{1 + top} logprobs for each of {len(prompt)} prompt tokens are too many; the limit "
            f"is {_MAX_PROMPT_LOGPROBS}",
            param="logprobs",
        )
    if request.n < 1 or len(request.output) not in (0, request.n):
        raise InvalidRequest("n differs from the number of given outputs", param="n")
    if request.ended and not (set(request.ended) < set(range(request.n))):
        raise InvalidRequest(
            f"choices {sorted(set(request.ended))} of {request.n} are given as ended: every "
            "index must exist, and at least one choice must be left",
            param="ended",
        )
    outside = largest_id(prompt) >= vocab_size
    for tokens in request.output:
        outside = outside or (bool(tokens) and (min(tokens) < 0 or max(tokens) >= vocab_size))
    if outside:
        raise InvalidRequest(
            f"a token id is outside the vocabulary of {vocab_size}", param="prompt"
        )


def _check_images(request: GenerateRequest, most: int) -> None:
    """Check the images of a request. An engine that takes none would ignore them."""
    if not most:
        raise InvalidRequest("this engine takes no images with this model", param="messages")
    if len(request.images) > most:
        raise InvalidRequest(
            f"the prompt has {len(request.images)} images; this engine takes {most}",
            param="messages",
        )
    if request.pooling or request.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "neither embeddings nor the logprobs of a prompt are computed with images",
            param="messages",
        )


def _check_pooling(request: GenerateRequest, max_model_len: int, *, embeds: bool) -> None:
    """Check an embedding request. Its prompt may fill the whole context, and it has one choice, no
    output and no logprobs."""
    if not embeds:
        raise InvalidRequest("this engine makes no embeddings", param="model")
    if request.n != 1 or any(request.output) or request.sampling.prompt_logprobs is not None:
        raise InvalidRequest("embeddings have one choice, no output and no logprobs", param="n")
    if len(request.prompt) > max_model_len:
        raise ContextLengthExceeded(
            f"the input has {len(request.prompt)} tokens; the context is {max_model_len}",
            param="input",
        )


def kv_transfer_unsupported(engine: str) -> ConfigError:
    """The error for an engine that should transfer KV and cannot."""
    return ConfigError(
        f"engine {engine!r} cannot transfer KV: a worker of --mode=prefill or "
        "--mode=decode needs an engine that can, such as torch or sim; this one runs with "
        "--mode=aggregated"
    )


class RequestDeadlines:
    """Deadlines of submissions, sorted by time; adding and removing cost O(log n)."""

    def __init__(self) -> None:
        self._sorted: SortedDict[tuple[Seconds, int], None] = SortedDict()

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, deadline: Seconds, handle: int) -> None:
        self._sorted[(deadline, handle)] = None

    def discard(self, deadline: Seconds, handle: int) -> None:
        self._sorted.pop((deadline, handle), None)

    def next(self) -> Seconds | None:
        """The earliest deadline, passed or not."""
        if not self._sorted:
            return None
        deadline: Seconds = self._sorted.peekitem(0)[0][0]
        return deadline

    def passed(self, now: Seconds) -> list[int]:
        """Handles whose deadline is `now` or earlier, earliest first. Removes nothing."""
        return [handle for _, handle in self._sorted.irange(maximum=(now, 1 << 63))]


class RequestQueue:
    """Requests that wait, by priority and then by arrival.

    Removing any of them costs O(log n), so an abort or a deadline is cheap wherever it stands.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: requests that may wait (`EngineSpec.max_waiting`)."""
        self._limit = limit
        self._sorted: SortedDict[tuple[int, int], tuple[int, GenerateRequest]] = SortedDict()
        self._order_of: dict[int, tuple[int, int]] = {}
        self._arrivals = 0
        self.choices = 0
        """Live choices of the requests that wait, for `EngineStats.waiting`."""

    def __len__(self) -> int:
        return len(self._sorted)

    def push(self, handle: int, request: GenerateRequest) -> None:
        """Queue a request. Raises `Overloaded` if the queue is full."""
        if len(self._sorted) >= self._limit:
            raise Overloaded(f"{self._limit} requests are waiting", retry_after=1.0)
        self._arrivals += 1
        order = self._order_of[handle] = (-request.priority, self._arrivals)
        self._sorted[order] = handle, request
        self.choices += len(request.live)

    def pop(self) -> tuple[int, GenerateRequest]:
        """Remove and return the next handle and its request. Raises KeyError if the queue is
        empty."""
        _, (handle, request) = self._sorted.popitem(0)
        del self._order_of[handle]
        self.choices -= len(request.live)
        return handle, request

    def discard(self, handle: int) -> bool:
        """Remove a request; False if it was not in the queue."""
        order = self._order_of.pop(handle, None)
        if order is None:
            return False
        _, request = self._sorted.pop(order)
        self.choices -= len(request.live)
        return True


class ChoiceOutput:
    """One choice of a request: its output tokens, when it ends, and the records about it.

    It honours `max_tokens`, `min_tokens`, stop and end-of-sequence ids, the context's length and
    output that an earlier attempt has generated.
    """

    def __init__(
        self, handle: int, choice: int, request: GenerateRequest, now: Seconds, max_model_len: int
    ) -> None:
        """`now`: when the request was submitted."""
        self.handle = handle
        self.choice = choice
        self.request = request
        self.tokens: list[TokenId] = list(request.output[choice]) if request.output else []
        """Output so far, tokens of an earlier attempt included."""
        self._limit = min(request.sampling.max_tokens, max_model_len - len(request.prompt))
        self._submitted = now
        self._begun: Seconds | None = None
        self._first: Seconds | None = None

    def begin(self, now: Seconds) -> TokenDelta | None:
        """Note that computing begins; call it once, before the first `take`.

        Returns the one delta of a choice that the output of an earlier attempt has ended already.
        """
        self._begun = now
        if self.tokens and (end := self._end()) is not None:
            return TokenDelta(self.handle, self.choice, [], self._finish(*end, now))
        return None

    def take(
        self,
        token: TokenId,
        now: Seconds,
        *,
        logprob: TokenLogprob | None = None,
        prompt_logprobs: list[TokenLogprob] | None = None,
    ) -> TokenDelta:
        """Append a token; the returned delta carries `finish` if the choice ends with it.

        `prompt_logprobs`: for the first token, if the request asks for them.
        """
        started = None
        if self._first is None:
            self._first = now
            begun = now if self._begun is None else self._begun
            started = FirstTokenStats(0, begun - self._submitted, now - begun, now - begun)
        self.tokens.append(token)
        end = self._end()
        return TokenDelta(
            self.handle,
            self.choice,
            [token],
            None if end is None else self._finish(*end, now),
            None if logprob is None else [logprob],
            prompt_logprobs,
            started,
        )

    def _end(self) -> tuple[FinishReason, int | None] | None:
        """(reason, stop token id); a stop id counts before the length."""
        sampling, token = self.request.sampling, self.tokens[-1]
        if len(self.tokens) > sampling.min_tokens:
            if not sampling.ignore_eos and token in sampling.eos_token_ids:
                return "stop", None
            if token in sampling.stop_token_ids:
                return "stop", token
        return ("length", None) if len(self.tokens) >= self._limit else None

    def _finish(self, reason: FinishReason, stop_reason: int | None, now: Seconds) -> Finish:
        begun = now if self._begun is None else self._begun
        return Finish(
            reason=reason,
            stop_reason=stop_reason,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.tokens),
            queue_seconds=begun - self._submitted,
            prefill_seconds=(now if self._first is None else self._first) - begun,
        )


@dataclass(slots=True, eq=False)
class _Submission:
    deadline: Seconds | None
    unfinished: int
    """Choices that have not ended."""
    counted: bool
    produced: int = 0
    """Output tokens that have left the core."""


class SelfSchedulingCore(ABC):
    """A `Core` without pdserve's scheduler: a subclass produces the tokens in its own way.

    A subclass implements `open`, `add` and `drop`. It computes in `advance`, in the core's thread,
    or in threads of its own that call `post`, `post_error` and `post_failure`; all other methods
    are for the core's thread. Deltas of submissions that were aborted, rejected or timed out are
    discarded, so no thread has to be stopped before an abort takes effect.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.wake: Callable[[], None] = lambda: None
        """Makes the `CoreLoop` call `step` soon; may be called from any thread. The `CoreLoop` sets
        it."""
        self.keep_alive: Callable[[], None] = lambda: None
        """Tells the node that a long step makes progress; may be called from any thread. The
        `CoreLoop` sets it."""
        self.flush_events: Callable[[], None] = lambda: None
        """Writes the last step's events to the node, in the core's thread. An engine that computes
        in other processes may call it in every `advance` as soon as they compute, so that they do
        not wait for the node. The `CoreLoop` sets it."""
        self.on_freed: Callable[[int, str], None] = lambda handle, phase: None
        """Called once per `Abort`: the handle and what it was doing. The `CoreLoop` sets it."""
        self.deltas: list[TokenDelta] = []
        """Output that the next or current step reports; `add` and `advance` append to it."""
        self.kv_events: list[KvEvent] = []
        """Changes of the prefix cache that the next or current step reports, in order, before its
        output. Full block hashes, made by `pdserve.blocks.hashing`; no hash is stored twice, and
        none is removed that is not stored."""
        self._events: list[Event] = []
        self._posted: deque[TokenDelta | Rejected | CoreFailed] = deque()
        self._failure: CoreFailed | None = None
        self._submissions: dict[int, _Submission] = {}
        self._deadlines = RequestDeadlines()
        self._sequences = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._finished = 0
        self._aborted = 0
        self._stats_at: Seconds = clock.now()
        self._changed = False

    # ------------------------------------------------------------------ what an engine implements

    @abstractmethod
    def open(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Load the model and return the engine's capabilities; call `progress` at least once.

        Raises `ConfigError` for options and models that the engine cannot serve.
        """

    @abstractmethod
    def add(self, handle: int, request: GenerateRequest) -> None:
        """Take a request that has passed `check_request`. Returns at once.

        Each choice of `request.live` ends with one delta that carries `finish`. Raises
        `PdserveError` (`Overloaded`, say) to reject it; the engine must not keep it then.
        """

    @abstractmethod
    def drop(self, handle: int) -> None:
        """Forget a submission that was aborted or has passed its deadline. Returns at once.

        The engine may have ended it already, if the last delta has not been reported yet.
        """

    def advance(self, now: Seconds) -> None:  # noqa: B027
        """Do one step's work in the core's thread; by default nothing.

        An exception ends the core and every request in it; for one request call `reject`.
        """

    @property
    def busy(self) -> bool:
        """Return whether `advance` has something to do now; False for engines that compute in other
        threads."""
        return False

    def next_due(self) -> Seconds | None:
        """When `advance` is due though the engine is not `busy`; None: never."""
        return None

    @property
    def waiting(self) -> int:
        """Choices that have not begun, for the stats; routers prefer workers with few."""
        return 0

    def clear_cache(self) -> None:  # noqa: B027
        """Drop what is cached and not in use; by default nothing is."""

    def rekey(self, hash_secret: bytes) -> None:  # noqa: B027
        """Hash blocks with another secret from now on; what was cached under the old one is gone
        for routers (`PoolCleared`). By default nothing: an engine without KV events has no
        hashes."""

    def shutdown(self) -> int:
        """Free everything; returns leaked KV blocks. Also called when `open` failed or never ran.

        All submissions have been dropped before.
        """
        return 0

    # ------------------------------------------------------------------ what an engine may call

    @property
    def sequences(self) -> int:
        """Choices that have not ended, waiting ones included."""
        return self._sequences

    def reject(self, handle: int, error: PdserveError) -> None:
        """End a submission with an error, in the core's thread. The engine must have dropped it
        already."""
        self._end_rejected(rejected_event(handle, error))

    def note_prompt(self, handle: int, tokens: int) -> None:
        """Count more tokens of a submission's prompt than it came with: those of its images."""
        submission = self._submissions.get(handle)
        if submission is not None and submission.counted:
            self._prompt_tokens += tokens

    def note_change(self) -> None:
        """Have the stats reported, though no request has come or gone: the engine's own numbers
        have changed. In the core's thread."""
        self._changed = True

    def post(self, delta: TokenDelta) -> None:
        """Report output from any thread. Deltas of one choice keep their order."""
        self._posted.append(delta)
        self.wake()

    def post_error(self, handle: int, error: PdserveError) -> None:
        """End a submission with an error, from any thread. The engine must have dropped it
        already."""
        self._posted.append(rejected_event(handle, error))
        self.wake()

    def post_failure(self, error: BaseException) -> None:
        """End the core, from any thread: the node fails its requests and starts another core."""
        self._posted.append(failed_event(error))
        self.wake()

    # ------------------------------------------------------------------ the port

    def load(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Load the model by `open`. Raises what `open` raises."""
        self._capabilities = self.open(spec, progress)
        return self._capabilities

    def handle(self, command: Command) -> None:
        """Take a command in; its results come from `step`. Submissions that need KV transfer are
        rejected; other transfer commands are ignored."""
        match command:
            case Submit():
                try:
                    self._submit(command)
                except PdserveError as error:
                    self._forget(command.handle)
                    self._events.append(rejected_event(command.handle, error))
            case Abort():
                self._abort(command.handle)
            case QueryStats():
                self._events.append(Stats(stats=self.stats()))
            case ClearCache():
                self.clear_cache()
            case DropKv():
                self._drop_kv(command)
            case SetHashSecret():
                self.rekey(command.hash_secret)
            case SubmitRemote() | PrefillForPeer():
                self._events.append(rejected_event(command.handle, _NO_KV))
            case ServeKvPull() | AbsorbKv() | ListKvChains():
                refusal = refusal_of(command)
                self._events += [] if refusal is None else [refusal]
            case StartCore() | StopCore():
                raise ValueError(f"{type(command).__name__} is for the host")

    def _drop_kv(self, command: DropKv) -> None:
        """Drop all that is cached; what belongs to whom only the engine's library knows."""
        if command.owners is None and not command.older:
            self.clear_cache()
            self._events.append(KvDropped(command.number))
            return
        kind, message = kind_and_message(ConfigError("this engine can only drop all: --all"))
        self._events.append(KvDropped(command.number, {}, kind, message))

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to do now."""
        if self.deltas or self.kv_events or self._events or self._posted or self.busy:
            return True
        return self._changed and not self._submissions

    def wake_at(self) -> Seconds | None:
        """The next deadline, or `next_due` if that is earlier; None: never."""
        deadline, due = self._deadlines.next(), self.next_due()
        if deadline is None or due is None:
            return due if deadline is None else deadline
        return min(deadline, due)

    def step(self) -> list[Event]:
        """Drop expired requests, take what other threads have posted, call `advance`, and return
        the events."""
        now = self.clock.now()
        self._expire(now)
        self._take_posted()
        if self._failure is None:
            self.advance(now)
        if self.kv_events:
            self._events.append(KvEvents(events=self.kv_events))
            self.kv_events = []
        if self.deltas:
            self._report_output()
        if self._changed and (not self._submissions or now - self._stats_at >= STATS_INTERVAL):
            self._stats_at, self._changed = now, False
            self._events.append(Stats(stats=self.stats()))
        if self._failure is not None:
            self._events.append(self._failure)
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        """A snapshot of the stats."""
        waiting = self.waiting
        return EngineStats(
            running=self._sequences - waiting,
            waiting=waiting,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            aborted=self._aborted,
            finished=self._finished,
        )

    def close(self) -> int:
        """Drop all submissions and call `shutdown`; returns leaked KV blocks."""
        for handle in list(self._submissions):
            self._forget(handle)
            self.drop(handle)
        return self.shutdown()

    # ------------------------------------------------------------------ inside

    def _submit(self, command: Submit) -> None:
        handle, request = command.handle, command.request
        self._register(handle, request, len(request.live), counted=command.counted)
        self.add(handle, request)
        self._prompt_tokens += len(request.prompt) if command.counted else 0

    def _register(
        self, handle: int, request: GenerateRequest, choices: int, *, counted: bool
    ) -> None:
        """Check a request and count it until it ends; `choices` end with a `finish`."""
        limits = self._capabilities
        if request.classify and not limits.num_labels:
            raise InvalidRequest("this model has no classification head", param="model")
        check_request(
            request,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            embeds=limits.embedding_size > 0 or request.classify,
            images=0 if limits.image is None else limits.image.most,
        )
        deadline = None if request.deadline is None else self.clock.now() + request.deadline
        self._submissions[handle] = _Submission(deadline, choices, counted)
        self._sequences += choices
        if deadline is not None:
            self._deadlines.add(deadline, handle)
        self._changed = True

    def _abort(self, handle: int) -> None:
        """End the submission without any further event about it."""
        submission = self._forget(handle)
        if submission is None:
            self._events = [e for e in self._events if getattr(e, "handle", None) != handle]
            self.on_freed(handle, "")
            return
        self._aborted += submission.counted
        self.drop(handle)
        self.on_freed(handle, "decoding" if submission.produced else "queued")

    def _expire(self, now: Seconds) -> None:
        deadline = self._deadlines.next()
        if deadline is None or deadline > now:
            return
        for handle in self._deadlines.passed(now):
            submission = self._submissions[handle]
            self._aborted += submission.counted
            stage = self._stage(handle, submission.produced)
            self.drop(handle)
            self.reject(handle, DeadlineExceeded(f"the deadline passed while {stage}"))

    def _stage(self, handle: int, produced: int) -> str:
        """What a submission is doing, as text that follows "while"."""
        return f"decoding, {produced} tokens done" if produced else "waiting for its turn"

    def _end_rejected(self, event: Rejected) -> None:
        """End a submission with this event; nothing happens if it has ended."""
        if self._forget(event.handle):
            self._events.append(event)

    def _forget(self, handle: int) -> _Submission | None:
        """Remove a submission; None if it has ended or was never taken."""
        submission = self._submissions.pop(handle, None)
        if submission is not None:
            self._changed = True
            self._sequences -= submission.unfinished
            if submission.deadline is not None:
                self._deadlines.discard(submission.deadline, handle)
        return submission

    def _take_posted(self) -> None:
        # Results that are posted meanwhile belong to the next step.
        for _ in range(len(self._posted)):
            match self._posted.popleft():
                case TokenDelta() as delta:
                    self.deltas.append(delta)
                case Rejected() as event:
                    if self.deltas:
                        self._report_output()
                    self._end_rejected(event)
                case CoreFailed() as event:
                    self._failure = event

    def _report_output(self) -> None:
        """Report the deltas; those of submissions that have ended are discarded."""
        deltas, self.deltas = self.deltas, []
        submissions, kept, tokens = self._submissions, [], 0
        for delta in deltas:
            submission = submissions.get(delta.handle)
            if submission is None:
                continue
            kept.append(delta)
            made = len(delta.tokens)
            submission.produced += made
            if submission.counted:
                tokens += made
            if delta.finish is not None:
                self._end_choice(delta.handle, submission)
        if kept:
            self._output_tokens += tokens
            self._steps += 1
            self._changed = True
            self._events.append(StepOutput(deltas=kept))

    def _end_choice(self, handle: int, submission: _Submission) -> None:
        submission.unfinished -= 1
        self._sequences -= 1
        if not submission.unfinished:
            self._forget(handle)
            self._finished += submission.counted


_NO_KV = TransferRefused("this engine neither sends KV nor receives any")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What every engine needs from a checkpoint's `config.json`."""

    model_type: str
    vocab_size: int
    """0: not in the file."""
    max_model_len: int
    """Tokens of prompt and output: `--max-model-len`, or else the checkpoint's limit."""
    eos_token_ids: tuple[TokenId, ...]


def read_model_limits(spec: EngineSpec, *, longer: str = "") -> ModelLimits:
    """Read `config.json` of the model's directory.

    Raises `ConfigError` if it cannot be read or `--max-model-len` exceeds the checkpoint's limit.
    That message ends with `longer`, which says how to lift the limit.
    """
    config = read_json(Path(spec.model) / "config.json")
    text = config.get("text_config") or config
    limit = int(text.get("max_position_embeddings", 0) or 0) or 1 << 20
    if spec.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len of {spec.max_model_len} is over the checkpoint's limit of {limit} "
            f"tokens{longer}"
        )
    eos = text.get("eos_token_id")
    return ModelLimits(
        model_type=str(config.get("model_type", "")),
        vocab_size=int(text.get("vocab_size", 0) or 0),
        max_model_len=spec.max_model_len or limit,
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises `ConfigError`, which names the file, if there is
    none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content


def check_options(engine: str, options: Mapping[str, str], known: Iterable[str]) -> None:
    """Raise `ConfigError` for an `--engine-option` that the engine does not have."""
    known = list(known)
    unknown = sorted(options.keys() - set(known))
    if unknown:
        has = ", ".join(known) or "none"
        raise ConfigError(f"the {engine} engine has no option {', '.join(unknown)}; it has {has}")


def capabilities_without_kv(
    spec: EngineSpec,
    limits: ModelLimits,
    *,
    prompt_logprobs: bool = False,
    features: tuple[str, ...] = (),
    dtype: str = "none",
    device: str = "none",
) -> EngineCapabilities:
    """Capabilities of an engine that shows no KV blocks to pdserve.

    `features` go to the worker's card (`ModelCard.features`): `grammar`, `thinking`, `bans`. The
    frontend sends a request that needs one of them only to workers that have it.
    """
    return EngineCapabilities(
        engine=spec.engine,
        model_type=limits.model_type,
        dtype=dtype,
        device=device,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        block_size=spec.block_size,
        num_blocks=0,
        block_bytes=0,
        max_batch_tokens=spec.max_batch_tokens,
        max_sequences=spec.max_sequences,
        prompt_logprobs=prompt_logprobs,
        kv_events=False,
        eos_token_ids=limits.eos_token_ids,
        features=features,
    )
