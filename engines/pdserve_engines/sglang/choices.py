"""Turns the chunks that SGLang streams into pdserve's deltas. Imports no SGLang.

Each choice of a pdserve request is a request of its own in SGLang. This file follows one of them:
which tokens are new, which of them end the choice by pdserve's rules, and how it ends. Chunks are
read only; lists in them may belong to SGLang and change later, so everything is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.errors import InvalidRequest, Overloaded, PdserveError, StepFailed
from pdserve.messages.request import Finish, FirstTokenStats, TokenDelta, TokenLogprob
from pdserve_engines.sglang.params import given_output, replays, request_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import Seconds, TokenId
    from pdserve.messages.request import FinishReason, GenerateRequest

__all__ = ["SglangChoice"]

_BAD_REQUEST, _UNAVAILABLE = 400, 503
"""HTTP statuses that SGLang gives as the reason of an end."""


class SglangChoice:
    """One choice of a request, from its submission to its end."""

    def __init__(
        self,
        handle: int,
        number: int,
        request: GenerateRequest,
        now: Seconds,
        max_model_len: int,
    ) -> None:
        """`now`: when the request was submitted."""
        self.handle = handle
        self.number = number
        self.id = request_id(handle, number)
        self.request = request
        given = given_output(request, number)
        self.made = len(given)
        """Output tokens so far, those of an earlier attempt included."""
        self.cached = 0
        """Prompt tokens that SGLang did not compute."""
        self.preemptions = 0
        self._given = given
        self._to_replay = given if replays(request, number) else []
        self._room = min(request.sampling.max_tokens, max_model_len - len(request.prompt))
        self._taken = 0
        """Tokens that SGLang has streamed."""
        self._submitted = now
        self._first: Seconds | None = None

    @property
    def begun(self) -> bool:
        """True once the first token has come."""
        return self._first is not None

    def ended_before(self, now: Seconds) -> TokenDelta | None:
        """The one delta of a choice that the output of an earlier attempt has ended; else None."""
        if not self._given:
            return None
        end = self._end_by(self._given[-1], len(self._given))
        if end is None:
            return None
        return TokenDelta(self.handle, self.number, [], self._finish(*end, now))

    def take(self, chunk: Mapping[str, Any], now: Seconds) -> TokenDelta | None:
        """The delta of one chunk; None if it brings nothing new. It carries `finish` if the choice
        has ended, by SGLang's word or by pdserve's rules.

        Raises `PdserveError` if SGLang has failed or refused the request.
        """
        meta = chunk["meta_info"]
        reason = meta["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            # Its tokens are of no use: in the waiting queue SGLang repeats the last one in it.
            raise _failure(reason)
        self._note(meta)
        tokens = self._new_tokens(chunk["output_ids"], meta)
        skipped = self._compare(tokens)
        fresh = tokens[skipped:]
        kept, end = self._cut(fresh)
        if end is None and reason is not None:
            end = self._end_of(reason)
        if not kept and end is None:
            return None
        self.made += len(kept)
        started = self._start(now) if kept and self._first is None else None
        return TokenDelta(
            self.handle,
            self.number,
            kept,
            None if end is None else self._finish(*end, now),
            self._logprobs(meta, len(fresh), len(kept)),
            None if started is None else self._prompt_logprobs(meta),
            started,
        )

    # ------------------------------------------------------------------ tokens

    def _new_tokens(self, output_ids: Sequence[TokenId], meta: Mapping[str, Any]) -> list[TokenId]:
        """The tokens that are not known yet, by SGLang's own count of all.

        Chunks are deltas, and several may come as one. The count also holds if a release sends all
        tokens in each chunk, and shows if any are lost.
        """
        total = int(meta["completion_tokens"])
        new = total - self._taken
        if not 0 <= new <= len(output_ids):
            raise StepFailed(
                f"SGLang counts {total} tokens, {self._taken} have come and {len(output_ids)} are "
                "in this chunk"
            )
        self._taken = total
        return list(output_ids[len(output_ids) - new :])

    def _compare(self, tokens: Sequence[TokenId]) -> int:
        """Take replayed tokens off the front; returns how many. They must be those given."""
        count = min(len(tokens), len(self._to_replay))
        if list(tokens[:count]) != self._to_replay[:count]:
            raise StepFailed(
                "SGLang has not repeated the output so far, from which a grammar must continue"
            )
        self._to_replay = self._to_replay[count:]
        return count

    def _cut(
        self, tokens: list[TokenId]
    ) -> tuple[list[TokenId], tuple[FinishReason, int | None] | None]:
        """Tokens up to the first one that ends the choice, and how it does."""
        for index, token in enumerate(tokens):
            end = self._end_by(token, self.made + index + 1)
            if end is not None:
                return tokens[: index + 1], end
        return tokens, None

    def _end_by(self, token: TokenId, made: int) -> tuple[FinishReason, int | None] | None:
        """How a choice ends with its token number `made`, by pdserve's rules; None: it goes on."""
        sampling = self.request.sampling
        if made > sampling.min_tokens:
            if not sampling.ignore_eos and token in sampling.eos_token_ids:
                return "stop", None
            if token in sampling.stop_token_ids:
                return "stop", token
        return ("length", None) if made >= self._room else None

    def _end_of(self, reason: Mapping[str, Any]) -> tuple[FinishReason, int | None]:
        """How SGLang has ended it: at an end token that only its tokenizer knows, at the end of a
        grammar, or for lack of room."""
        if self._to_replay:
            raise StepFailed("SGLang has ended before it repeated the output so far")
        return ("length" if reason["type"] == "length" else "stop"), None

    # ------------------------------------------------------------------ records

    def _note(self, meta: Mapping[str, Any]) -> None:
        if self._first is None:
            # Counted again after a preemption, of which the first token's statistics know nothing.
            self.cached = min(int(meta.get("cached_tokens") or 0), len(self.request.prompt))
        self.preemptions = int(meta.get("num_retractions") or 0)

    def _start(self, now: Seconds) -> FirstTokenStats:
        """Note the first token. SGLang does not say when it began to compute."""
        self._first = now
        waited = now - self._submitted
        return FirstTokenStats(self.cached, 0.0, waited, waited)

    def _finish(self, reason: FinishReason, stop: int | None, now: Seconds) -> Finish:
        first = now if self._first is None else self._first
        return Finish(
            reason=reason,
            stop_reason=stop,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.made,
            cached_tokens=self.cached,
            preemptions=self.preemptions,
            prefill_seconds=max(0.0, first - self._submitted),
        )

    def _logprobs(
        self, meta: Mapping[str, Any], fresh: int, kept: int
    ) -> list[TokenLogprob] | None:
        """Of the `kept` first ones of the chunk's last `fresh` tokens."""
        sampling = self.request.sampling
        if sampling.logprobs is None:
            return None
        chosen = _last(meta["output_token_logprobs"], fresh)[:kept]
        others: Sequence[Any] = [()] * kept
        if sampling.logprob_token_ids:
            others = _last(meta["output_token_ids_logprobs"], fresh)
        elif sampling.logprobs:
            others = _last(meta["output_top_logprobs"], fresh)
        limit = len(sampling.logprob_token_ids) or sampling.logprobs
        return [_record(one, top, limit) for one, top in zip(chosen, others, strict=False)]

    def _prompt_logprobs(self, meta: Mapping[str, Any]) -> list[TokenLogprob] | None:
        """Of the prompt's tokens but the first; those of earlier output are left out."""
        limit = self.request.sampling.prompt_logprobs
        if limit is None:
            return None
        count = len(self.request.prompt)
        chosen = meta["input_token_logprobs"][1:count]
        others = meta["input_top_logprobs"][1:count] if limit else [()] * len(chosen)
        return [_record(one, top, limit) for one, top in zip(chosen, others, strict=False)]


def _last(items: Sequence[Any], count: int) -> Sequence[Any]:
    return items[len(items) - count :]


def _record(chosen: Sequence[Any], others: Sequence[Any] | None, limit: int) -> TokenLogprob:
    """`chosen` is SGLang's (logprob, token id, text), and `others` are such of the alternatives.

    Without the token among them its rank is at least one more than theirs.
    """
    logprob, token = float(chosen[0]), int(chosen[1])
    top = sorted(((int(id), float(value)) for value, id, *_ in others or ()), key=_by_logprob)
    ids = [id for id, _ in top]
    rank = ids.index(token) + 1 if token in ids else len(ids) + 1
    return TokenLogprob(token, logprob, rank, top[:limit])


def _by_logprob(pair: tuple[TokenId, float]) -> float:
    return -pair[1]


def _failure(reason: Mapping[str, Any]) -> PdserveError:
    """The error of a request that SGLang has given up, by the HTTP status that it names."""
    message = f"SGLang: {reason.get('message') or 'the request was aborted'}"
    status = reason.get("status_code")
    if status == _BAD_REQUEST:
        return InvalidRequest(message)
    if status == _UNAVAILABLE:
        return Overloaded(message, retry_after=1.0)
    return StepFailed(message)
