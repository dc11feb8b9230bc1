"""One choice of a request at TensorRT-LLM: its output, its life, and the records about it.

`ChoiceOutput` decides when a choice ends, so reasons and usage are the same as with every other
engine; what TensorRT-LLM says about the end counts only where pdserve's rules see none. The
engine's thread owns a choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdserve.engine_core.kit import ChoiceOutput
from pdserve.errors import InvalidRequest, PdserveError, StepFailed
from pdserve.messages.request import Finish, TokenDelta
from pdserve_engines.request_states import RequestLife, RequestState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import Seconds, TokenId
    from pdserve.messages.handoff import FirstToken
    from pdserve.messages.request import FinishReason, GenerateRequest, TokenLogprob
    from pdserve_engines.tensorrt_llm.outputs import End

__all__ = ["Choice", "error_of", "failure_of"]

_REASONS: Mapping[End, FinishReason] = {"stop": "stop", "length": "length"}
"""Ends by the engine alone: a grammar that is complete, or a context shorter than ours."""


class Choice:
    """A choice from its submission to its end."""

    def __init__(
        self, handle: int, number: int, request: GenerateRequest, now: Seconds, limit: int
    ) -> None:
        """`now`: when it was submitted; `limit`: tokens of a context."""
        self.handle = handle
        self.number = number
        self.request = request
        self.life = RequestLife()
        self.result: Any = None
        """The engine's object for the part that runs; None before the first."""
        self.chunk: list[TokenDelta] = []
        """Records of the engine's last answer."""
        self.last: TokenDelta | None = None
        """The record of an end that only the engine sees."""
        self.for_peer = False
        """It ends with the prompt, which a peer takes over."""
        self.cancelled_at: Seconds | None = None
        self.run = 0
        """Which of several runs of the request: each hand-over is one."""
        self.received = 0
        """Prompt tokens whose KV a peer has computed."""
        self.handed: FirstToken | None = None
        """The first token, which that peer has sampled; the engine repeats it without logprobs."""
        self._cached = 0
        self._limit = limit
        self._output = ChoiceOutput(handle, number, request, now, limit)
        self._submitted = now
        self._begun = now

    @property
    def tokens(self) -> list[TokenId]:
        """Output so far, that of an earlier attempt included."""
        return self._output.tokens

    @property
    def wanted(self) -> bool:
        """Its output is reported."""
        return self.life.state in (
            RequestState.POSTED,
            RequestState.ACCEPTED,
            RequestState.RUNNING,
        )

    @property
    def begun(self) -> bool:
        """Tokens have come, or it is over."""
        return self.life.state not in (RequestState.POSTED, RequestState.ACCEPTED)

    def begin(self, now: Seconds) -> TokenDelta | None:
        """Note that the engine gets it; the delta of a choice that earlier output has ended."""
        self._begun = now
        return self._output.begin(now)

    def note_cached(self, tokens: int) -> None:
        """The engine has found KV of this many leading tokens, earlier output included. Only the
        first part's counts: a later one finds what this choice itself has computed."""
        if not self.begun:
            self._cached = min(tokens, len(self.request.prompt))

    def take(
        self, tokens: Sequence[TokenId], logprobs: Sequence[TokenLogprob], now: Seconds
    ) -> bool:
        """Make records of new tokens; True if the choice ends with one. Later ones are dropped."""
        self.chunk = []
        for index, token in enumerate(tokens):
            logprob = logprobs[index] if index < len(logprobs) else None
            delta = self._completed(self._output.take(token, now, logprob=logprob))
            self.chunk.append(delta)
            if delta.finish is not None:
                return True
        return False

    def ends_with(self, token: TokenId) -> bool:
        """Whether the choice would end with this token next. Changes nothing."""
        request = self.request
        probe = ChoiceOutput(self.handle, self.number, request, 0.0, self._limit)
        return probe.take(token, 0.0).finish is not None

    def _completed(self, delta: TokenDelta) -> TokenDelta:
        """Add what only the engine knows."""
        if delta.started is not None:
            started = replace(
                delta.started, cached_tokens=self._cached, received_tokens=self.received
            )
            delta = replace(delta, started=started)
        if delta.finish is not None:
            delta = replace(delta, finish=replace(delta.finish, cached_tokens=self._cached))
        return delta

    def end(self, end: End, now: Seconds) -> None:
        """Make the record of an end that only the engine sees."""
        begun = self._begun
        finish = Finish(
            reason=_REASONS[end],
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.tokens),
            cached_tokens=self._cached,
            queue_seconds=begun - self._submitted,
            prefill_seconds=now - begun,
        )
        self.last = TokenDelta(self.handle, self.number, [], finish)


def failure_of(end: End) -> StepFailed | None:
    """The error of a request that the engine has ended otherwise than by `stop` or `length`."""
    if end in _REASONS or not end:
        return None
    said = {"cancelled": "cancelled the request", "timeout": "gave the request up after a timeout"}
    return StepFailed(f"TensorRT-LLM {said.get(end, 'ended the request without a known reason')}")


def error_of(error: Exception) -> PdserveError | None:
    """The error of one request; None: the engine itself has broken down.

    TensorRT-LLM raises a `RequestError` of its own for a single request, and `ValueError` or
    `TypeError` for arguments.
    """
    if isinstance(error, PdserveError):
        return error
    if any(kind.__name__ == "RequestError" for kind in type(error).__mro__):
        return StepFailed(f"TensorRT-LLM failed at the request: {error}")
    if isinstance(error, ValueError | TypeError):
        return InvalidRequest(f"TensorRT-LLM refuses the request: {error}")
    return None
