"""Measures the frontend on one core: streamed tokens/s, requests/s, CPU time, first token.

    python bench/frontend.py [--rounds N] [--seconds S] [--write bench/results/frontend.md]

pdserve runs with `--engine=instant` and a real tokenizer. As an all-in-one, its process is pinned
to one core, and the engine core and the load generator to another. As a cluster, the frontend has
the one core, and router, worker, engine core and load generator share the other. The same run also
measures, in the same places, the load generator against a server in C++ that answers with
ready-made bytes (the generator's ceiling), and against aiohttp on uvloop that does the same (the
limit). The arms take turns within a round. Figures are medians over rounds, ratios are medians of
each round's ratio.

The generator is C++ (bench/loadgen/), compiled here with g++. Nothing passes or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.machine import facts
from bench.pages import kept

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
BY_HAND = "## What the cluster costs"
"""The text from this heading on is written by hand and kept in the result."""
FRONT, OTHER = 0, 1
"""Cores: one for the system under test, one for load generator and engine core."""

TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QUESTION = "Could you explain how a request travels through a server, step by step, please?"
EXTRA_EVENTS = 2
"""Events of a stream beside its tokens: the role, and `[DONE]`."""


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Row:
    """A load on a server."""

    name: str
    server: str
    path: str
    connections: int
    tokens: int
    """Per answer; 0: an answer that is not streamed, of one token."""
    rate: float = 0.0
    """Requests per second; 0: as many as the connections can take."""
    saturates: bool = True
    """True if the load is more than the server can handle."""


CHAT = "/v1/chat/completions"
ROWS = (
    Row("requests: C++ echo", "echo", "/", 16, 0),
    Row("requests: bare aiohttp", "bare", "/", 16, 0),
    Row("requests: pdserve, 16 connections", "unpaced", CHAT, 16, 0),
    Row("requests: pdserve, 64 connections", "unpaced", CHAT, 64, 0),
    Row("stream of 64: C++ echo", "echo-stream", "/", 64, 64),
    Row("stream of 64: bare aiohttp", "bare", "/stream", 64, 64),
    Row("stream of 64: pdserve, paced", "paced", CHAT, 64, 64),
    Row("stream of 64: pdserve, unpaced", "unpaced", CHAT, 64, 64),
    Row("stream of 1024: pdserve, paced", "paced", CHAT, 64, 1024),
    Row("stream of 1024: pdserve, unpaced", "unpaced", CHAT, 64, 1024),
    Row("stream of 64: pdserve, every token alone", "slow", CHAT, 64, 64, saturates=False),
    Row("requests: a cluster's frontend, 64 connections", "cluster", CHAT, 64, 0),
    Row("stream of 64: a cluster's frontend, paced", "cluster-paced", CHAT, 64, 64),
    Row("stream of 64: a cluster's frontend, unpaced", "cluster", CHAT, 64, 64),
    Row("stream of 1024: a cluster's frontend, paced", "cluster-paced", CHAT, 64, 1024),
    Row(
        "stream of 64: a cluster's frontend, every token alone",
        *("cluster-slow", CHAT, 64, 64),
        saturates=False,
    ),
    Row("20/s of 64 tokens: bare aiohttp", "bare", "/stream", 16, 64, 20, saturates=False),
    Row("20/s of 64 tokens: pdserve", "unpaced", CHAT, 16, 64, 20, saturates=False),
    Row("20/s of 64 tokens: a cluster's frontend", "cluster", CHAT, 16, 64, 20, saturates=False),
    Row("one connection, 16 tokens: pdserve", "unpaced", CHAT, 1, 16, saturates=False),
    Row("one connection, 16 tokens: a cluster", "cluster", CHAT, 1, 16, saturates=False),
)


@dataclass
class Sample:
    """The results of one run of one row."""

    requests: float
    """Requests per second."""
    tokens: float
    """Tokens per second."""
    cpu_request: float
    """Microseconds of the server's process per request."""
    cpu_token: float
    server_share: float
    """Share of a core that the server used."""
    client_share: float
    foreign: float
    """Number of cores that other work used meanwhile."""
    first: dict[str, float]
    errors: int


@dataclass
class Server:
    """A process under load."""

    process: subprocess.Popen[str]
    port: int
    helpers: list[int] = field(default_factory=list)
    """Child processes of the server, which run on the other core."""


# ---------------------------------------------------------------- the servers


@contextlib.contextmanager
def pinned(command: list[str], cpu: int) -> Iterator[subprocess.Popen[str]]:
    """Starts a child process on one core and ends it afterwards."""
    process = subprocess.Popen(
        ["taskset", "-c", str(cpu), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=HERE.parent,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def printed_port(process: subprocess.Popen[str]) -> Server:
    """Starts a server that prints its port as its first line."""
    assert process.stdout is not None
    return Server(process, int(process.stdout.readline()))


@contextlib.contextmanager
def pdserve(model: Path, port: int, rate: float) -> Iterator[Server]:
    """Starts an all-in-one pdserve; `rate` is tokens per second of each stream, 0: no delay."""
    command = [sys.executable, "-m", "pdserve", "--port", str(port), *worker_flags(model, rate)]
    with pinned(command, FRONT) as process:
        wait_ready(process, port)
        children = child_processes(process.pid)
        for child in children:
            subprocess.run(
                ["taskset", "-acp", str(OTHER), str(child)], check=True, stdout=subprocess.DEVNULL
            )
        yield Server(process, port, children)


@contextlib.contextmanager
def cluster(model: Path, rate: float) -> Iterator[Server]:
    """Starts pdserve as three processes: the frontend on its core, the others on the other core."""
    program = [sys.executable, "-m", "pdserve"]
    seed, port = f"127.0.0.1:{free_port()}", free_port()
    router = [*program, "--role=router", "--listen", seed]
    worker = [*program, "--role=worker", "--join", seed, *worker_flags(model, rate)]
    frontend = [*program, "--role=frontend", "--join", seed, "--port", str(port)]
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(pinned(command, OTHER)) for command in (router, worker)]
        process = stack.enter_context(pinned(frontend, FRONT))
        wait_ready(process, port)
        helpers = [other.pid for other in others] + child_processes(others[1].pid)
        yield Server(process, port, helpers)


def worker_flags(model: Path, rate: float) -> list[str]:
    """Flags of a worker: the model, and an engine that takes only the time that `rate` requires."""
    flags = ["--model", str(model), "--engine", "instant", "--threads", "1"]
    flags += ["--served-model-name", "bench"]
    return [*flags, "--engine-option", f"tokens_per_second={rate}"] if rate else flags


def wait_ready(process: subprocess.Popen[str], port: int) -> None:
    """Waits until `/health` answers 200. Raises `RuntimeError` after a minute or when the process
    ends."""
    for _ in range(600):
        if process.poll() is not None:
            break
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1),
        ):
            return
        time.sleep(0.1)
    raise RuntimeError("pdserve did not become ready; start it by hand to see why")


def child_processes(pid: int) -> list[int]:
    """Direct children of a process."""
    files = glob.glob(f"/proc/{pid}/task/*/children")
    return [int(child) for file in files for child in Path(file).read_text().split()]


def free_port() -> int:
    """A port that was free a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def servers(generator: Path, model: Path, paced: float, slow: float) -> Iterator[dict[str, Server]]:
    """Starts all servers, by name. Idle ones cost nothing."""
    bare = [sys.executable, str(HERE / "loadgen" / "bare.py"), "0"]
    echo = [str(generator), "serve", "--bytes", "220"]
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        yield {
            "echo": printed_port(enter(pinned(echo, FRONT))),
            "echo-stream": printed_port(enter(pinned([*echo, "--chunks", "66"], FRONT))),
            "bare": printed_port(enter(pinned(bare, FRONT))),
            "unpaced": enter(pdserve(model, free_port(), 0)),
            "paced": enter(pdserve(model, free_port(), paced)),
            "slow": enter(pdserve(model, free_port(), slow)),
            "cluster": enter(cluster(model, 0)),
            "cluster-paced": enter(cluster(model, paced)),
            "cluster-slow": enter(cluster(model, slow)),
        }


# ---------------------------------------------------------------- the model and the generator


def build_generator(folder: Path) -> Path:
    """Compiles the load generator."""
    program = folder / "loadgen"
    source = HERE / "loadgen" / "loadgen.cpp"
    subprocess.run(["g++", "-O2", "-std=c++17", "-o", str(program), str(source)], check=True)
    return program


def write_model(folder: Path) -> Path:
    """Writes a model's directory without weights: a byte-level tokenizer of 16k tokens, trained on
    Python's own library, and a ChatML template."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16384,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    library = sorted(glob.glob(sysconfig.get_path("stdlib") + "/*.py"))
    texts = (Path(file).read_text(errors="ignore") for file in library)
    raw.train_from_iterator(texts, trainer)
    folder.mkdir()
    raw.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "vocab_size": raw.get_vocab_size(),
        "max_position_embeddings": 32768,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def write_body(folder: Path, tokens: int) -> Path:
    """The request for an answer of `tokens` streamed tokens; 0: one token, not streamed."""
    body: dict[str, Any] = {
        "model": "bench",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": tokens or 1,
        "temperature": 0,
    }
    if tokens:
        body["stream"] = True
    path = folder / f"body-{tokens}.json"
    path.write_text(json.dumps(body))
    return path


# ---------------------------------------------------------------- measuring


def measure(row: Row, server: Server, generator: Path, folder: Path, seconds: float) -> Sample:
    """Runs one row once."""
    command = ["taskset", "-c", str(OTHER), str(generator), "load", "--port", str(server.port)]
    command += ["--path", row.path, "--body", str(write_body(folder, row.tokens))]
    command += ["--connections", str(row.connections), "--warmup", "0"]
    if row.rate:
        command += ["--rate", str(row.rate)]
    subprocess.run([*command, "--seconds", "0.4"], check=True, stdout=subprocess.DEVNULL)
    before, busy, own = cpu_seconds(server.process.pid), machine_busy(), helper_seconds(server)
    result = subprocess.run(
        [*command, "--seconds", str(seconds)], check=True, capture_output=True, text=True
    )
    used = cpu_seconds(server.process.pid) - before
    got = json.loads(result.stdout)
    wall = got["seconds"]
    ours = used + helper_seconds(server) - own + got["cpu_share"] * wall
    tokens = got["events"] * row.tokens / (row.tokens + EXTRA_EVENTS) if row.tokens else 0
    if row.server == "bare":
        tokens = got["events"]
    return Sample(
        requests=got["requests"] / wall,
        tokens=tokens / wall,
        cpu_request=used / max(got["requests"], 1) * 1e6,
        cpu_token=used / tokens * 1e6 if tokens else 0,
        server_share=used / wall,
        client_share=got["cpu_share"],
        foreign=max(0.0, (machine_busy() - busy - ours) / wall),
        first=got["first"],
        errors=got["errors"] + got["missed"],
    )


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process, from the scheduler's own clock."""
    total = 0
    for file in glob.glob(f"/proc/{pid}/task/*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(Path(file).read_text().split()[0])
    return total / 1e9


def helper_seconds(server: Server) -> float:
    """Processor time of the server's engine core."""
    return sum(map(cpu_seconds, server.helpers))


def machine_busy() -> float:
    """Processor time of all processes of this machine."""
    fields = [int(part) for part in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- the report


def median(samples: list[Sample], name: str) -> float:
    return float(statistics.median(getattr(sample, name) for sample in samples))


def ratio(rounds: dict[str, list[Sample]], ours: str, theirs: str, name: str) -> float:
    """Median over rounds of ours to theirs in the same round."""
    pairs = zip(rounds[ours], rounds[theirs], strict=True)
    return float(statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs))


def table(rounds: dict[str, list[Sample]]) -> list[str]:
    """The table with one line per row."""
    lines = [
        "| | requests/s | tokens/s | of a whole core | CPU us/request | CPU us/token "
        "| first byte p50 / p99 ms | server core | generator core | others | errors |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in ROWS:
        samples = rounds[row.name]
        first = {
            name: statistics.median(sample.first[name] for sample in samples) * 1e3
            for name in ("p50", "p99")
        }
        cells = [
            row.name,
            f"{median(samples, 'requests'):,.0f}",
            f"{median(samples, 'tokens'):,.0f}" if row.tokens else "",
            whole_core(row, samples),
            f"{median(samples, 'cpu_request'):,.0f}",
            f"{median(samples, 'cpu_token'):.2f}" if row.tokens else "",
            f"{first['p50']:.2f} / {first['p99']:.2f}",
            f"{median(samples, 'server_share'):.2f}",
            f"{median(samples, 'client_share'):.2f}",
            f"{median(samples, 'foreign'):.2f}",
            str(sum(sample.errors for sample in samples)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def whole_core(row: Row, samples: list[Sample]) -> str:
    """The rate divided by the share of a core that the server got, if it was short of it."""
    if not row.saturates:
        return ""
    name = "tokens" if row.tokens else "requests"
    rate = statistics.median(getattr(sample, name) / sample.server_share for sample in samples)
    return f"{rate:,.0f}"


RATIOS = (
    ("requests/s", "requests: pdserve, 16 connections", "requests: bare aiohttp", "requests"),
    ("tokens/s, paced", "stream of 64: pdserve, paced", "stream of 64: bare aiohttp", "tokens"),
    ("tokens/s, unpaced", "stream of 64: pdserve, unpaced", "stream of 64: bare aiohttp", "tokens"),
    ("CPU/token, paced", "stream of 64: pdserve, paced", "stream of 64: bare aiohttp", "cpu_token"),
    (
        "tokens/s of a cluster's frontend, paced",
        "stream of 64: a cluster's frontend, paced",
        "stream of 64: bare aiohttp",
        "tokens",
    ),
    (
        "CPU/token, every token alone",
        "stream of 64: pdserve, every token alone",
        "stream of 64: bare aiohttp",
        "cpu_token",
    ),
)


HOPS = (
    ("requests: {}, 64 connections", "cpu_request"),
    ("stream of 64: {}, paced", "cpu_token"),
    ("stream of 1024: {}, paced", "cpu_token"),
    ("stream of 64: {}, every token alone", "cpu_token"),
)
"""Rows that show the cost of the hop. All-in-one has router, worker and frontend in one process, so
it pays for both ends of the hop."""


def report(rounds: dict[str, list[Sample]], args: argparse.Namespace) -> list[str]:
    """The result file, as lines of Markdown."""
    lines = [*table(rounds), "", "To bare aiohttp, within the same round:", ""]
    for title, ours, theirs, name in RATIOS:
        lines.append(f"- {title}: {ratio(rounds, ours, theirs, name):.2f}")
    lines += ["", "The hop to another process, frontend's CPU beside all-in-one's:", ""]
    for title, name in HOPS:
        ours, beside = (title.format(who) for who in ("a cluster's frontend", "pdserve"))
        cost = median(rounds[ours], name) - median(rounds[beside], name)
        lines.append(f"- {beside}: {cost:+.2f} us per {name.removeprefix('cpu_')}")
    lines += [
        "",
        f"Paced: {args.paced:,.0f} tokens/s of each stream, more than one core can send singly, so "
        f"what is late is sent together. Alone: {args.slow:,.0f} tokens/s, each token wakes the "
        "loop by itself.",
        "Shares are of one core. A server share below 1 in a saturated row means that others had "
        "the rest: the rates are that much too low, `of a whole core` is the rate divided by the "
        "share, and times are that much too long.",
        "These figures compare pdserve with bare aiohttp in the same run, and with nothing else: "
        "rates of other servers are of other runs or machines. [dynamo.md](dynamo.md) has Dynamo "
        "in one run with pdserve.",
    ]
    return lines


def main() -> None:
    args = arguments()
    rounds: dict[str, list[Sample]] = {row.name: [] for row in ROWS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generator = build_generator(folder)
        model = write_model(folder / "model")
        with servers(generator, model, args.paced, args.slow) as running:
            for number in range(args.rounds):
                for row in ROWS:
                    sample = measure(row, running[row.server], generator, folder, args.seconds)
                    rounds[row.name].append(sample)
                    print(f"round {number + 1}, {row.name}: {sample}", file=sys.stderr, flush=True)
    lines = report(rounds, args)
    print("\n".join(lines))
    if args.write:
        text = "\n".join([*header(args), *lines]) + "\n"
        args.write.write_text(text + kept(args.write, BY_HAND))


def header(args: argparse.Namespace) -> list[str]:
    head = [
        "# The frontend on one core",
        "",
        f"Medians of {args.rounds} rounds of {args.seconds:g} s, arms in turn.",
        f"Repeat with `python bench/frontend.py --rounds {args.rounds}`.",
        "",
    ]
    return [*head, *(f"- {fact}" for fact in facts()), ""]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--paced", type=float, default=2500.0, help="tokens/s of each stream")
    parser.add_argument("--slow", type=float, default=150.0, help="the same, every token alone")
    parser.add_argument("--write", type=Path, help="write the report there as Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
