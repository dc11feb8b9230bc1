"""Measures how many tokens pass the engine port per second and core, with the instant engine.

    python bench/micro/engine_port.py

The client's side shares its core with a frontend; the core's side must never be the bottleneck. The
limits are measured in the same rounds over the same bytes: decoding the frames to records, and
moving the bytes through a socket pair. Times are CPU seconds of each side, so that a busy machine
matters less. Writes bench/results/engine_port.md.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from bench.machine import facts
from pdserve.clock import SystemClock
from pdserve.engine.client import CoreClient, _InFlight
from pdserve.engine.core_connection import CoreConnection
from pdserve.engine.launcher import ProcessLauncher
from pdserve.messages.engine import EngineSpec, Event, Submit
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve.wire.length_prefixed import encode_frames
from pdserve_engines.instant import InstantCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.errors import PdserveError
    from pdserve.messages.request import TokenDelta

STREAMS = 256
TOKENS = 1000
ROUNDS = 5
RESULT = Path(__file__).parent.parent / "results" / "engine_port.md"


class Counter:
    """The cheapest possible sink."""

    def __init__(self) -> None:
        self.tokens = 0

    def on_delta(self, delta: TokenDelta) -> None:
        self.tokens += len(delta.tokens)

    def on_error(self, error: PdserveError) -> None:
        raise error


def request(tokens: int = TOKENS) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([1, 2, 3]),
        sampling=SamplingParams(max_tokens=tokens),
    )


def model(directory: str) -> EngineSpec:
    """The two files that the instant engine reads."""
    config = {"vocab_size": 100_000, "max_position_embeddings": 1 << 20}
    Path(directory, "config.json").write_text(json.dumps(config))
    words = {f"word{chr(97 + n % 26)}{chr(97 + n // 26)}": 50_000 + n for n in range(64)}
    Path(directory, "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    return EngineSpec(engine="instant", model=directory)


def make_frames(spec: EngineSpec) -> list[bytes]:
    """Makes every frame of one run, as the host would send them."""
    core, encode = InstantCore(SystemClock()), msgspec.msgpack.Encoder().encode
    core.load(spec, lambda progress: None)
    for handle in range(1, STREAMS + 1):
        core.handle(Submit(handle=handle, request=request()))
    frames = []
    while core.has_work:
        frames.append(encode_frames(map(encode, core.step())))
    return frames


def fan_out(frames: list[bytes], spec: EngineSpec) -> None:
    """Runs the client's work on received bytes."""
    loop = asyncio.new_event_loop()
    client = CoreClient(spec)
    for handle in range(1, STREAMS + 1):
        client._in_flight[handle] = _InFlight(Counter(), 1)
    connection = CoreConnection(loop, client._on_event)
    for frame in frames:
        connection.data_received(frame)
    assert not client._in_flight
    loop.close()


def decode(frames: list[bytes]) -> None:
    """A limit: decodes the records and does nothing with them."""
    decoder = msgspec.msgpack.Decoder(Event)
    for frame in frames:
        decoder.decode(frame[4 : 4 + int.from_bytes(frame[:4], "big")])


def move(frames: list[bytes]) -> None:
    """A limit: moves the bytes through a socket pair and back into Python."""
    one, other = socket.socketpair()
    with one, other:
        for frame in frames:
            one.sendall(frame)
            other.recv(1 << 20)


def cpu_seconds(work: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Each row's best round; the rounds take all rows in turn."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(ROUNDS):
        for name, run in work.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    return best


async def whole(spec: EngineSpec) -> tuple[float, float, float]:
    """Seconds of one run over a real child process: elapsed, CPU here, CPU of the core."""
    launchers: list[ProcessLauncher] = []

    def launcher() -> ProcessLauncher:
        launchers.append(ProcessLauncher())
        return launchers[-1]

    client = CoreClient(spec, make_launcher=launcher)
    await client.start()
    sinks = [Counter() for _ in range(STREAMS)]
    child = launchers[0].pid or 0
    before, ours, start = _child_cpu(child), time.process_time(), time.perf_counter()
    for sink in sinks:
        client.submit(request(), sink)
    await client.drain(120)
    elapsed, ours = time.perf_counter() - start, time.process_time() - ours
    theirs = _child_cpu(child) - before
    await client.stop()
    assert sum(sink.tokens for sink in sinks) == STREAMS * TOKENS
    return elapsed, ours, theirs


def _child_cpu(pid: int) -> float:
    """User and system seconds of a process, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def report(spec: EngineSpec) -> str:
    """The result file's text."""
    frames = make_frames(spec)
    total = STREAMS * TOKENS
    best = cpu_seconds(
        {
            "limit: bytes through a socket pair": lambda: move(frames),
            "limit: frames to records": lambda: decode(frames),
            "client: frames to sinks": lambda: fan_out(frames, spec),
            "core: instant engine, encoded and framed": lambda: make_frames(spec),
        }
    )
    runs = [uvloop.run(whole(spec)) for _ in range(ROUNDS)]
    best["end to end, the client's process"] = min(run[1] for run in runs)
    best["end to end, the core's process"] = min(run[2] for run in runs)
    best["end to end, elapsed"] = min(run[0] for run in runs)
    return "\n".join(
        [
            "# The engine port",
            "",
            f"{STREAMS} streams of {TOKENS:,} tokens, one token per delta; best of {ROUNDS}.",
            "Repeat with `python bench/micro/engine_port.py`.",
            "",
            *(f"- {fact}" for fact in facts()),
            f"- {sum(map(len, frames)) / total:.1f} bytes per token on the socket",
            "",
            "| what | us per token | tokens per second and core |",
            "|---|---:|---:|",
            *(f"| {name} | {s / total * 1e6:.2f} | {total / s:,.0f} |" for name, s in best.items()),
            "",
        ]
    )


def main() -> None:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as directory:
        text = report(model(directory))
    print(text)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
