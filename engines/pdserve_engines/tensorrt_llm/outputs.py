"""Reads TensorRT-LLM's results: tokens, logprobs, how a request ended, and iteration statistics.

Objects of TensorRT-LLM come in as `Any`; only records of pdserve and plain values go out. A result
is one object that the engine changes in place, so everything is copied here, by position: some
releases leave the first token of a handed-over request out of `token_ids_diff`, others do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pdserve.messages.request import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Seconds, TokenId

__all__ = ["End", "PoolStats", "end_of", "new_logprobs", "new_tokens", "pool_stats"]

End = Literal["", "stop", "length", "cancelled", "timeout", "prefilled", "error"]
"""How a request to the engine ended; empty: it goes on."""

_ENDS: Mapping[str | None, End] = {
    None: "",
    "stop": "stop",
    "length": "length",
    "cancelled": "cancelled",
    "timeout": "timeout",
    "not_finished": "prefilled",
}
"""`CompletionOutput.finish_reason` -> how it ended. Anything else is an error."""


def new_tokens(output: Any, seen: int) -> list[TokenId]:
    """Copy the tokens after the first `seen` ones."""
    return [int(token) for token in output.token_ids[seen:]]


def new_logprobs(output: Any, seen: int, count: int, top: int) -> list[TokenLogprob]:
    """The logprobs of `count` tokens after the first `seen` ones, with `top` alternatives each.

    A request that was handed over may have none for its first token, so positions count from the
    end. A token whose entry is missing gets none, and the list ends there.
    """
    tokens = output.token_ids[seen : seen + count]
    entries = list(output.logprobs or [])
    start = max(seen - max(len(output.token_ids) - len(entries), 0), 0)
    entries = entries[start : start + count]
    return [_logprob(int(token), entry, top) for token, entry in zip(tokens, entries, strict=False)]


def _logprob(token: TokenId, entry: Any, top: int) -> TokenLogprob:
    """One position: `entry` maps token ids to objects with `logprob` and `rank`, or is a number."""
    if isinstance(entry, float):
        return TokenLogprob(token, entry, 1, [])
    ranked = sorted(
        ((int(other), float(found.logprob)) for other, found in entry.items()),
        key=lambda pair: -pair[1],
    )
    own = entry[token]
    above = sum(1 for _, logprob in ranked if logprob > own.logprob)
    return TokenLogprob(token, float(own.logprob), own.rank or above + 1, ranked[:top])


def end_of(output: Any, finished: bool) -> End:
    """How the request ended; empty: it goes on. A finished request without a known reason is an
    error, never a stop."""
    if not finished:
        return ""
    end = _ENDS.get(output.finish_reason, "error")
    return end or "error"


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What the engine says of itself after an iteration."""

    running: int = 0
    waiting: int = 0
    iterations: int = 0
    """Iterations since the engine began."""
    step_seconds: Seconds = 0.0
    """Seconds of this iteration."""
    blocks: int = 0
    free_blocks: int = 0
    used_blocks: int = 0
    tokens_per_block: int = 0


def pool_stats(data: Mapping[str, Any]) -> PoolStats:
    """Read one record of `get_stats_async`; fields that a release lacks are 0."""
    cache = data.get("kvCacheStats") or {}
    return PoolStats(
        running=int(data.get("numActiveRequests", 0)),
        waiting=int(data.get("numQueuedRequests", 0)),
        iterations=int(data.get("iter", 0)),
        step_seconds=float(data.get("iterLatencyMS", 0.0)) / 1000,
        blocks=int(cache.get("maxNumBlocks", 0)),
        free_blocks=int(cache.get("freeNumBlocks", 0)),
        used_blocks=int(cache.get("usedNumBlocks", 0)),
        tokens_per_block=int(cache.get("tokensPerBlock", 0)),
    )
