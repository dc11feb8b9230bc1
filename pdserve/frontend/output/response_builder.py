"""Implements what whole and streamed answers share: ending choices, usage, timing, one outcome.

A `ResponseBuilder` gives the backend one sink per prompt and the request's handler a future.
Deltas reach the choices synchronously; only the end passes through the event loop. Owned by the
handler, which always cancels the backend's streams at the end.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from pdserve.errors import EngineError, PdserveError
from pdserve.frontend.placement import PromptStats, cached_tokens, header_lines, served_summary
from pdserve.protocols.completion_responses import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.frontend.dispatch.backend import RequestHandle
    from pdserve.frontend.placement import Placement
    from pdserve.frontend.plan import Prompt, RequestPlan
    from pdserve.ids import Seconds
    from pdserve.messages.request import Finish, TokenDelta
    from pdserve.observe.metrics import ModelMetrics
    from pdserve.protocols.completion_responses import Served
    from pdserve.tracing.phases import PromptPhases

logger = logging.getLogger("pdserve.frontend")


class ChoiceSink(Protocol):
    """One choice of one prompt, fed until it is done."""

    done: bool
    completion_tokens: int
    reasoning_tokens: int
    """Number of these tokens that are reasoning, if the parser separates it."""
    first: Seconds | None
    """Time of its first tokens; None: none has come, or it is a vector."""
    last: Seconds | None
    """Time of its last tokens."""

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, once `done` is set."""
        ...

    def on_delta(self, delta: TokenDelta, now: Seconds) -> None:
        """Takes tokens, and perhaps the end, which sets `done`."""
        ...


class PromptSink:
    """Receives one prompt's tokens and hands each delta to its choice."""

    __slots__ = (
        *("_answer", "_begun", "_choices", "_finished", "_left", "_stopped", "_stream"),
        *("course", "phases"),
    )

    def __init__(self, answer: ResponseBuilder, choices: list[ChoiceSink]) -> None:
        self._answer = answer
        self._choices = choices
        self._left = len(choices)
        self._stream: RequestHandle | None = None
        self._stopped: list[int] = []
        """Choices that ended before the backend's handle was known."""
        self._begun = False
        self._finished = False
        self.course = PromptStats()
        """The prompt's placement and times."""
        self.phases: PromptPhases | None = None
        """What the prompt goes through; None: it is not recorded."""

    def on_placed(self, placement: Placement) -> None:
        """Called for each worker that is asked to take the prompt."""
        course = self.course
        # What was reported of the first token stays when another worker continues the request.
        if self._begun and course.placement is not None:
            placement = replace(
                placement,
                policy=course.placement.policy,
                overlap_tokens=course.placement.overlap_tokens,
                predicted_ttft=course.placement.predicted_ttft,
            )
        course.placement = placement

    def opened(self, stream: RequestHandle) -> None:
        """Called when the backend has accepted the prompt, which may have ended already."""
        self._stream = stream
        if self._left == 0:
            stream.cancel()
            return
        for choice in self._stopped:
            stream.end_choice(choice)

    @property
    def moved(self) -> Seconds:
        """Seconds between two workers during which no token came."""
        return 0.0 if self._stream is None else self._stream.moved

    def output(self, choice: int) -> list[int]:
        """Output tokens of one of its choices so far, as far as the backend keeps them."""
        return [] if self._stream is None else self._stream.output(choice)

    def cancel(self) -> None:
        """Frees what the backend still holds. Idempotent."""
        if self._stream is not None:
            self._stream.cancel()

    def release(self) -> None:
        """Drops the reference to the backend's handle, which refers to this sink."""
        self._stream = None

    def on_delta(self, delta: TokenDelta) -> None:
        choice = self._choices[delta.choice]
        if choice.done:
            return
        answer = self._answer
        now = answer.time()
        try:
            finish = delta.finish
            if finish is not None:
                self._check(finish)
            if not self._begun:
                self._begin(delta, now)
            choice.on_delta(delta, now)
            if choice.done:
                self._on_choice_done(delta.choice, finish)
        except PdserveError as error:
            answer.fail(error)
        except Exception:
            # A fault in this process must not reach the engine's client, which serves others.
            logger.exception("answering failed [%s]", answer.plan.requests[0].request_id)
            answer.fail(EngineError("the server failed while answering"))

    def on_error(self, error: PdserveError) -> None:
        self._answer.fail(error)

    def _begin(self, delta: TokenDelta, now: Seconds) -> None:
        """Handles the prompt's first token."""
        self._begun = True
        started = delta.started
        if started is not None:
            course = self.course
            course.cached_tokens = started.cached_tokens
            course.queue, course.prefill = started.queue_seconds, started.prefill_seconds
            course.where, course.sources = started.prefill, started.sources
            course.prefill_cached = started.prefill_cached
            course.prefill_sources = started.prefill_sources
            if started.image_tokens:
                course.image_tokens = started.image_tokens
                self._answer.plan.on_image_tokens(started.image_tokens)
        answer = self._answer
        if answer.first_token is None:
            answer.begin(now)

    def _check(self, finish: Finish) -> None:
        if not self._finished:
            self._finished = True
            course = self.course
            if course.cached_tokens is None:
                # The engine did not report these at the start.
                course.cached_tokens = finish.cached_tokens
                course.queue, course.prefill = finish.queue_seconds, finish.prefill_seconds
            self._answer.on_first_finish(course)
        if self.phases is not None:
            self.phases.finished(finish)
        if finish.reason == "error" or finish.reason == "abort":
            raise EngineError(finish.message or "the engine gave the request up")

    def _on_choice_done(self, choice: int, finish: Finish | None) -> None:
        """Handles a choice that is done. Without `finish` it was ended here, by a stop string, and
        the engine would continue it."""
        self._left -= 1
        if finish is None:
            self._answer.stop_string = self._answer.time()
        if self._left:
            if finish is None:
                self._stop(choice)
            return
        if finish is None:
            self.cancel()
        self._answer.on_prompt_done()

    def _stop(self, choice: int) -> None:
        if self._stream is None:
            self._stopped.append(choice)
        else:
            self._stream.end_choice(choice)


class ResponseBuilder(ABC):
    """Builds one request's answer."""

    def __init__(
        self,
        plan: RequestPlan,
        metrics: ModelMetrics,
        arrival: Seconds,
        time: Callable[[], Seconds],
    ) -> None:
        self.plan = plan
        self.metrics = metrics
        self.time = time
        self.arrival = arrival
        self.first_token: Seconds | None = None
        self.stop_string: Seconds | None = None
        """When a stop string ended a choice."""
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when every choice has ended, or to the error that ended the request."""
        self.choices: list[ChoiceSink] = []
        self.sinks = [self._sink(index, prompt) for index, prompt in enumerate(plan.prompts)]
        self._prompts_left = len(self.sinks)
        self._told: Served | None = None

    def begin(self, now: Seconds) -> None:
        """Called with the first token of any choice."""
        self.first_token = now
        self.metrics.time_to_first_token.observe(now - self.arrival)

    @property
    def client_slow(self) -> Seconds | None:
        """Time when the client was first behind with reading; None: it never was."""
        return None

    def fail(self, error: PdserveError) -> None:
        """Ends the request with an error, unless it has ended."""
        if not self.finished.done():
            self.finished.set_exception(error)

    @abstractmethod
    def _choice(self, index: int, prompt: Prompt) -> ChoiceSink:
        """Makes the choice that answers `prompt` at `index` (prompt index times n, plus choice)."""

    def on_first_finish(self, course: PromptStats) -> None:
        """Called when a prompt's first choice has ended at the engine, perhaps at another one than
        it began on."""
        self.metrics.request_queue.observe(course.queue or 0.0)
        self.metrics.request_prefill.observe(course.prefill or 0.0)

    def on_prompt_done(self) -> None:
        """Called when all choices of one prompt have ended."""
        self._prompts_left -= 1
        if self._prompts_left == 0 and not self.finished.done():
            self.finished.set_result(None)

    def cancel(self) -> None:
        """Frees everything at the backend. Idempotent; the answer gets no further output."""
        for sink in self.sinks:
            sink.cancel()

    def release(self) -> None:
        """Drops the references to prompts and choices; the answer is not read afterwards. They
        refer to this object: the cycle would keep the request until the garbage collector runs."""
        for sink in self.sinks:
            sink.release()
        self.sinks.clear()
        self.choices.clear()

    @property
    def completion_tokens(self) -> int:
        """Number of output tokens so far, over all choices."""
        if self.plan.scores_only:
            return 0
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts, as far as known: a worker says what images took."""
        sinks = zip(self.sinks, self.plan.prompts, strict=True)
        return sum(_prompt_tokens(prompt, sink.course.image_tokens) for sink, prompt in sinks)

    @property
    def stage(self) -> str:
        """The stage of the request, in words for an error."""
        if self.first_token is not None:
            return "generating"
        if any(sink.course.placement is None for sink in self.sinks):
            return "waiting for a worker"
        return "waiting for the first token"

    def usage(self, *, last: bool = False) -> Usage:
        """Tokens so far. Cached tokens are included once every prompt's are known. `last`: this is
        the final usage, which also says how the request was served."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        cached = cached_tokens([sink.course for sink in self.sinks])
        told = self.served() if last else None
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=(
                None if cached is None else PromptTokensDetails(cached_tokens=cached)
            ),
            completion_tokens_details=self._completion_details(),
            pdserve=UNSET if told is None else told,
        )

    def _completion_details(self) -> CompletionTokensDetails | UnsetType:
        if not self.plan.reasons:
            return UNSET
        count = sum(choice.reasoning_tokens for choice in self.choices)
        return CompletionTokensDetails(reasoning_tokens=count)

    def served_lines(self) -> bytes:
        """How the request was served, as far as known, as header lines."""
        return header_lines(self.served())

    def served(self) -> Served | None:
        """How the request was served, as far as known; None: no worker has it."""
        if self._told is not None:
            return self._told
        first = self.first_token
        ttft = None if first is None else first - self.arrival
        told = served_summary([sink.course for sink in self.sinks], ttft)
        if self.finished.done():
            # Usage, headers and log tell the same of a finished answer.
            self._told = told
        return told

    def _sink(self, prompt_index: int, prompt: Prompt) -> PromptSink:
        first = prompt_index * self.plan.n
        choices = [self._choice(first + choice, prompt) for choice in range(self.plan.n)]
        self.choices += choices
        return PromptSink(self, choices)


def _prompt_tokens(prompt: Prompt, images: tuple[int, ...]) -> int:
    return len(prompt.tokens) + sum(images) - len(images) if images else prompt.size
