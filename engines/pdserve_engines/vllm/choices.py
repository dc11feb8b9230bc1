"""Turns the output of vLLM's requests into pdserve's deltas. Imports no vLLM.

Each choice of a pdserve request is a request of its own in vLLM. This file follows one of them:
times, cached tokens, its share of the steps' work, and how it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.messages.request import Finish, FirstTokenStats, TokenDelta, TokenLogprob
from pdserve_engines.vllm.params import given_output

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.ids import Seconds, TokenId
    from pdserve.messages.request import FinishReason, GenerateRequest
    from pdserve.messages.tiers import CachedSource

__all__ = ["VllmChoice", "finish_reason", "request_id"]

_QUEUED, _SCHEDULED, _PREEMPTED = 1, 2, 3
"""Values of vLLM's `EngineCoreEventType`."""
_STOP, _LENGTH, _ABORT, _ERROR, _REPETITION = range(5)
"""Values of vLLM's `FinishReason`."""


def request_id(handle: int, choice: int) -> str:
    """The id of a choice inside of vLLM."""
    return f"{handle}.{choice}"


def finish_reason(number: int) -> FinishReason:
    """Our reason for one of vLLM's; a detected repetition is a stop."""
    reasons: dict[int, FinishReason] = {
        _STOP: "stop",
        _LENGTH: "length",
        _ABORT: "abort",
        _ERROR: "error",
        _REPETITION: "stop",
    }
    return reasons[number]


class VllmChoice:
    """One choice of a request, from its submission to its end."""

    def __init__(
        self,
        handle: int,
        number: int,
        request: GenerateRequest,
        now: Seconds,
        image_tokens: tuple[int, ...] = (),
    ) -> None:
        """`now`: when the request was submitted. `image_tokens`: the tokens of each image of its
        prompt, which is expanded."""
        self.handle = handle
        self.number = number
        self.id = request_id(handle, number)
        self.request = request
        self.made = len(given_output(request, number))
        """Output tokens so far, those of an earlier attempt included."""
        self.entered: Seconds
        """When vLLM got it: later than it was submitted, if its images had to be read first."""
        self.first: Seconds | None = None
        """When the first token came."""
        self.computed = 0
        """Tokens that vLLM has computed, as of the last step."""
        self.work: Seconds = 0.0
        """Its share of the steps so far."""
        self._submitted = self.entered = now
        self._image_tokens = image_tokens
        self.cached = 0
        """Prompt tokens that were not computed."""
        self.skipped = 0
        """The same, with those of earlier output."""
        self.loaded = 0
        """Those of `cached` whose KV another worker has sent."""
        self.sources: tuple[CachedSource, ...] = ()
        """Those of `cached` that came from lower tiers."""
        self._scheduled: Seconds | None = None
        self._preemptions = 0
        self._prompt_logprobs: list[TokenLogprob] | None = None

    def take(self, output: Any, now: Seconds) -> TokenDelta | None:
        """The delta of one `EngineCoreOutput` of vLLM; None if it carries nothing yet."""
        self._note(output, now)
        if output.new_prompt_logprobs_tensors is not None:
            self._prompt_logprobs = self._read_prompt(output.new_prompt_logprobs_tensors)
        tokens: list[TokenId] = list(output.new_token_ids)
        ended = output.finish_reason is not None
        if not (tokens or ended):
            return None
        self.made += len(tokens)
        started = self._begin(now) if tokens and self.first is None else None
        prompt_logprobs = None
        if tokens:
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return TokenDelta(
            self.handle,
            self.number,
            tokens,
            self._finish(output, now) if ended else None,
            self._logprobs(output.new_logprobs, len(tokens)),
            prompt_logprobs,
            started,
        )

    def vector(self, output: Any, now: Seconds) -> TokenDelta:
        """The delta of a pooling request: an embedding, and no token."""
        self._note(output, now)
        started = self._begin(now)
        embedding = output.pooling_output.float().cpu().numpy().astype("<f4").tobytes()
        finish = self._record("stop", None, now, embedding)
        return TokenDelta(self.handle, self.number, [], finish, started=started)

    def ended_before(self, now: Seconds, max_model_len: int) -> TokenDelta | None:
        """The one delta of a choice that the output of an earlier attempt has ended; else None."""
        sampling = self.request.sampling
        given = given_output(self.request, self.number)
        if not given:
            return None
        if len(given) > sampling.min_tokens:
            if not sampling.ignore_eos and given[-1] in sampling.eos_token_ids:
                return self._end_at_once("stop", None, now)
            if given[-1] in sampling.stop_token_ids:
                return self._end_at_once("stop", given[-1], now)
        room = max_model_len - len(self.request.prompt)
        if len(given) >= min(sampling.max_tokens, room):
            return self._end_at_once("length", None, now)
        return None

    def _end_at_once(self, reason: FinishReason, stop: int | None, now: Seconds) -> TokenDelta:
        return TokenDelta(self.handle, self.number, [], self._record(reason, stop, now))

    # ------------------------------------------------------------------ times and counts

    def _note(self, output: Any, now: Seconds) -> None:
        """Read vLLM's events. Its timestamps are monotonic, as our clock is, and only differences
        between them are used."""
        queued: Seconds | None = None
        for event in output.events or ():
            if event.type == _QUEUED:
                queued = event.timestamp
            elif event.type == _SCHEDULED and self._scheduled is None:
                waited = event.timestamp - queued if queued is not None else 0.0
                self._scheduled = min(now, self.entered + max(0.0, waited))
            elif event.type == _PREEMPTED:
                self._preemptions += 1

    def _begin(self, now: Seconds) -> FirstTokenStats:
        self.first = now
        if self._scheduled is None:
            self._scheduled = self.entered
        scheduled = self._scheduled
        return FirstTokenStats(
            self.cached,
            scheduled - self._submitted,
            now - scheduled,
            self.work,
            image_tokens=self._image_tokens,
            sources=self.sources,
        )

    @property
    def total(self) -> int:
        """Tokens to be computed before the next one: the prompt and the output so far."""
        return len(self.request.prompt) + self.made

    @property
    def uncomputed(self) -> int:
        """Tokens that vLLM has not computed yet."""
        return max(0, self.total - self.computed)

    def note_cached(self, output: Any) -> None:
        """Read how much of the prompt was cached, from the output of its last chunk."""
        if output.prefill_stats is not None and self.first is None:
            stats = output.prefill_stats
            self.skipped = stats.num_cached_tokens
            self.cached = min(self.skipped, len(self.request.prompt))
            own = sum(source.tokens for source in self.sources)
            external = getattr(stats, "num_external_cached_tokens", 0)
            self.loaded = min(max(0, external - own), self.cached)

    def note_loaded(self, sources: tuple[CachedSource, ...]) -> None:
        """Tokens of it have come from lower tiers. Later loads follow a preemption."""
        if self.first is None:
            self.sources = sources

    def _finish(self, output: Any, now: Seconds) -> Finish:
        reason = finish_reason(int(output.finish_reason))
        stop = output.stop_reason if isinstance(output.stop_reason, int) else None
        sampling = self.request.sampling
        if stop in sampling.eos_token_ids and not sampling.ignore_eos:
            stop = None
        message = "vLLM could not continue this request" if reason == "error" else ""
        return self._record(reason, stop, now, message=message)

    def _record(
        self,
        reason: FinishReason,
        stop: int | None,
        now: Seconds,
        embedding: bytes = b"",
        message: str = "",
    ) -> Finish:
        scheduled = now if self._scheduled is None else self._scheduled
        first = now if self.first is None else self.first
        return Finish(
            reason=reason,
            stop_reason=stop,
            message=message,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.made,
            cached_tokens=self.cached,
            preemptions=self._preemptions,
            queue_seconds=max(0.0, scheduled - self._submitted),
            prefill_seconds=max(0.0, first - scheduled),
            embedding=embedding,
        )

    # ------------------------------------------------------------------ logprobs

    def _logprobs(self, rows: Any, count: int) -> list[TokenLogprob] | None:
        """vLLM's rows hold the sampled token first, then as many alternatives as any request of
        the batch wants."""
        sampling = self.request.sampling
        if rows is None or sampling.logprobs is None:
            return None
        chosen = frozenset(sampling.logprob_token_ids)
        end = None if chosen else 1 + sampling.logprobs
        return [
            _record_row(ids, values, int(rank), chosen)
            for ids, values, rank in zip(
                rows.logprob_token_ids[:count, :end].tolist(),
                rows.logprobs[:count, :end].tolist(),
                rows.sampled_token_ranks[:count].tolist(),
                strict=True,
            )
        ]

    def _read_prompt(self, tensors: Any) -> list[TokenLogprob]:
        """Rows of the prompt's tokens but the first; rows of earlier output are left out."""
        count, end = len(self.request.prompt) - 1, 1 + (self.request.sampling.prompt_logprobs or 0)
        rows = zip(
            tensors.logprob_token_ids[:count, :end].tolist(),
            tensors.logprobs[:count, :end].tolist(),
            tensors.selected_token_ranks[:count].tolist(),
            strict=True,
        )
        return [_record_row(ids, values, int(rank)) for ids, values, rank in rows]


def _record_row(
    ids: list[int], values: list[float], rank: int, chosen: Collection[TokenId] = ()
) -> TokenLogprob:
    """`chosen`: the alternatives that are wanted; empty: all of the row."""
    others = zip(ids[1:], values[1:], strict=True)
    wanted = [(token, value) for token, value in others if not chosen or token in chosen]
    return TokenLogprob(ids[0], values[0], rank, sorted(wanted, key=lambda pair: -pair[1]))
