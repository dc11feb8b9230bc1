"""Measures what `DispatchedRequest` costs per token, between a worker's stream and the answer.

    python bench/micro/dispatched_request.py

Each token passes through it and is kept until the request ends. The result has the nanoseconds per
delta of one token, beside those of handing the delta to its sink directly, in the same rounds; and
the bytes kept per token. Writes bench/results/dispatched_request.md.
"""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bench.machine import facts
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.dispatch.assignment import Assignment
from pdserve.frontend.dispatch.dispatched_request import DispatchedRequest
from pdserve.frontend.routing_hints import NO_HINTS
from pdserve.ids import NodeId
from pdserve.messages.request import GenerateRequest, SamplingParams, TokenDelta
from pdserve.messages.routing import RouteDecision
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 20_000
ROUNDS = 9
RESULT = Path(__file__).parent.parent / "results" / "dispatched_request.md"


class Sink:
    """The cheapest possible sink."""

    def on_delta(self, delta: TokenDelta) -> None: ...

    def on_error(self, error: BaseException) -> None: ...


class Context:
    """The part of `dispatched_request.DispatchContext` that an undisturbed request needs."""

    config = FrontendConfig()
    members = trials = None

    def now(self) -> float:
        return 0.0


def attempt() -> Assignment:
    """Makes an attempt at a worker that has sent its first token."""
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([1]),
        sampling=SamplingParams(max_tokens=2 * TOKENS),
    )
    dispatched = DispatchedRequest(
        cast("Any", Context()), request, Sink(), NO_HINTS, lambda placement: None
    )
    made = Assignment(dispatched, Sink(), dispatched.received, RouteDecision(NodeId("w"), 1, 1))
    made.begun = made.plain = True
    dispatched.attempt = made
    return made


def timed(take: Callable[[TokenDelta], None], deltas: list[TokenDelta]) -> float:
    """Nanoseconds per delta."""
    start = time.perf_counter()
    for delta in deltas:
        take(delta)
    return (time.perf_counter() - start) / len(deltas) * 1e9


def main() -> None:
    deltas = [TokenDelta(7, 0, [1000 + n]) for n in range(TOKENS)]
    straight, through = [], []
    for _ in range(ROUNDS):
        straight.append(timed(Sink().on_delta, deltas))
        through.append(timed(attempt().on_delta, deltas))
    tracemalloc.start()
    kept = attempt()
    before = tracemalloc.get_traced_memory()[0]
    for n in range(TOKENS):
        kept.on_delta(TokenDelta(7, 0, [1000 + n]))
    size = (tracemalloc.get_traced_memory()[0] - before) / TOKENS
    tracemalloc.stop()
    lines = [
        "# A dispatched request in the path of tokens",
        "",
        "`bench/micro/dispatched_request.py`: nanoseconds per delta of one token, the best of "
        f"{ROUNDS} rounds of {TOKENS}.",
        "",
        *(f"- {fact}" for fact in facts()),
        "",
        "| | ns per delta |",
        "|---|---|",
        f"| straight to the sink | {min(straight):.0f} |",
        f"| kept on the way | {min(through):.0f} |",
        f"| cost | {min(through) - min(straight):.0f} |",
        "",
        f"Bytes kept per token: {size:.1f}.",
    ]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
