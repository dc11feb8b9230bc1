"""Measures what traces cost a frontend per request: recorded, decided, built and remembered.

    python bench/micro/phases.py [--frontend US]

One request is driven through the code that records it: its arrival, one routing decision, one
attempt with 16 tokens, and its end. Around that code is as little as possible. The arms take turns
within a round; a figure is the median over rounds of an arm's CPU time per request less that of
the arm without traces in the same round. `frontend.md` has the CPU time of a whole request, which
the shares are of. Writes bench/results/phases.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from multidict import CIMultiDict

from bench.machine import facts
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.dispatch.dispatched_request import DispatchedRequest
from pdserve.frontend.dispatch.router_client import RouterBooking
from pdserve.frontend.http.http_request import HttpRequest
from pdserve.frontend.placement import PromptStats
from pdserve.frontend.request_traces import RequestTraces
from pdserve.frontend.routing_hints import NO_HINTS
from pdserve.ids import NodeId
from pdserve.messages.request import (
    Finish,
    FirstTokenStats,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    WorkerPhase,
)
from pdserve.messages.routing import RouteDecision
from pdserve.observe.metrics import Metrics
from pdserve.observe.slo import SloTable
from pdserve.token_ids import token_ids
from pdserve.tracing.export.delivery import SpanQueue
from pdserve.tracing.ring import TraceRing
from pdserve.tracing.rules import TraceRules
from pdserve.tracing.sink import NO_SINK
from pdserve.tracing.tracer import Tracer

if TYPE_CHECKING:
    from pdserve.messages.trace import Trace
    from pdserve.tracing.sink import TraceSink

REQUESTS = 1000
ROUNDS = 15
TOKENS = 16
FRONTEND = 233.0
"""Microseconds of CPU of a cluster's frontend for the smallest request (64 connections, answers of
one token), in bench/results/frontend.md."""
AIMS = {"off": "at most 0.5 us", "1 % and what happened": "at most 2 %", "all kept": "at most 10 %"}
RESULT = Path(__file__).parent.parent / "results" / "phases.md"

now = time.monotonic
CONFIG = FrontendConfig()
REQUEST = GenerateRequest(
    request_id="cmpl-0123456789abcdef",
    model="m",
    prompt=token_ids([1] * 32),
    sampling=SamplingParams(max_tokens=TOKENS),
)
PARTS = tuple(WorkerPhase("chunk", 0.0001 * n, 0.0001 * (n + 1), 16) for n in range(2))
STARTED = FirstTokenStats(16, 0.0, 0.0005, 0.0005)
DELTAS = [
    TokenDelta(7, 0, [5], started=STARTED),
    *[TokenDelta(7, 0, [5])] * (TOKENS - 2),
    TokenDelta(7, 0, [5], Finish(reason="stop", prompt_tokens=32, completion_tokens=TOKENS)),
]
HTTP = SimpleNamespace(
    method="POST",
    headers=CIMultiDict({"Host": "127.0.0.1:8000", "Content-Type": "application/json"}),
    rel_url=SimpleNamespace(path="/v1/chat/completions"),
)


class Sink:
    """The cheapest possible sink."""

    def on_delta(self, delta: TokenDelta) -> None: ...

    def on_error(self, error: BaseException) -> None: ...


class Context:
    """A cluster that answers at once: the part of `DispatchContext` that such a request needs, and
    of its members, routers and workers."""

    config = CONFIG
    trials = None
    decision = RouteDecision(NodeId("w1"), 1, 1, "ttft", 1, 0.01)
    sequence = SimpleNamespace(choices=1)

    def __init__(self) -> None:
        self.members = self.routers = self.workers = self
        self.booked: dict[int, object] = {}

    def now(self) -> float:
        return now()

    def block_size(self, model: str) -> int:
        return 16

    def standing(self, life: object) -> str:
        return "here"

    def epoch_of(self, node: NodeId) -> int:
        return 1

    def release(self, router: NodeId, booking: int, outcome: str) -> None:
        self.booked.pop(booking, None)

    async def route(self, question: object, patience: object) -> RouterBooking:
        return RouterBooking(cast("Any", self), NodeId("r1"), self.decision)

    async def stream(self, life: object) -> Context:
        return self

    async def open(self, *args: object, **options: object) -> Any:
        return self.sequence


class Collected:
    """Where an exporter's traces wait; emptied when it is full."""

    def __init__(self) -> None:
        self.queue = SpanQueue()

    def add(self, trace: Trace) -> None:
        if not self.queue.add(trace):
            while self.queue.take() is not None:
                pass


@dataclass
class Arm:
    """One way to trace, or none."""

    name: str
    traces: RequestTraces | None
    parts: bool = False
    """The worker tells of its phases."""


NO_SLO = SloTable()


def traces(
    rules: TraceRules, sink: TraceSink = NO_SINK, objectives: SloTable = NO_SLO
) -> RequestTraces:
    metrics = Metrics()
    tracer = Tracer(
        rules,
        sink,
        time=now,
        random=Random(1),
        wall=time.time_ns,
        on_kept=lambda reason: metrics.traces_kept.labels(reason).inc(),
    )
    return RequestTraces(tracer, objectives, lambda work: work())


OBJECTIVES = SloTable({"": 10.0}, {"": 10.0})
ALL = TraceRules(sample=1.0, rate=1e9)


def arms() -> list[Arm]:
    return [
        Arm("without", None),
        Arm("off", traces(TraceRules(rate=0.0))),
        Arm("1 % and what happened", traces(TraceRules())),
        Arm("the same with objectives", traces(TraceRules(), objectives=OBJECTIVES)),
        Arm("all kept", traces(ALL)),
        Arm("all kept and remembered", traces(ALL, TraceRing())),
        Arm("all kept and queued for export", traces(ALL, Collected())),
        Arm("all kept, with two chunks of the worker", traces(ALL), parts=True),
    ]


def answered(active: Any, began: float) -> None:
    """The answer that a request has at its end, as far as traces read it."""
    choice = SimpleNamespace(
        first=began,
        last=began + 0.01,
        completion_tokens=TOKENS,
        reasoning_tokens=0,
        done=True,
        finish_reason="stop",
    )
    active.answer = SimpleNamespace(
        first_token=began,
        arrival=began,
        stop_string=None,
        client_slow=None,
        choices=[choice],
        sinks=[SimpleNamespace(course=PromptStats(cached_tokens=16))],
        prompt_tokens=32,
        completion_tokens=TOKENS,
    )
    active.plan = SimpleNamespace(
        model_name="m",
        vectors=None,
        scores=None,
        chat=True,
        stream=True,
        requests=[REQUEST],
        n=1,
        answer_id="chatcmpl-0123456789abcdef",
        reasons=False,
        model=SimpleNamespace(card=SimpleNamespace(name="m")),
    )


def one(arm: Arm, ways: Context, deltas: list[TokenDelta], active: Any) -> None:
    """One request, as the frontend's files treat it."""
    call = HttpRequest(cast("Any", HTTP), b"")
    call.route = "/v1/chat/completions"
    call.request_id = REQUEST.request_id
    if arm.traces is not None:
        arm.traces.begin(call)
    phases = call.phases
    prompt = None
    if phases is not None:
        phases.body_read = now()
    if phases is not None:
        phases.planning = now()
    if arm.traces is not None and phases is not None:
        arm.traces.tracer.watch(phases, "m")
    if phases is not None:
        phases.planned, phases.prompt_tokens = now(), 32
        prompt = phases.add_prompt()
    dispatched = DispatchedRequest(
        cast("Any", ways), REQUEST, Sink(), NO_HINTS, lambda placement: None, prompt
    )
    with contextlib.suppress(StopIteration):
        dispatched.dispatch().send(None)
    attempt = dispatched.attempt
    assert attempt is not None
    for delta in deltas:
        attempt.on_delta(delta)
    if arm.traces is not None and phases is not None:
        arm.traces.note(phases, active)
    if call.phases is not None:
        cast("RequestTraces", arm.traces).end(call, 200)


def measure(arm: Arm) -> float:
    """Microseconds of CPU per request."""
    ways, active = Context(), SimpleNamespace(error=None, model="m", hints=NO_HINTS)
    answered(active, now())
    deltas = DELTAS
    if arm.parts:
        first = TokenDelta(
            7, 0, [5], started=FirstTokenStats(16, 0.0, 0.0005, 0.0005, phases=PARTS)
        )
        deltas = [first, *DELTAS[1:]]
    gc.collect()
    start = time.process_time_ns()
    for _ in range(REQUESTS):
        one(arm, ways, deltas, active)
    return (time.process_time_ns() - start) / REQUESTS / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--frontend",
        type=float,
        default=FRONTEND,
        help="microseconds of CPU of a frontend's smallest request on this machine now",
    )
    frontend: float = parser.parse_args().frontend
    measured = arms()
    times: dict[str, list[float]] = {arm.name: [] for arm in measured}
    for _ in range(ROUNDS):
        for arm in measured:
            times[arm.name].append(measure(arm))
    base = times.pop("without")
    rows = []
    for name, found in times.items():
        costs = sorted(each - usual for each, usual in zip(found, base, strict=True))
        cost = statistics.median(costs)
        low, high = costs[len(costs) // 4], costs[-1 - len(costs) // 4]
        share = 100 * cost / frontend
        aim = AIMS.get(name, "")
        rows.append(f"| {name} | {cost:.2f} | {low:.2f} to {high:.2f} | {share:.1f} % | {aim} |")
    lines = [
        "# What traces cost a frontend",
        "",
        f"`bench/micro/phases.py`: microseconds of CPU per request of {TOKENS} tokens, medians of "
        f"{ROUNDS} rounds of {REQUESTS} requests, arms in turn. A trace has 7 spans.",
        "",
        *(f"- {fact}" for fact in facts()),
        f"- Load average: {os.getloadavg()[0]:.0f}; other work makes all times longer",
        "",
        "| traces | us per request | half of the rounds | of a small request | aim |",
        "|---|---:|---:|---:|---|",
        *rows,
        "",
        f"The shares are of {frontend:.0f} us, what a cluster's frontend needs for the smallest "
        "request. Give the figure of the same machine and hour with `--frontend`: "
        "`bench/frontend.py` measures it.",
    ]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
