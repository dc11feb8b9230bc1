"""Measures the export of traces: its cost, and a collector that is gone for an hour.

    python bench/micro/trace_export.py

An hour at the default limit is 180,000 traces (`--trace-rate 50`), each of 7 spans with ids of its
own. They are added as fast as they can be made, and the exporter's clock runs as much faster, so a
batch is given up after as many traces as in a real hour. Each kind of collector has a process of
its own, since memory that was once taken does not show again. Aims: 8 MiB of memory, and 0.5 ms for
a turn of the event loop that encodes. Writes bench/results/trace_export.md.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from bench.machine import facts
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.tracing.export import delivery, exporter
from pdserve.tracing.export.collector_http import HttpCollector
from pdserve.tracing.export.otel_env import OtelSettings
from pdserve.tracing.export.otlp import RequestFrame, encode_span
from pdserve.tracing.ring import TraceRing
from pdserve.tracing.sink import TraceSinks
from tests.support.traces import make_trace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.messages.trace import Trace

RESULT: Final = Path(__file__).parent.parent / "results" / "trace_export.md"
RATE: Final = 50
HOUR: Final = 3600
SPANS: Final = len(make_trace().spans)
FASTER: Final = 120
"""How much faster than real time the hour passes."""
AIM_BYTES: Final = 8 << 20
AIM_MS: Final = 0.5
FRAME: Final = RequestFrame({"service.name": "pdserve", "service.instance.id": "frontend-1"})
KINDS: Final = ("refuses", "hangs", "answers 503")


def timed(work: Callable[[], object], times: int) -> float:
    """Microseconds of CPU time for one of `times`, the best of several rounds."""
    rounds = []
    for _ in range(7):
        began = time.process_time()
        for _ in range(times):
            work()
        rounds.append((time.process_time() - began) / times)
    return min(rounds) * 1e6


def costs() -> dict[str, float]:
    """Microseconds by what is done."""
    trace = make_trace()
    ring, queue = TraceRing(), delivery.SpanQueue(spans=10**9, limit=10**12)
    traces = [make_trace(f"r{n}") for n in range(exporter.SLICE_SPANS // SPANS + 1)]

    def turn() -> None:
        body = FRAME.body(gzip=True)
        for one in traces:
            for span in one.spans:
                if body.spans < exporter.SLICE_SPANS:
                    body.add(encode_span(one, span))

    return {
        f"remember a trace of {SPANS} spans": timed(lambda: ring.add(trace), 2000),
        "queue it for the export": timed(lambda: queue.add(trace), 2000),
        "encode one span": timed(lambda: encode_span(trace, trace.spans[3]), 5000),
        "encode and pack 64 spans, which is one turn of the loop": timed(turn, 100),
    }


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def gone(kind: str) -> dict[str, float]:
    """An hour in which the collector is no use; what it took, and what became of the spans."""
    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(_server(kind), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if kind == "refuses":
        server.close()
    _hurry()
    metrics = Metrics()
    ring = TraceRing()
    export = exporter.TraceExporter(
        HttpCollector(f"http://127.0.0.1:{port}/v1/traces", OtelSettings()),
        FRAME,
        metrics,
        Degradations(metrics),
        where="the collector",
        timeout=10.0 / FASTER,
    )
    export.start()
    sinks = TraceSinks(ring, export)
    number = await _add(sinks, 0, RATE)  # what the first use of all parts takes is no growth
    await asyncio.sleep(0.2)
    gc.collect()
    before = most = resident()
    began = loop.time()
    while number < RATE * HOUR:
        until = loop.time() + 0.01
        number = await _add(sinks, number, RATE * FASTER // 100)
        most = max(most, resident())
        await asyncio.sleep(max(0.0, until - loop.time()))
    took = loop.time() - began
    waiting = export.waiting
    await export.close()
    server.close()
    dropped = sum(counter.value for _, counter in metrics.trace_spans_dropped)
    assert dropped == number * SPANS, "each span is counted"
    return {
        "MiB more at most": (most - before) / (1 << 20),
        "spans that waited at the end": waiting,
        "spans dropped and counted": dropped,
        "seconds": took,
    }


async def _add(sinks: TraceSinks, number: int, more: int) -> int:
    """Add traces as a frontend does: one per turn of the loop."""
    for each in range(number, number + more):
        sinks.add(_trace(each))
        await asyncio.sleep(0)
    return number + more


def _trace(number: int) -> Trace:
    return make_trace(f"req-{number:024x}", model="organisation/Model-8B-Instruct")


def _server(
    kind: str,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1 << 16):
                if kind == "answers 503":
                    writer.write(b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n")
        except ConnectionError:
            pass
        finally:
            writer.close()

    return serve


def _hurry() -> None:
    """Let the exporter's time pass faster."""
    for module, names in (
        (exporter, ("_LINGER", "_SAY_EVERY", "_LONGEST_WAIT", "RETRY_FOR", "_SHORTEST_TRY")),
        (delivery, ("_FIRST_PAUSE", "_LONGEST_PAUSE", "RETRY_FOR")),
    ):
        for name in names:
            setattr(module, name, getattr(module, name) / FASTER)


def measure() -> dict[str, dict[str, float]]:
    """Each kind of collector in a process of its own."""
    found = {}
    for kind in KINDS:
        done = subprocess.run(
            [sys.executable, __file__, kind], capture_output=True, text=True, check=True
        )
        found[kind] = msgspec.json.decode(done.stdout, type=dict[str, float])
    return found


def report(parts: dict[str, float], hours: dict[str, dict[str, float]]) -> str:
    """Returns the result file."""
    names = list(next(iter(hours.values())))
    worst = max(hour["MiB more at most"] for hour in hours.values())
    slice_ms = parts["encode and pack 64 spans, which is one turn of the loop"] / 1000
    return "\n".join(
        [
            "# Export of traces",
            "",
            "Cost in CPU time, best of 7 rounds; and the memory of a process whose collector is",
            f"gone for an hour while {RATE} traces of {SPANS} spans per second are kept, which is",
            f"the default's limit. The hour passes {FASTER} times faster. Repeat with",
            "`python bench/micro/trace_export.py`.",
            "",
            *[f"- {fact}" for fact in facts()],
            "",
            "| what | µs |",
            "|---|---:|",
            *[f"| {name} | {took:.1f} |" for name, took in parts.items()],
            "",
            "| the collector | " + " | ".join(names) + " |",
            "|---|" + "---:|" * len(names),
            *[
                f"| {kind} | " + " | ".join(f"{hour[name]:,.1f}" for name in names) + " |"
                for kind, hour in hours.items()
            ],
            "",
            f"Aims: {AIM_BYTES >> 20} MiB ({_judged(worst <= AIM_BYTES / (1 << 20))}: {worst:.1f}),"
            f" {AIM_MS} ms for a turn that encodes ({_judged(slice_ms <= AIM_MS)}:"
            f" {slice_ms:.2f}).",
            "",
        ]
    )


def _judged(kept: bool) -> str:
    return "kept" if kept else "missed"


if __name__ == "__main__":
    logging.getLogger("pdserve").setLevel(logging.ERROR)
    if len(sys.argv) > 1:
        print(msgspec.json.encode(asyncio.run(gone(sys.argv[1]))).decode())
    else:
        text = report(costs(), measure())
        RESULT.write_text(text)
        print(text)
