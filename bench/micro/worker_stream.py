"""CPU of a stream between a frontend and a worker: over links, and within one process.

    taskset -c 1 python -m bench.micro.worker_stream [--rounds N]

Both nodes are on a network in memory, as in an all-in-one, with an engine that answers at once. The
two ways take turns within a round; figures are medians over rounds with the least and the most,
ratios medians of each round's ratio. Counted are both ends, from the call that opens a request to
the sink that gets its tokens; not HTTP, text, routing and the engine process.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import TYPE_CHECKING

import uvloop

from pdserve.frontend.dispatch.worker_stream import WorkerStream
from pdserve.ids import NodeId
from pdserve.messages.request import Finish, GenerateRequest, SamplingParams, TokenDelta
from pdserve.token_ids import token_ids
from pdserve.worker.request_streams import RequestStreams
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from pdserve.engine.port import TokenSink
    from pdserve.errors import PdserveError

REQUEST = GenerateRequest(
    request_id="bench",
    model="bench",
    prompt=token_ids(range(40)),
    sampling=SamplingParams(max_tokens=64),
)
LOADS = (
    ("one token", 1, 1, 400),
    ("64 tokens, alone", 1, 64, 20),
    ("64 tokens, 64 at a time", 64, 64, 2),
)
"""Name, requests at a time, tokens of each, times."""


class InstantEngine:
    """Gives every request its next token in the same turn, as a step does."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tokens: int) -> None:
        self._loop = loop
        self._tokens = tokens
        self._running: dict[int, tuple[TokenSink, int]] = {}
        self._number = 0

    def submit(self, request: GenerateRequest, sink: TokenSink) -> int:
        self._number += 1
        if not self._running:
            self._loop.call_soon(self._step)
        self._running[self._number] = (sink, self._tokens)
        return self._number

    def abort(self, handle: int) -> None:
        self._running.pop(handle, None)

    def _step(self) -> None:
        for handle, (sink, left) in tuple(self._running.items()):
            finish = Finish(reason="length") if left == 1 else None
            if finish is None:
                self._running[handle] = (sink, left - 1)
            else:
                del self._running[handle]
            sink.on_delta(TokenDelta(handle, 0, [1234], finish))
        if self._running:
            self._loop.call_soon(self._step)


class Sink:
    """Waits for the end of one request."""

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()

    def on_delta(self, delta: TokenDelta) -> None:
        if delta.finish is not None:
            self.ended.set_result(None)

    def on_error(self, error: PdserveError) -> None:
        self.ended.set_exception(error)


async def one(stream: WorkerStream) -> None:
    """One request, to its last token."""
    sink = Sink()
    await stream.open(REQUEST, 0, sink, lambda outcome: None, timeout=30.0)
    await sink.ended


async def measure(stream: WorkerStream, at_once: int, times: int) -> float:
    """CPU seconds of one request."""
    before = time.process_time()
    for _ in range(times):
        if at_once == 1:
            await one(stream)
        else:
            await asyncio.gather(*(one(stream) for _ in range(at_once)))
    return (time.process_time() - before) / (at_once * times)


async def compare(rounds: int) -> None:
    loop = asyncio.get_running_loop()
    print("| load | over a link, us | within the process, us | ratio |\n|---|---:|---:|---:|")
    for name, at_once, tokens, times in LOADS:
        async with cluster(together=True) as nodes:
            a, b = await nodes.add("a"), await nodes.add("b")
            await nodes.until(nodes.converged)
            b.host(RequestStreams(InstantEngine(loop, tokens)))
            local = a.local_link(NodeId("b"))
            assert local is not None
            links = (await a.link(NodeId("b"), timeout=5.0), local)
            streams = [WorkerStream(link, a.timers) for link in links]
            found: list[list[float]] = [[], []]
            for number in range(-2, rounds):
                for which in (0, 1) if number % 2 else (1, 0):
                    seconds = await measure(streams[which], at_once, times)
                    if number >= 0:
                        found[which].append(seconds / tokens * 1e6)
        print(row(f"{name}: one {'request' if tokens == 1 else 'token'}", *found))


def row(name: str, link: list[float], local: list[float]) -> str:
    """A line of the table."""
    ratios = [b / a for a, b in zip(link, local, strict=True)]
    cells = [
        f"{statistics.median(v):.2f} ({min(v):.2f}, {max(v):.2f})" for v in (link, local, ratios)
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    uvloop.run(compare(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
