"""Measures how long large requests keep a frontend's event loop from its other streams.

    python -m bench.stalls [--rounds N] [--write bench/results/stalls.md]

A frontend with a router of its own has one core; worker, engine core and clients share the other.
While 16 clients stream paced tokens, one body after the other is sent. In the frontend a timer is
due every millisecond: a stall is the gap between two of its ticks, less the time in which the
loop's thread was runnable but another process had its core (`run_delay` of /proc/self/task's
schedstat). So time in which it waits for the interpreter's lock counts. The largest stall of each
body is one sample, the largest in as long without a body is the noise. Gaps between the chunks of
the other streams are measured at the clients. A status beside the size says what became of the
body: what is refused is read and decoded, but not served.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from bench.frontend import (
    FRONT,
    HERE,
    OTHER,
    child_processes,
    free_port,
    pinned,
    wait_ready,
    worker_flags,
    write_model,
)
from bench.machine import facts
from bench.pages import kept

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Callable, Iterator

RESULT: Final = HERE / "results" / "stalls.md"
BY_HAND: Final = "## What it means"
"""The text from this heading on is written by hand and kept in the result."""
TICK: Final = 0.001
STREAMS: Final = 16
RATE: Final = 50.0
"""Tokens per second of each stream."""
SIZES: Final = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": (16 << 20) - 4096}
CONTEXT: Final = 16 << 20
"""Tokens of the model's context: no text of these sizes is too long for it."""
QUIET: Final = 0.5
"""Seconds before each body, in which the noise is measured."""


# ---------------------------------------------------------------- inside the frontend


class Probe:
    """The largest stall of a loop since it was last asked. Runs in the measured process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        thread = threading.get_native_id()
        self._schedstat = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
        self._worst = 0.0
        self._last, self._delay = time.perf_counter(), self._run_delay()

    def start(self) -> None:
        """Measures the running loop; SIGUSR2 has it write what it found, and begin anew."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGUSR2, self._tell)
        self._loop.call_later(TICK, self._tick)

    def _run_delay(self) -> float:
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    def _tick(self) -> None:
        now, delay = time.perf_counter(), self._run_delay()
        stall = now - self._last - TICK - (delay - self._delay)
        self._worst = max(self._worst, stall)
        self._last, self._delay = now, delay
        self._loop.call_later(TICK, self._tick)

    def _tell(self) -> None:
        self._tick_now()
        text, self._worst = f"{self._worst:.6f}", 0.0
        part = self._file.with_suffix(".part")
        part.write_text(text)
        part.replace(self._file)

    def _tick_now(self) -> None:
        """Counts the gap that the signal has ended, too."""
        now, delay = time.perf_counter(), self._run_delay()
        self._worst = max(self._worst, now - self._last - TICK - (delay - self._delay))


def serve_with_probe(file: Path, arguments: list[str]) -> int:
    """Runs pdserve with a probe on its loop."""
    from pdserve.cli.main import main as pdserve
    from pdserve.observe.loop_lag import LoopLagMonitor

    usual = LoopLagMonitor.start

    def start(monitor: LoopLagMonitor) -> None:
        usual(monitor)
        Probe(file).start()

    setattr(LoopLagMonitor, "start", start)  # noqa: B010 - mypy knows no other way to replace it
    return pdserve(arguments)


# ---------------------------------------------------------------- bodies


def _words(size: int) -> str:
    """Prose without repetition, of about this many bytes."""
    draw = random.Random(size)
    letters = "etaoinshrdlucmfwypvbgk"
    made: list[str] = []
    length = 0
    while length < size:
        word = "".join(draw.choices(letters, k=draw.randrange(1, 11)))
        made.append(word)
        length += len(word) + 1
    return " ".join(made)[:size]


def _chat(messages: list[dict[str, str]], **more: Any) -> bytes:
    return json.dumps({"model": "bench", "messages": messages, "max_tokens": 1, **more}).encode()


def _one_message(size: int) -> bytes:
    return _chat([{"role": "user", "content": _words(size - 128)}])


def _many_messages(size: int) -> bytes:
    text = _words(int(size * 0.53))
    pieces = [text[at : at + 40] for at in range(0, len(text), 40)]
    return _chat([{"role": "user", "content": piece} for piece in pieces])


def _escapes(size: int) -> bytes:
    text = "".join(chr(0x4E00 + each % 4096) for each in range((size - 128) // 6))
    return _chat([{"role": "user", "content": text}])


def _token_ids(size: int) -> bytes:
    draw = random.Random(size)
    ids = [draw.randrange(1000, 10_000) for _ in range((size - 128) // 6)]
    return json.dumps({"model": "bench", "prompt": ids, "max_tokens": 1}).encode()


def _tools(size: int) -> bytes:
    properties = {f"field_{n}": {"type": "string", "enum": ["a", "b"]} for n in range(size // 64)}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": tool}]
    return _chat([{"role": "user", "content": "hello"}], tools=tools)


BODIES: Final[dict[str, tuple[str, Callable[[int], bytes]]]] = {
    "one message": ("/v1/chat/completions", _one_message),
    "messages of 40 characters": ("/v1/chat/completions", _many_messages),
    "CJK in JSON escapes": ("/v1/chat/completions", _escapes),
    "token ids": ("/v1/completions", _token_ids),
    "one tool with many parameters": ("/v1/chat/completions", _tools),
}


# ---------------------------------------------------------------- the cluster and the clients


@dataclass
class Frontend:
    """The measured process."""

    process: subprocess.Popen[str]
    port: int
    file: Path

    async def worst(self) -> float:
        """Seconds of the largest stall since the last call."""
        self.file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR2)
        until = time.monotonic() + 60.0
        while not self.file.exists():
            if time.monotonic() > until:
                raise TimeoutError("the probe does not answer")
            await asyncio.sleep(0.002)
        return float(self.file.read_text())


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Frontend]:
    """A frontend with a router on its core, and a worker on the other."""
    model = write_model(folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    seed, port, file = f"127.0.0.1:{free_port()}", free_port(), folder / "worst"
    front = ["--role=frontend", "--with-router", "--listen", seed, "--port", str(port)]
    worker = [sys.executable, "-m", "pdserve", "--role=worker", "--join", seed]
    worker += ["--tool-parser", "hermes"]
    with contextlib.ExitStack() as stack:
        probe = [sys.executable, "-m", "bench.stalls", "--probe", str(file), *front]
        process = stack.enter_context(pinned(probe, FRONT))
        other = stack.enter_context(pinned([*worker, *worker_flags(model, RATE)], OTHER))
        wait_ready(process, port)
        assert child_processes(other.pid), "the worker has an engine core"
        yield Frontend(process, port, file)


@dataclass
class Gaps:
    """The largest gap between two chunks of any stream since it was last asked."""

    worst: float = 0.0
    streams: list[asyncio.Task[None]] = field(default_factory=list)

    def take(self) -> float:
        worst, self.worst = self.worst, 0.0
        return worst


@contextlib.asynccontextmanager
async def streaming(http: aiohttp.ClientSession, url: str) -> AsyncIterator[Gaps]:
    """Clients that stream until the end."""
    gaps = Gaps()

    async def stream(number: int) -> None:
        body = json.loads(_chat([{"role": "user", "content": f"hello {number}"}]))
        body |= {"stream": True, "max_tokens": 1_000_000, "ignore_eos": True}
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            last = None
            async for _ in answer.content:
                now = time.perf_counter()
                if last is not None:
                    gaps.worst = max(gaps.worst, now - last)
                last = now

    gaps.streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
    try:
        await asyncio.sleep(1.0)
        yield gaps
        ended = [task for task in gaps.streams if task.done()]
        if ended:
            raise RuntimeError(f"{len(ended)} of {STREAMS} streams have ended: {ended[0]}")
    finally:
        for task in gaps.streams:
            task.cancel()
        await asyncio.gather(*gaps.streams, return_exceptions=True)


@dataclass
class Row:
    """What one body did, over the rounds; milliseconds."""

    stalls: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    size: int = 0
    statuses: set[int] = field(default_factory=set)


async def measure(front: Frontend, rounds: int) -> dict[tuple[str, str], Row]:
    """All bodies, one after the other, in each round."""
    rows: dict[tuple[str, str], Row] = {}
    url = f"http://127.0.0.1:{front.port}"
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
        streaming(http, url) as gaps,
    ):
        for _ in range(rounds):
            for label, size in SIZES.items():
                for name, (path, make) in BODIES.items():
                    body = await asyncio.to_thread(make, size)
                    row = rows.setdefault((name, label), Row())
                    await _sample(front, http, url + path, body, gaps, row)
    return rows


async def _sample(
    front: Frontend, http: aiohttp.ClientSession, url: str, body: bytes, gaps: Gaps, row: Row
) -> None:
    await front.worst()
    await asyncio.sleep(QUIET)
    row.noise.append(1e3 * await front.worst())
    gaps.take()
    began = time.perf_counter()
    headers = {"content-type": "application/json"}
    async with http.post(url, data=body, headers=headers) as answer:
        await answer.read()
        row.statuses.add(answer.status)
    row.took.append(1e3 * (time.perf_counter() - began))
    row.stalls.append(1e3 * await front.worst())
    row.gaps.append(1e3 * gaps.take())
    row.size = len(body)


# ---------------------------------------------------------------- the page


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def page(rows: dict[tuple[str, str], Row], rounds: int, load: float) -> str:
    """The result page."""
    lines = [
        "# Stalls of a frontend's loop",
        "",
        *(f"- {fact}" for fact in facts()),
        f"- Load of the machine at the start: {load:.1f}",
        f"- Command: `python -m bench.stalls --rounds {rounds}`; medians, lowest to highest",
        "",
        f"{STREAMS} streams of {RATE:.0f} tokens/s are served meanwhile. Milliseconds. *Stall*:",
        "the largest gap between two ticks of a timer of 1 ms in the frontend, less the time in",
        "which its thread was runnable and had no core. *Before*: the same in half a second",
        "without a body. *Gap*: the largest between two chunks of any stream, at the clients.",
        "",
        "| body | bytes | status | stall | before | gap of others | answer |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for (name, _), row in rows.items():
        statuses = ", ".join(map(str, sorted(row.statuses)))
        lines.append(
            f"| {name} | {row.size:,} | {statuses} | {_spread(row.stalls)} | "
            f"{_spread(row.noise)} | {_spread(row.gaps)} | {_spread(row.took)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measures, prints and writes the page."""
    if sys.argv[1:2] == ["--probe"]:
        return serve_with_probe(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    os.sched_setaffinity(0, {OTHER})
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as front:
        rows = asyncio.run(measure(front, options.rounds))
    text = page(rows, options.rounds, load)
    print(text)
    if options.write:
        options.write.write_text(text + kept(options.write, BY_HAND))
    return 0


if __name__ == "__main__":
    sys.exit(main())
