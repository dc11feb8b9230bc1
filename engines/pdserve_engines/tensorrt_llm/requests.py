"""Runs choices at TensorRT-LLM, in the thread of its asyncio loop.

Every choice is a request of its own to the engine, since several choices of one request would share
a seed and could not be stopped one by one. The first choice of a request goes first; the others
follow when it has a token, so that they find its prompt in the prefix cache.

All methods run in the loop's thread, which owns all of it; the core calls them by `call_soon`. What
happens is told by `RequestLife`'s table; this file performs its actions.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.errors import EngineDied, StepFailed
from pdserve_engines.request_states import RequestAction, RequestEvent
from pdserve_engines.tensorrt_llm.choices import Choice, error_of, failure_of
from pdserve_engines.tensorrt_llm.handoff import cancel_answer
from pdserve_engines.tensorrt_llm.outputs import end_of, new_logprobs, new_tokens
from pdserve_engines.tensorrt_llm.params import next_part, priority_of, sampling_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.clock import Clock
    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds
    from pdserve.messages.handoff import FirstToken
    from pdserve.messages.request import GenerateRequest, TokenDelta, TokenLogprob
    from pdserve_engines.loop_thread import LoopThread
    from pdserve_engines.tensorrt_llm.outputs import End
    from pdserve_engines.tensorrt_llm.package import Package
    from pdserve_engines.tensorrt_llm.params import Part, Support

__all__ = ["Reports", "Requests"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reports:
    """Where results go; each may be called from any thread."""

    delta: Callable[[Choice, TokenDelta], None]
    error: Callable[[Choice, PdserveError], None]
    failure: Callable[[BaseException], None]
    prefilled: Callable[[Choice], None] = field(default=lambda choice: None)
    """A prompt was prefilled for a peer."""
    due: Callable[[], None] = field(default=lambda: None)
    """`Requests.oldest_cancel` has a new value, so the core must wake at another time."""


@dataclass(slots=True, eq=False)
class _Submission:
    choices: list[Choice]
    """Those that are not over."""
    later: list[Choice]
    """Those that wait for the first one's first token."""


class Requests:
    """The choices that TensorRT-LLM has."""

    def __init__(
        self,
        loop: LoopThread,
        package: Package,
        llm: Any,
        support: Support,
        clock: Clock,
        reports: Reports,
    ) -> None:
        self._loop = loop
        self._package = package
        self._llm = llm
        self._support = support
        self._clock = clock
        self._reports = reports
        self._submissions: dict[int, _Submission] = {}
        self._dead = False
        self._not_begun: set[Choice] = set()
        self.oldest_cancel: Seconds | None = None
        """When the oldest request was cancelled that has not ended; the core's thread reads it."""
        self._cancelled: dict[Choice, Seconds] = {}

    @property
    def waiting(self) -> int:
        """Choices that have not begun; any thread may ask."""
        return len(self._not_begun)

    # ------------------------------------------------------------------ what the core calls

    def begin(
        self,
        handle: int,
        request: GenerateRequest,
        submitted: Seconds,
        disaggregated: Mapping[str, Any] | None = None,
        *,
        run: int = 0,
        received: int = 0,
        first: FirstToken | None = None,
        for_peer: bool = False,
    ) -> None:
        """Run a request. `disaggregated`: arguments of `DisaggregatedParams` for its first part;
        `run`: tells runs of one request apart (`Choice.run`);
        `received` and `first`: prompt tokens and first token that come from a peer; `for_peer`: end
        with the prompt."""
        submission = self._submissions[handle] = _Submission([], [])
        for number in request.live:
            choice = Choice(handle, number, request, submitted, self._support.max_model_len)
            choice.run = run
            choice.received = received
            choice.handed = first
            choice.for_peer = for_peer
            ended = choice.begin(self._clock.now())
            if ended is not None:
                self._reports.delta(choice, ended)
                continue
            self._not_begun.add(choice)
            submission.choices.append(choice)
            submission.later.append(choice)
        if not submission.choices:
            del self._submissions[handle]
        elif first is not None and submission.choices[0].ends_with(first.token):
            self._end_at_once(submission, first)
        elif request.diverged:
            self._start_later(handle)
        else:
            self._start(submission.later.pop(0), disaggregated)

    def drop(self, handle: int) -> None:
        """Forget a request: cancel what the engine has of it."""
        submission = self._submissions.pop(handle, None)
        if submission is None:
            return
        for choice in submission.choices:
            self._fire(choice, RequestEvent.DROP)
        submission.later.clear()

    def die(self) -> None:
        """The engine has broken down: nothing more comes."""
        self._dead = True
        self._not_begun.clear()
        for submission in list(self._submissions.values()):
            for choice in list(submission.choices):
                self._fire(choice, RequestEvent.DEAD)
        self._submissions.clear()
        self._cancelled.clear()
        self.oldest_cancel = None

    # ------------------------------------------------------------------ one choice

    def _start(self, choice: Choice, disaggregated: Mapping[str, Any] | None = None) -> None:
        name = f"request {choice.handle}.{choice.number}"
        self._loop.submit(self._run(choice, disaggregated), name)

    def _end_at_once(self, submission: _Submission, first: FirstToken) -> None:
        """The first token of a peer is the last one: there is nothing to compute here."""
        (choice,) = submission.choices
        choice.take(
            [first.token], [] if first.logprob is None else [first.logprob], self._clock.now()
        )
        self._fire(choice, RequestEvent.ADMITTED)
        self._fire(choice, RequestEvent.FINISH)

    def _start_later(self, handle: int) -> None:
        submission = self._submissions.get(handle)
        if submission is None:
            return
        later, submission.later = submission.later, []
        for choice in later:
            self._start(choice)

    async def _run(self, choice: Choice, disaggregated: Mapping[str, Any] | None) -> None:
        begun = False
        try:
            while not choice.life.over and not self._dead:
                part = next_part(choice.request, choice.tokens, self._support)
                await self._run_part(choice, part, disaggregated)
                disaggregated = choice.handed = None
                if not begun:
                    begun = True
                    self._start_later(choice.handle)
        except Exception as error:
            self._failed(choice, error)
        finally:
            self._cancelled.pop(choice, None)
            self.oldest_cancel = min(self._cancelled.values(), default=None)

    async def _run_part(
        self, choice: Choice, part: Part, disaggregated: Mapping[str, Any] | None
    ) -> None:
        """Run one request to the engine, to its end."""
        if not choice.wanted:
            self._fire(choice, RequestEvent.FINISH)  # dropped before it, or between two parts
            return
        choice.result = result = self._generate(choice, part, disaggregated)
        self._fire(choice, RequestEvent.ADMITTED)
        seen, end = 0, ""
        async for _ in result:
            tokens = new_tokens(result.outputs[0], seen)
            end = end_of(result.outputs[0], result.finished)
            if choice.wanted:
                self._take(choice, part, seen, tokens, end)
            else:
                self._fire(choice, RequestEvent.FINISH if end else RequestEvent.TOKENS)
            seen += len(tokens)
            if choice.begun:
                self._start_later(choice.handle)
        if not end:
            raise StepFailed("TensorRT-LLM's answer broke off")

    def _generate(self, choice: Choice, part: Part, disaggregated: Mapping[str, Any] | None) -> Any:
        request, package = choice.request, self._package
        arguments = sampling_arguments(request, choice.number, part, self._support)
        guide = arguments.pop("guided_decoding", None)
        if guide is not None:
            arguments["guided_decoding"] = package.guided_decoding_params(**guide)
        options: dict[str, Any] = {"streaming": True, "cache_salt": request.cache_salt or None}
        if "priority" in package.generate_parameters:
            options["priority"] = priority_of(request.priority)
        if disaggregated is not None:
            options["disaggregated_params"] = package.disaggregated_params(**disaggregated)
        return self._llm.generate_async(
            {"prompt_token_ids": part.prompt},
            sampling_params=package.sampling_params(**arguments),
            **options,
        )

    def _take(self, choice: Choice, part: Part, seen: int, tokens: list[int], end: End) -> None:
        """Take one answer of the engine in; `seen`: tokens of this part before it."""
        result, now = choice.result, self._clock.now()
        output = result.outputs[0]
        choice.note_cached(int(getattr(result, "cached_tokens", 0) or 0))
        if (failure := failure_of(end)) is not None and not choice.for_peer:
            self._fire(choice, RequestEvent.ERROR, failure)
            return
        logprobs = _logprobs_of(choice, output, seen, len(tokens))
        stopped = choice.take(tokens, logprobs, now)
        if choice.for_peer:
            self._take_prefill(choice, end)
        elif not end:
            self._fire(choice, RequestEvent.STOPPED if stopped else RequestEvent.TOKENS)
        elif not stopped and _goes_on(choice, part, seen + len(tokens), end):
            self._fire(choice, RequestEvent.TOKENS)  # another part follows
        else:
            if not stopped:
                choice.end(end, now)
            self._fire(choice, RequestEvent.FINISH)

    def _take_prefill(self, choice: Choice, end: End) -> None:
        """End a prefill for a peer. TensorRT-LLM keeps the blocks until the peer has fetched them,
        and does not report that moment."""
        failure = None if end == "prefilled" else failure_of(end)
        if failure is not None:
            self._fire(choice, RequestEvent.ERROR, failure)
        elif end:
            self._fire(choice, RequestEvent.PREFILLED)
            self._fire(choice, RequestEvent.SENT)

    def _failed(self, choice: Choice, error: Exception) -> None:
        mapped = error_of(error)
        if mapped is None:
            self._reports.failure(EngineDied(f"TensorRT-LLM: {type(error).__name__}: {error}"))
            self.die()
        elif not choice.life.over:
            self._fire(choice, RequestEvent.ERROR, mapped)

    # ------------------------------------------------------------------ actions

    def _fire(self, choice: Choice, event: RequestEvent, error: PdserveError | None = None) -> None:
        for action in choice.life.fire(event):
            match action:
                case RequestAction.REPORT:
                    self._report(choice)
                case RequestAction.END:
                    self._report_end(choice)
                case RequestAction.FAIL:
                    assert error is not None
                    self._fail(choice, error)
                case RequestAction.CANCEL:
                    self._cancel(choice)
                case RequestAction.FREE:
                    self._forget(choice)
        if choice.begun:
            self._not_begun.discard(choice)

    def _report(self, choice: Choice) -> None:
        if not choice.for_peer:
            for delta in choice.chunk:
                self._reports.delta(choice, delta)

    def _report_end(self, choice: Choice) -> None:
        if choice.for_peer:
            self._reports.prefilled(choice)
        elif choice.last is not None:
            self._reports.delta(choice, choice.last)

    def _fail(self, choice: Choice, error: PdserveError) -> None:
        """A choice that fails ends its whole request."""
        self._reports.error(choice, error)
        submission = self._submissions.get(choice.handle)
        if submission is not None:
            submission.choices = [other for other in submission.choices if other is not choice]
            self.drop(choice.handle)

    def _cancel(self, choice: Choice) -> None:
        now = choice.cancelled_at = self._clock.now()
        if choice.result is None or choice.result.finished:
            return
        answer = cancel_answer(choice.result.abort())
        if answer is not None and answer.restart:
            self._reports.failure(EngineDied("TensorRT-LLM's KV transfer is unhealthy"))
            self.die()
            return
        # Safe or not, TensorRT-LLM owns the blocks until its last answer comes.
        self._cancelled[choice] = now
        self.oldest_cancel = min(self._cancelled.values())
        self._reports.due()

    def _forget(self, choice: Choice) -> None:
        submission = self._submissions.get(choice.handle)
        if submission is None:
            return
        submission.choices = [other for other in submission.choices if other is not choice]
        if not submission.choices:
            del self._submissions[choice.handle]


def _logprobs_of(choice: Choice, output: Any, seen: int, count: int) -> list[TokenLogprob]:
    """The logprobs of new tokens, as far as the request asks for them."""
    top = choice.request.sampling.logprobs
    if top is None or not count:
        return []
    handed = choice.handed
    if seen or handed is None or handed.logprob is None:
        return new_logprobs(output, seen, count, top)
    return [handed.logprob, *new_logprobs(output, 1, count - 1, top)]


def _goes_on(choice: Choice, part: Part, made: int, end: End) -> bool:
    """Return whether another part follows after one that made so many tokens.

    It does if the parts were planned so, or if the engine stopped at an end token of the checkpoint
    that the request ignores. Only a complete grammar ends a choice that pdserve's rules have not
    ended."""
    if part.endless:
        return made >= part.max_tokens
    return end == "stop" and made > 0 and not choice.request.sampling.grammar
