"""Checks the outputs of one submission as they arrive: deltas must be well-formed.

Each choice ends exactly once; nothing follows its end, an error or an abort; tokens and logprobs
agree in number; usage agrees with the deltas. A violation raises AssertionError at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.messages.request import (
        Finish,
        FirstTokenStats,
        GenerateRequest,
        TokenDelta,
        TokenLogprob,
    )

__all__ = ["OutputChecker"]


@dataclass
class OutputChecker:
    """Checks and records the output of one submission."""

    request: GenerateRequest
    tokens: list[list[int]] = field(init=False)
    """Output tokens by choice, given output included."""
    logprobs: list[list[TokenLogprob]] = field(init=False)
    prompt_logprobs: list[list[TokenLogprob] | None] = field(init=False)
    finishes: list[Finish | None] = field(init=False)
    starts: list[FirstTokenStats | None] = field(init=False)
    error: PdserveError | None = None
    aborted: bool = False
    deltas: int = 0

    def __post_init__(self) -> None:
        n = self.request.n
        self.tokens = [list(given) for given in self.request.output] or [[] for _ in range(n)]
        self.logprobs = [[] for _ in range(n)]
        self.prompt_logprobs = [None] * n
        self.finishes = [None] * n
        self.starts = [None] * n

    @property
    def done(self) -> bool:
        """True once nothing more may come."""
        if self.aborted or self.error is not None:
            return True
        live = self.request.live
        return bool(live) and all(self.finishes[choice] for choice in live)

    def take(self, delta: TokenDelta) -> None:
        """Check and record one delta."""
        who = f"{self.request.request_id} choice {delta.choice}"
        assert not self.aborted, f"{who}: a delta after the abort"
        assert self.error is None, f"{who}: a delta after the error"
        assert delta.choice in self.request.live, f"{who}: it had ended before"
        assert self.finishes[delta.choice] is None, f"{who}: a delta after the finish"
        assert delta.tokens or delta.finish, f"{who}: an empty delta"
        assert not (delta.tokens and self.request.pooling), f"{who}: tokens instead of a vector"
        self.deltas += 1
        first = len(self.tokens[delta.choice]) == self._given(delta.choice)
        self.tokens[delta.choice] += delta.tokens
        self._take_logprobs(delta, first)
        self._take_start(delta, first)
        if delta.finish is not None:
            self._finish(delta.choice, delta.finish)

    def fail(self, error: PdserveError) -> None:
        """Record the error that ends the submission."""
        assert not self.done, f"{self.request.request_id}: an error after the end"
        self.error = error

    def _given(self, choice: int) -> int:
        return len(self.request.output[choice]) if self.request.output else 0

    def _take_logprobs(self, delta: TokenDelta, first: bool) -> None:
        sampling = self.request.sampling
        if sampling.logprobs is None:
            assert delta.logprobs is None
        elif delta.tokens:
            assert delta.logprobs is not None
            assert [entry.token for entry in delta.logprobs] == delta.tokens
            assert all(len(entry.top) == sampling.logprobs for entry in delta.logprobs)
            self.logprobs[delta.choice] += delta.logprobs
        if sampling.prompt_logprobs is not None and first and delta.tokens:
            assert delta.prompt_logprobs is not None, "the first delta lacks prompt logprobs"
            assert [p.token for p in delta.prompt_logprobs] == self.request.prompt[1:].tolist()
            self.prompt_logprobs[delta.choice] = delta.prompt_logprobs
        else:
            assert delta.prompt_logprobs is None

    def _take_start(self, delta: TokenDelta, first: bool) -> None:
        if not (first and (delta.tokens or self.request.pooling)):
            assert delta.started is None, "only the first token has a start"
            return
        start = delta.started
        assert start is not None, "the first token does not say how it came about"
        assert len(start.image_tokens) == len(self.request.images)
        assert 0 <= start.cached_tokens <= self._prompt_tokens(start)
        assert min(start.queue_seconds, start.prefill_seconds, start.work_seconds) >= 0
        self.starts[delta.choice] = start

    def _prompt_tokens(self, start: FirstTokenStats | None) -> int:
        """Tokens of the prompt, with those that its images took."""
        sizes = () if start is None else start.image_tokens
        return len(self.request.prompt) + sum(sizes) - len(sizes)

    def _finish(self, choice: int, finish: Finish) -> None:
        self.finishes[choice] = finish
        start = self.starts[choice]
        if start is not None and finish.reason in ("stop", "length"):
            assert start.cached_tokens == finish.cached_tokens
            assert start.queue_seconds == finish.queue_seconds
            assert start.prefill_seconds == finish.prefill_seconds
        output = self.tokens[choice]
        assert finish.prompt_tokens == self._prompt_tokens(start)
        assert finish.completion_tokens == len(output)
        assert 0 <= finish.cached_tokens <= finish.prompt_tokens
        assert finish.queue_seconds >= 0
        assert finish.prefill_seconds >= 0
        if finish.reason == "length":
            assert finish.stop_reason is None
        wants = bool(self.request.pooling) and finish.reason == "stop"
        assert bool(finish.embedding) == wants, "a vector is missing, or not wanted"
        if finish.stop_reason is not None:
            assert finish.reason == "stop"
            assert output[-1] == finish.stop_reason
