"""pdserve beside NVIDIA Dynamo (frontend and mocker): requests/s, chunks/s, TTFT, memory, start-up.

    python -m bench.peers.dynamo --dynamo PYTHON [--rounds N] [--seconds S] [--write FILE]

PYTHON is the interpreter of an environment that has Dynamo:

    pip install --no-deps ai-dynamo ai-dynamo-runtime
    pip install uvloop 'pydantic<=2.13.5' 'aiohttp<4' msgspec 'prometheus-client<1' pyzmq \\
        'redis<9' tqdm transformers 'zstandard<1' 'kubernetes<33' safetensors tokenizers

Both serve one model directory (a tokenizer and a template, no weights) with two workers and a time
model: Dynamo's mocker at --speedup-ratio 1000, and pdserve's `sim` with the mocker's polynomials,
1,000 times as fast. Another arm has pdserve's `instant`, which takes no time. Neither uses etcd or
NATS: Dynamo has file discovery and TCP, pdserve has gossip. Each frontend has a core of its own;
the rest of its system shares the other core with the load generator. Arms take turns within a
round. Figures are medians over rounds, ratios are medians of each round's ratio.

Dynamo's frontend leaves Nagle's algorithm on, which costs a client that waits for each answer 40
ms. `quickack` rows use a client that acknowledges at once and are the fairer comparison. The mocker
does not send real tokens, but as many chunks. All prompts of a row are the same text, which favours
a cache of tokenised prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.frontend import (
    EXTRA_EVENTS,
    FRONT,
    OTHER,
    build_generator,
    child_processes,
    cpu_seconds,
    free_port,
    machine_busy,
    write_model,
)
from bench.machine import facts

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT: Final = "/v1/chat/completions"
WORKERS: Final = 2
BLOCK: Final = 32
SHORT: Final = "Could you explain how a request travels through a server, step by step, please?"


@dataclass(frozen=True)
class Row:
    """A load."""

    name: str
    connections: int
    tokens: int
    """Tokens of an answer; 0: an answer of one token without a stream."""
    rate: float = 0.0
    """Requests per second; 0: as many as the connections can take."""
    quickack: bool = False
    words: int = 0
    """Words of the prompt; 0: a short one."""
    compare: str = "rate"
    """The value that the ratio compares: `rate`, `p50` or `p99`."""


ROWS: Final = (
    Row("requests, 16 connections", 16, 0),
    Row("requests, 64 connections", 64, 0),
    Row("chunks, 64 streams of 64", 64, 64),
    Row("chunks, 64 streams of 64, quickack", 64, 64, quickack=True),
    Row("prompts of 2,000 words, 16 connections", 16, 4, quickack=True, words=2000),
    Row("TTFT at 20/s, quickack", 16, 16, 20, quickack=True, compare="p50"),
    Row("TTFT at 20/s, quickack, p99", 16, 16, 20, quickack=True, compare="p99"),
    Row("TTFT at 20/s", 16, 16, 20, compare="p50"),
    Row("TTFT, one after the other, quickack", 1, 16, quickack=True, compare="p50"),
    Row("TTFT, one after the other", 1, 16, compare="p50"),
)


@dataclass
class System:
    """A running arm."""

    name: str
    port: int
    frontend: int
    """The process whose core is measured."""
    started: float
    """Seconds from the first process to the first answer."""
    members: list[int] = field(default_factory=list)
    """All processes of the arm."""
    idle: int = 0
    """PSS of all processes before the load, in bytes."""


# ---------------------------------------------------------------- the systems


@contextlib.contextmanager
def processes(commands: list[tuple[list[str], int]], extra: dict[str, str]) -> Iterator[list[int]]:
    """Starts each command on its core; ends the processes and their children afterwards."""
    environment = os.environ | extra
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command, core in commands:
            started.append(
                subprocess.Popen(
                    ["taskset", "-c", str(core), *command],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
            )
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def pdserve(model: Path, policy: str, engine: str) -> Iterator[System]:
    """Starts frontend, router and workers, each a process; engine cores are children of workers."""
    program = [sys.executable, "-m", "pdserve"]
    seed, port = f"127.0.0.1:{free_port()}", free_port()
    worker = [*program, "--role=worker", "--join", seed, "--model", str(model), "--engine"]
    worker += [engine, "--served-model-name", "bench", "--threads", "1"]
    if engine == "sim":
        worker += ["--engine-option", "preset=dynamo-mocker", "--engine-option", "slowdown=0.001"]
    commands = [
        ([*program, "--role=frontend", "--join", seed, "--port", str(port)], FRONT),
        ([*program, "--role=router", "--listen", seed, "--policy", policy], OTHER),
        *[(worker, OTHER)] * WORKERS,
    ]
    begin = time.perf_counter()
    with processes(commands, {}) as pids:
        first_answer(port)
        took = time.perf_counter() - begin
        yield settled(System(f"pdserve, {policy}, {engine}", port, pids[0], took, pids))


@contextlib.contextmanager
def dynamo(python: Path, model: Path, mode: str) -> Iterator[System]:
    """Starts frontend and mocker; the mocker's process has both workers."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": folder,
            "DYN_LOG": "error",
            "HF_HUB_OFFLINE": "1",
        }
        frontend = [str(python), "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        frontend += ["--http-port", str(port), "--router-mode", mode]
        frontend += ["--kv-cache-block-size", str(BLOCK)]
        mocker = [str(python), "-m", "dynamo.mocker", "--model-path", str(model)]
        mocker += ["--model-name", "bench", "--speedup-ratio", "1000"]
        mocker += ["--block-size", str(BLOCK), "--num-workers", str(WORKERS)]
        begin = time.perf_counter()
        with processes([(frontend, FRONT), (mocker, OTHER)], environment) as pids:
            first_answer(port)
            took = time.perf_counter() - begin
            yield settled(System(f"Dynamo, {mode}", port, pids[0], took, pids))


def first_answer(port: int) -> None:
    """Sends requests until one is answered. Raises `RuntimeError` after a minute."""
    body = json.dumps(request(1, 0)).encode()
    headers = {"content-type": "application/json"}
    ask = urllib.request.Request(f"http://127.0.0.1:{port}{CHAT}", body, headers)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(ask, timeout=5):
            return
        time.sleep(0.02)
    raise RuntimeError(f"no server answered on port {port}; start the arm by hand to see why")


def settled(system: System) -> System:
    """Fills in all processes and their memory, a moment after the first answer."""
    time.sleep(1.0)
    found, look = list(system.members), list(system.members)
    while look:
        children = child_processes(look.pop())
        found += children
        look += children
    system.members = found
    system.idle = held(system)
    return system


def held(system: System) -> int:
    """PSS of all processes of the arm, in bytes."""
    total = 0
    for pid in system.members:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found = re.search(r"^Pss:\s+(\d+) kB", text, re.M)
            total += int(found[1]) * 1024 if found else 0
    return total


# ---------------------------------------------------------------- the load


def request(tokens: int, words: int) -> dict[str, Any]:
    """A chat request for `tokens` tokens; 0 tokens: one, not streamed."""
    text = " ".join(f"word{i % 97}" for i in range(words)) if words else SHORT
    body: dict[str, Any] = {
        "model": "bench",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens or 1,
        "temperature": 0,
    }
    return body | ({"stream": True, "ignore_eos": True} if tokens else {})


@dataclass
class Sample:
    """The results of one load on one arm."""

    rate: float
    """Requests or stream chunks per second."""
    p50: float
    p99: float
    """Milliseconds to the first byte of the answer, 99th percentile."""
    cpu: float
    """CPU time of the frontend, in microseconds per request."""
    share: float
    """Share of a core that the frontend used."""
    errors: int
    foreign: float
    """Number of cores that other work used meanwhile."""


def measure(row: Row, system: System, generator: Path, folder: Path, seconds: float) -> Sample:
    """Runs one load on one arm."""
    body = folder / f"body-{row.tokens}-{row.words}.json"
    body.write_text(json.dumps(request(row.tokens, row.words)))
    command = ["taskset", "-c", str(OTHER), str(generator), "load", "--port", str(system.port)]
    command += ["--path", CHAT, "--body", str(body), "--connections", str(row.connections)]
    command += ["--warmup", "0.5", "--seconds", str(seconds)]
    command += ["--rate", str(row.rate)] if row.rate else []
    command += ["--quickack"] if row.quickack else []
    before, busy = cpu_seconds(system.frontend), machine_busy()
    others = sum(map(cpu_seconds, system.members))
    begin = time.perf_counter()
    got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    wall = time.perf_counter() - begin
    used = cpu_seconds(system.frontend) - before
    own = sum(map(cpu_seconds, system.members)) - others + got["cpu_share"] * wall
    chunks = got["events"] * row.tokens / (row.tokens + EXTRA_EVENTS) if row.tokens else 0
    return Sample(
        rate=(chunks if row.tokens and not row.rate else got["requests"]) / got["seconds"],
        p50=got["first"]["p50"] * 1e3,
        p99=got["first"]["p99"] * 1e3,
        cpu=used / max(got["requests"], 1) * 1e6 * got["seconds"] / wall,
        share=used / wall,
        errors=got["errors"] + got["missed"],
        foreign=max(0.0, (machine_busy() - busy - own) / wall),
    )


# ---------------------------------------------------------------- the report

Rounds = dict[tuple[str, str], list[Sample]]
"""(row, arm) -> one sample per round."""


def middle(samples: list[Sample], name: str) -> float:
    return float(statistics.median(getattr(sample, name) for sample in samples))


def table(rounds: Rounds, arms: list[str]) -> list[str]:
    """The table with one line per row and arm."""
    lines = [
        "| load | arm | per second | TTFT p50 / p99 ms | frontend us/request | its core | errors "
        "| others |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in ROWS:
        for arm in arms:
            samples = rounds[row.name, arm]
            lines.append(
                f"| {row.name} | {arm} | {middle(samples, 'rate'):,.0f} "
                f"| {middle(samples, 'p50'):.2f} / {middle(samples, 'p99'):.2f} "
                f"| {middle(samples, 'cpu'):,.0f} | {middle(samples, 'share'):.2f} "
                f"| {sum(s.errors for s in samples)} | {middle(samples, 'foreign'):.2f} |"
            )
    return lines


def ratios(rounds: Rounds, arms: list[str]) -> list[str]:
    """Ratios of pdserve's default to Dynamo's KV mode, by row."""
    ours, theirs = arms[0], arms[-1]
    lines = [f"{ours} to {theirs}, medians of each round's ratio:", ""]
    for row in ROWS:
        pairs = zip(rounds[row.name, ours], rounds[row.name, theirs], strict=True)
        values = [getattr(a, row.compare) / max(getattr(b, row.compare), 1e-9) for a, b in pairs]
        better = "more" if row.compare == "rate" else "of their time"
        lines.append(f"- {row.name}: {statistics.median(values):.2f} ({better})")
    return lines


def systems(running: list[System], after: list[int]) -> list[str]:
    """The table of start-up, processes and memory."""
    lines = [
        "",
        "| arm | start to first answer, s | processes | PSS idle, MiB | after the load, MiB |",
        "|---|---:|---:|---:|---:|",
    ]
    for system, then in zip(running, after, strict=True):
        lines.append(
            f"| {system.name} | {system.started:.2f} | {len(system.members)} "
            f"| {system.idle / 2**20:.0f} | {then / 2**20:.0f} |"
        )
    return lines


def run(args: argparse.Namespace, folder: Path) -> list[str]:
    """Measures all arms side by side; idle ones cost nothing. Returns the report."""
    generator = build_generator(folder)
    model = completed(write_model(folder / "model"))
    rounds: Rounds = {}
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        running = [
            enter(pdserve(model, args.policy, "sim")),
            enter(pdserve(model, args.policy, "instant")),
            enter(dynamo(args.dynamo, model, "round-robin")),
            enter(dynamo(args.dynamo, model, "kv")),
        ]
        for number in range(args.rounds):
            for row in ROWS:
                for system in running:
                    sample = measure(row, system, generator, folder, args.seconds)
                    rounds.setdefault((row.name, system.name), []).append(sample)
                    print(f"{number + 1} {row.name} {system.name}: {sample}", file=sys.stderr)
        arms = [system.name for system in running]
        after = [held(system) for system in running]
    return [*table(rounds, arms), *systems(running, after), "", *ratios(rounds, arms)]


def completed(model: Path) -> Path:
    """Adds the fields that Dynamo needs to `config.json`."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, "bos_token_id": 0}
    path.write_text(json.dumps({**config, **sizes, **more}))
    return model


def main() -> None:
    args = arguments()
    if shutil.which("taskset") is None or (os.cpu_count() or 1) < 2:
        sys.exit("this needs taskset and two cores")
    with tempfile.TemporaryDirectory() as folder:
        lines = run(args, Path(folder))
    version = subprocess.run(
        [
            str(args.dynamo),
            "-c",
            "from importlib.metadata import version; print(version('ai-dynamo'))",
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    head = [
        "# Beside Dynamo",
        "",
        f"Dynamo {version}, {WORKERS} workers each; {args.rounds} rounds of {args.seconds:g} s. "
        "`bench/peers/dynamo.py` says what is compared and how it was installed.",
        "",
        *(f"- {fact}" for fact in facts()),
        "",
    ]
    print("\n".join(lines))
    if args.write:
        args.write.write_text("\n".join([*head, *lines]) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dynamo", type=Path, required=True, help="Python that has ai-dynamo")
    parser.add_argument("--policy", default="ttft", help="of pdserve's first arm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--write", type=Path, help="write the report there as Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
