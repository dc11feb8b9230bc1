"""CPU of putting answers together: a streamed chunk, and an answer that is not streamed.

    taskset -c 1 python -m bench.micro.answer_assembly

Times are the best of 20 rounds: what a native function could save at most. `bench/frontend.py` says
what a token and a request take in all.
"""

from __future__ import annotations

import asyncio
import gc
import time
import timeit
from typing import TYPE_CHECKING, Any

from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.output.full_response import FullResponseBuilder
from pdserve.frontend.output.response_memory import ResponseMemory
from pdserve.frontend.output.streaming_response import FastTextChoice, StreamingResponseBuilder
from pdserve.frontend.plan import Prompt, RequestPlan
from pdserve.messages.request import Finish, GenerateRequest, SamplingParams, TokenDelta
from pdserve.observe.metrics import Metrics
from pdserve.token_ids import token_ids
from tests.frontend.http.test_sse_response import Connection, wire
from tests.frontend.support import card, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.observe.metrics import ModelMetrics

CALLS, ROUNDS, TOGETHER = 1000, 20, 64
TOKEN = TokenDelta(0, 0, tokens("a"))


def best(function: Callable[[], object], per: int = 1) -> str:
    """Microseconds of one call, or of a part of one."""
    rounds = timeit.repeat(function, number=CALLS, repeat=ROUNDS, timer=time.thread_time)
    return f"{min(rounds) / CALLS / per * 1e6:.2f}"


def plan(*, stream: bool) -> RequestPlan:
    prompt, sampling = token_ids([5]), SamplingParams(max_tokens=9)
    return RequestPlan(
        chat=True,
        model=PreparedModel.from_card(card()),
        model_name="tiny",
        answer_id="chatcmpl-r",
        created=1,
        prompts=[Prompt(prompt)],
        requests=[GenerateRequest(request_id="r", model="tiny", prompt=prompt, sampling=sampling)],
        n=1,
        stream=stream,
    )


def chunks(metrics: ModelMetrics) -> None:
    """A chunk of plain text: the whole way from the delta, and its assembly."""
    connection: Any = Connection()  # type: ignore[no-untyped-call]
    connection.write = lambda data: None
    stream = wire(connection, limit=1000)  # type: ignore[no-untyped-call]
    answer = StreamingResponseBuilder(plan(stream=True), metrics, 0.0, time.monotonic, stream)
    sink, choice = answer.sinks[0], answer.choices[0]
    assert isinstance(choice, FastTextChoice)
    sink.on_delta(TOKEN)
    form = choice._form

    def whole() -> None:
        sink.on_delta(TOKEN)
        stream.flush()

    def assembly(count: int) -> None:
        for _ in range(count):
            stream.write_parts(form.head, b"a", form.tail)
        stream.flush()

    print(f"a chunk, from delta to bytes: {best(whole)} us")
    print(f"  its assembly, alone in a turn: {best(lambda: assembly(1))} us")
    print(f"  one of {TOGETHER} in a turn: {best(lambda: assembly(TOGETHER), TOGETHER)} us")


def answers(metrics: ModelMetrics) -> None:
    """The body of an answer of one token."""
    memory = ResponseMemory(1 << 30, 1 << 30)
    answer = FullResponseBuilder(plan(stream=False), metrics, 0.0, time.monotonic, memory)
    answer.sinks[0].on_delta(TokenDelta(0, 0, TOKEN.tokens, Finish(reason="length")))
    print(f"an answer's body, {len(answer.body())} bytes: {best(answer.body)} us")


async def main() -> None:
    gc.disable()
    metrics = Metrics().of_model("tiny")
    chunks(metrics)
    answers(metrics)


if __name__ == "__main__":
    asyncio.run(main())
