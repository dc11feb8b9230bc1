"""A frontend's `Backend` without workers: a script decides tokens, their chunks, and failures.

For tests of the frontend and of clients. Each chunk arrives in a later turn of the event loop, as
from a real engine; nothing sleeps unless the script says so. It keeps the engine's contract
(limits, stop tokens, one end per choice, silence after a cancel) and records its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.errors import NoRouter, NotReady, PdserveError
from pdserve.ids import NodeId
from pdserve.messages.engine import EngineStats
from pdserve.messages.request import (
    Finish,
    FinishReason,
    FirstTokenStats,
    GenerateRequest,
    TokenDelta,
    TokenLogprob,
)

if TYPE_CHECKING:
    from pdserve.engine.port import TokenSink
    from pdserve.frontend.dispatch.backend import RequestHandle
    from pdserve.ids import Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.demand import EndedRequest
    from pdserve.messages.routing import RoutingPreview
    from pdserve.messages.tiers import CachedSource

__all__ = ["FakeBackend", "FakeOpenStream", "Script", "logprob_of"]


@dataclass(slots=True, kw_only=True)
class Script:
    """What one request is answered with."""

    tokens: Sequence[int] = ()
    """What every choice would say; cut by the request's own limits, repeated to fill them."""
    burst: int = 1
    """Tokens per delta."""
    interval: Seconds = 0.0
    """Between two deltas of a choice; 0: the next turn of the event loop."""
    repeat: bool = True
    """Start over when `tokens` are used up; otherwise the choice ends with reason `stop`."""
    refuse: PdserveError | None = None
    """Raised by `open`."""
    fail: PdserveError | None = None
    """Given to the sink after `fail_after` tokens of a choice."""
    fail_after: int = 0
    end: FinishReason | None = None
    """Ends every choice with this reason after `fail_after` tokens."""
    silent_after: int | None = None
    """After so many tokens nothing more ever comes."""
    hold_open: Seconds = 0.0
    """How long `open` takes."""
    cached_tokens: int = 0
    sources: tuple[CachedSource, ...] = ()
    prefill_cached: int = 0
    prefill_sources: tuple[CachedSource, ...] = ()
    """Of the cached tokens."""
    image_tokens: tuple[int, ...] = ()
    """Tokens that each image of a prompt takes."""
    vector: Callable[[GenerateRequest], bytes] | None = None
    """What a prompt becomes if a vector is asked for; None: tokens come all the same."""
    placement: Any = None
    """A frontend's `Placement`, told before the first token."""


class FakeOpenStream:
    """One request in progress."""

    def __init__(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        script: Script,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """`over` is called when no worker has the request any more."""
        self._over = over
        self.request = request
        self.cancelled = False
        self.moved = 0.0
        self.ended: list[int] = []
        """Choices of which nothing more was wanted."""
        self._sink = sink
        self._script = script
        self._loop = asyncio.get_running_loop()
        self._outputs: list[list[int]] = [[] for _ in range(request.n)]
        self._open = set(request.live)
        self._handle: asyncio.Handle | None = None

    @property
    def done(self) -> bool:
        """Every choice has ended, or the whole has failed or was cancelled."""
        return not self._open

    def cancel(self) -> None:
        self.cancelled = self.cancelled or bool(self._open)
        if self._open:
            self._over()
        self._end()

    def output(self, choice: int) -> list[int]:
        return self._outputs[choice]

    def end_choice(self, choice: int) -> None:
        self.ended.append(choice)

    def start(self) -> None:
        """Begin to answer."""
        self._schedule()

    def _end(self) -> None:
        self._open.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _schedule(self) -> None:
        interval = self._script.interval
        self._handle = (
            self._loop.call_later(interval, self._step)
            if interval
            else self._loop.call_soon(self._step)
        )

    def _step(self) -> None:
        script = self._script
        told = len(self._outputs[min(self._open)])
        if script.silent_after is not None and told >= script.silent_after:
            return
        if script.fail is not None and told >= script.fail_after:
            self._end()
            self._sink.on_error(script.fail)
            self._over()
            return
        for choice in sorted(self._open):
            delta = self._delta(choice)
            if delta.finish is not None:
                self._open.discard(choice)
            self._sink.on_delta(delta)
        if self._open:
            self._schedule()
        elif self._handle is not None:
            self._handle = None
            self._over()

    def _vector(self, vector: bytes) -> TokenDelta:
        self._outputs[0].append(0)
        finish = Finish(
            reason="stop",
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self._script.cached_tokens,
            embedding=vector,
        )
        started = FirstTokenStats(self._script.cached_tokens, 0.001, 0.002, 0.002)
        return TokenDelta(0, 0, [], finish, started=started)

    def _delta(self, choice: int) -> TokenDelta:
        if self.request.pooling and self._script.vector is not None:
            return self._vector(self._script.vector(self.request))
        output = self._outputs[choice]
        first = not output
        tokens: list[int] = []
        finish = None
        while finish is None and len(tokens) < self._script.burst:
            token = self._next(len(output))
            if token is not None:
                tokens.append(token)
                output.append(token)
            finish = self._finish(output, token)
        k = self.request.sampling.logprobs
        prompt_k = self.request.sampling.prompt_logprobs
        others = self.request.sampling.logprob_token_ids
        return TokenDelta(
            handle=0,
            choice=choice,
            tokens=tokens,
            finish=finish,
            logprobs=None if k is None else [logprob_of(token, k, others) for token in tokens],
            prompt_logprobs=(
                [logprob_of(token, prompt_k) for token in self.request.prompt[1:]]
                if first and prompt_k is not None
                else None
            ),
            started=(
                FirstTokenStats(
                    *(self._script.cached_tokens, 0.001, 0.002, 0.002),
                    image_tokens=self._script.image_tokens[: len(self.request.images)],
                    sources=self._script.sources,
                    prefill_cached=self._script.prefill_cached,
                    prefill_sources=self._script.prefill_sources,
                )
                if first and tokens
                else None
            ),
        )

    def _next(self, position: int) -> int | None:
        tokens = self._script.tokens
        if not tokens or (position >= len(tokens) and not self._script.repeat):
            return None
        return tokens[position % len(tokens)]

    def _finish(self, output: list[int], token: int | None) -> Finish | None:
        sampling, script = self.request.sampling, self._script
        stops = len(output) > sampling.min_tokens
        if script.end is not None and len(output) >= script.fail_after:
            return self._finished(output, script.end, message="scripted end")
        if token is None:
            return self._finished(output, "stop")
        if stops and token in sampling.stop_token_ids:
            return self._finished(output, "stop", stop_reason=token)
        if stops and token in sampling.eos_token_ids and not sampling.ignore_eos:
            return self._finished(output, "stop")
        if len(output) >= sampling.max_tokens:
            return self._finished(output, "length")
        return None

    def _finished(
        self,
        output: list[int],
        reason: FinishReason,
        stop_reason: int | None = None,
        message: str = "",
    ) -> Finish:
        return Finish(
            reason=reason,
            stop_reason=stop_reason,
            message=message,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(output),
            cached_tokens=self._script.cached_tokens,
            queue_seconds=0.001,
            prefill_seconds=0.002,
        )


def logprob_of(token: int, k: int, others: Sequence[int] = ()) -> TokenLogprob:
    """Numbers that a test can predict: -0.5 for a token, then -1, -2 ... for its successors, and
    -9 for what is asked for by id."""
    top = [(token + offset, -0.5 if offset == 0 else -float(offset)) for offset in range(k)]
    known = {each for each, _ in top}
    top += [(each, -9.0) for each in others if each not in known]
    return TokenLogprob(token, -0.5, 1, top)


Answering = Callable[[GenerateRequest], Script]


@dataclass(slots=True)
class FakeBackend:
    """A backend that answers by script. Nothing in it waits unless the script says so."""

    models: Mapping[str, ModelCard]
    script: Script | Answering = field(default_factory=Script)
    """One for all requests, or a function that chooses."""
    unready: str | None = None
    """Why requests cannot be served."""
    requests: list[GenerateRequest] = field(default_factory=list)
    """Everything that `open` was asked for."""
    hints: list[Any] = field(default_factory=list)
    """What came with each."""
    explained: RoutingPreview | None = None
    """What `explain` answers."""
    ended: list[EndedRequest] = field(default_factory=list)
    """What was told of requests when their workers had no part in them any more."""
    unplaced: list[EndedRequest] = field(default_factory=list)
    """What was told of requests that no worker had."""
    streams: list[FakeOpenStream] = field(default_factory=list)
    """Everything that was opened."""

    def cards(self) -> Mapping[str, ModelCard]:
        return self.models

    def unready_reason(self) -> str | None:
        return self.unready

    async def wait_change(self, *, timeout: Seconds = 1.0) -> None:
        """Always finds some: a test may have changed the models."""

    def refusal(self, card: ModelCard, name: str | None = None) -> PdserveError | None:
        return None if self.unready is None else NotReady(self.unready, retry_after=1.0)

    async def open(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        hints: Any = None,
        on_placed: Callable[[Any], None] = lambda placement: None,
        phases: Any = None,
        ended: Callable[[], EndedRequest | None] = lambda: None,
    ) -> RequestHandle:
        if self.unready is not None:
            raise NotReady(self.unready, retry_after=1.0)
        self.requests.append(request)
        self.hints.append(hints)
        script = self.script if isinstance(self.script, Script) else self.script(request)
        if script.hold_open:
            await asyncio.sleep(script.hold_open)
        if script.refuse is not None:
            raise script.refuse
        if script.placement is not None:
            on_placed(script.placement)
        stream = FakeOpenStream(request, sink, script, lambda: self._is_over(ended))
        self.streams.append(stream)
        stream.start()
        return stream

    def note_ended(self, ended: EndedRequest) -> None:
        self.unplaced.append(ended)

    def _is_over(self, ended: Callable[[], EndedRequest | None]) -> None:
        told = ended()
        if told is not None:
            self.ended.append(told)

    async def explain(
        self, request: GenerateRequest, hints: Any = None
    ) -> tuple[NodeId, RoutingPreview]:
        self.hints.append(hints)
        if self.explained is None:
            raise NoRouter("no router is scripted", retry_after=1.0)
        return NodeId("router"), self.explained

    def stats(self) -> EngineStats:
        running = sum(not stream.done for stream in self.streams)
        return EngineStats(running=running, finished=len(self.streams) - running)

    @property
    def idle(self) -> bool:
        """Nothing is in progress: every stream has ended or was cancelled."""
        return all(stream.done for stream in self.streams)
