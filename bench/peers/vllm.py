"""pdserve with the vLLM engine beside `vllm serve`: tokens/s, TTFT, ITL and CPU on the same cores.

    python -m bench.peers.vllm [--vllm PYTHON] [--router PROGRAM] [--rounds N] [--write FILE]

PYTHON is the interpreter of an environment that has both vLLM and pdserve (`make vllm` makes one);
PROGRAM is `vllm-router` in an environment of its own (`pip install vllm-router`). Without PROGRAM
the second table is left out.

Both serve one model with random weights (91 M parameters, the bundled tokenizer) with the same
settings of vLLM; only KV events are on in pdserve alone, because its router uses them. Both arms
are loaded at the same time and take turns, in an order that changes from round to round; an idle
one uses next to nothing. `pdserve bench` is the client of both. Both get the same requests in a
round, and a round repeats no prompt of an earlier one, so no cache answers. Figures are medians
over rounds, ratios medians of each round's ratio with the smallest and the largest beside them.

Before each run the script waits until other processes leave the machine alone, and it records what
they use during the run. Where it may, it gives itself and all that it starts a higher priority
(`--nice`).

The second table compares routers over two engines each. Its prompts share prefixes by group. Each
engine computes on one core of its own, and both sides tell computed prompt tokens by what vLLM says
of its prefix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.frontend import child_processes, cpu_seconds, free_port, machine_busy
from bench.machine import facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT: Final = Path(__file__).parents[2]
BUNDLED: Final = ROOT / "pdserve" / "bundled"
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 768, 2560, 12, 12, 4, 64
BLOCK, BATCH, SEQUENCES, CONTEXT = 32, 2048, 64, 2048
KV: Final = 512 << 20
"""Bytes of KV of each engine."""
PROMPT, OUTPUT = "128", "uniform:32:96"
"""Tokens of each request of the first table. With answers of one length all streams of a server
that batches its first requests would stay in step for the whole run."""
START: Final = 300.0
"""Seconds for a server to load."""
QUIET: Final = 0.25
"""Cores that other processes may use when a run begins."""


# ---------------------------------------------------------------- the model


def write_model(folder: Path) -> Path:
    """Writes a Llama model with random weights in bfloat16 and the bundled tokenizer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(BUNDLED / name, folder / name)
    config = json.loads((BUNDLED / "config.json").read_text())
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD}
    (folder / "config.json").write_text(json.dumps(config | sizes | heads))
    torch.manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16) * 0.05

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], HIDDEN)}
    weights["model.norm.weight"] = ones.clone()
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": ones.clone(),
            name + "post_attention_layernorm.weight": ones.clone(),
            name + "self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN),
            name + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            name + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            name + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD),
            name + "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            name + "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            name + "mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---------------------------------------------------------------- the systems


@dataclass
class System:
    """A running arm."""

    name: str
    url: str
    counters: list[str]
    """Addresses of the `/metrics` of its engines."""
    roots: list[int]
    """Processes that this script has started."""
    members: list[int] = field(default_factory=list)
    """All processes of the arm."""

    def cpu(self) -> float:
        return sum(map(cpu_seconds, self.members))


@contextlib.contextmanager
def processes(
    commands: Sequence[tuple[list[str], dict[str, str]]], log: Path
) -> Iterator[list[int]]:
    """Starts each command with its environment; ends them and all their children afterwards."""
    started: list[subprocess.Popen[bytes]] = []
    with log.open("wb") as output:
        try:
            for command, extra in commands:
                started.append(
                    subprocess.Popen(
                        command,
                        stdout=output,
                        stderr=output,
                        env=os.environ | extra,
                        start_new_session=True,
                    )
                )
            yield [process.pid for process in started]
        except RuntimeError:
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
            raise
        finally:
            for process in started:
                process.terminate()
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def pdserve_flags(model: Path) -> list[str]:
    """Flags of a pdserve process with an engine."""
    flags = ["--engine", "vllm", "--engine-option", "enforce_eager=true", "--model", str(model)]
    flags += ["--served-model-name", "bench", "--dtype", "bfloat16", "--kv-memory", str(KV)]
    flags += ["--block-size", str(BLOCK), "--max-batch-tokens", str(BATCH)]
    flags += ["--max-sequences", str(SEQUENCES), "--max-model-len", str(CONTEXT)]
    # A machine that is busy elsewhere must not look like a stalled engine.
    return [*flags, "--stall-timeout", "60s"]


def vllm_flags(model: Path, port: int) -> list[str]:
    """Arguments of vLLM's server that say the same, and that log no requests. The program `vllm`
    itself does not start where the package is the one for CPUs, which has another name."""
    flags = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager"]
    flags += ["--host", "127.0.0.1", "--port", str(port)]
    flags += ["--served-model-name", "bench", "--dtype", "bfloat16"]
    flags += ["--kv-cache-memory-bytes", str(KV), "--block-size", str(BLOCK)]
    flags += ["--max-num-batched-tokens", str(BATCH), "--max-num-seqs", str(SEQUENCES)]
    flags += ["--max-model-len", str(CONTEXT), "--enable-prefix-caching"]
    return [*flags, "--disable-uvicorn-access-log"]


def on_core(core: int) -> dict[str, str]:
    """The environment of an engine that computes on one core."""
    return {"VLLM_CPU_OMP_THREADS_BIND": str(core)}


@contextlib.contextmanager
def one_pdserve(python: Path, model: Path, folder: Path) -> Iterator[System]:
    """Frontend, router and worker in one process; the engine is its child."""
    port = free_port()
    command = [str(python), "-m", "pdserve", "--port", str(port), *pdserve_flags(model)]
    with processes([(command, {"PDSERVE_CONFIG": "none"})], folder / "pdserve.log") as pids:
        url = f"http://127.0.0.1:{port}"
        yield settled(System("pdserve", url, [f"{url}/metrics"], pids))


@contextlib.contextmanager
def one_vllm(python: Path, model: Path, folder: Path) -> Iterator[System]:
    """`vllm serve`: an API server, its engine core and its worker."""
    port = free_port()
    command = [str(python), *vllm_flags(model, port)]
    with processes([(command, {"VLLM_NO_USAGE_STATS": "1"})], folder / "vllm.log") as pids:
        url = f"http://127.0.0.1:{port}"
        yield settled(System("vllm serve", url, [f"{url}/metrics"], pids))


@contextlib.contextmanager
def routed_pdserve(python: Path, model: Path, folder: Path) -> Iterator[System]:
    """A router, a frontend and two workers."""
    seed, port, probes = f"127.0.0.1:{free_port()}", free_port(), [free_port(), free_port()]
    program, plain = [str(python), "-m", "pdserve"], {"PDSERVE_CONFIG": "none"}
    commands = [
        ([*program, "--role=router", "--listen", seed], plain),
        ([*program, "--role=frontend", "--join", seed, "--port", str(port)], plain),
    ]
    for core, probe in enumerate(probes):
        worker = [*program, "--role=worker", "--join", seed, "--metrics-port", str(probe)]
        commands.append(([*worker, *pdserve_flags(model)], plain | on_core(core)))
    counters = [f"http://127.0.0.1:{probe}/metrics" for probe in probes]
    with processes(commands, folder / "routed.log") as pids:
        system = System("pdserve, ttft", f"http://127.0.0.1:{port}", counters, pids)
        for probe in probes:
            wait_answer(f"http://127.0.0.1:{probe}/health", system.name, pids)
        yield settled(system)


@contextlib.contextmanager
def routed_vllm(python: Path, router: Path, model: Path, folder: Path) -> Iterator[list[System]]:
    """Two servers, and vLLM's router in front of them twice: with its policy by texts that it has
    seen (`cache_aware`), and by the engines' KV events (`kv_aware`)."""
    ports, events = [free_port(), free_port()], [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    servers = []
    for core, (port, event) in enumerate(zip(ports, events, strict=True)):
        said = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events"}
        said["endpoint"] = f"tcp://*:{event}"  # without the star vLLM connects instead of listening
        command = [str(python), *vllm_flags(model, port)]
        command += ["--kv-events-config", json.dumps(said)]
        extra = {"VLLM_NO_USAGE_STATS": "1", "PYTHONHASHSEED": "0"}
        servers.append((command, extra | on_core(core)))
    by_events = ["--kv-event-block-size", str(BLOCK), "--kv-event-model", "bench"]
    for url, event in zip(urls, events, strict=True):
        by_events += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{event}"]
    with processes(servers, folder / "servers.log") as pids, contextlib.ExitStack() as stack:
        for url in urls:
            wait_answer(f"{url}/health", "vllm serve", pids)
        systems = []
        for policy, more in (("cache_aware", []), ("kv_aware", by_events)):
            port = free_port()
            command = [str(router), "--worker-urls", *urls, "--policy", policy, *more]
            command += ["--host", "127.0.0.1", "--port", str(port)]
            command += ["--prometheus-port", str(free_port())]
            own = stack.enter_context(processes([(command, {})], folder / f"{policy}.log"))
            counters = [f"{url}/metrics" for url in urls]
            system = System(
                f"vllm-router, {policy}", f"http://127.0.0.1:{port}", counters, [*pids, *own]
            )
            systems.append(settled(system))
        yield systems


def wait_answer(ask: str | urllib.request.Request, name: str, roots: Sequence[int]) -> None:
    """Waits for status 200. Raises `RuntimeError` after `START`, or if a process has ended."""
    until = time.monotonic() + START
    while time.monotonic() < until and all(map(alive, roots)):
        with contextlib.suppress(OSError), urllib.request.urlopen(ask, timeout=30):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{name} did not answer; start it by hand to see why")


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def settled(system: System) -> System:
    """Waits until the arm answers, and finds all of its processes."""
    body = {"model": "bench", "prompt": "Hello", "max_tokens": 2}
    ask = urllib.request.Request(
        f"{system.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    wait_answer(ask, system.name, system.roots)
    found, look = list(system.roots), list(system.roots)
    while look:
        children = child_processes(look.pop())
        found += children
        look += children
    system.members = found
    return system


# ---------------------------------------------------------------- one run


@dataclass
class Sample:
    """The results of one run on one arm."""

    rate: float
    """Output tokens per second."""
    ttft: float
    """Mean milliseconds to the first token."""
    ttft50: float
    """Its median."""
    itl: float
    """Median milliseconds between tokens."""
    cpu: float
    """CPU seconds of all processes of the arm per 1,000 output tokens."""
    foreign: float
    """Cores that other processes used meanwhile, the client left out."""
    computed: float
    """Prompt tokens that were not cached, by the engines' counters."""
    prompt: float
    """Prompt tokens in all."""


def measured(system: System, flags: list[str], folder: Path, patience: float) -> Sample:
    """Runs `pdserve bench` with these flags."""
    wait_quiet(patience)
    answer = folder / "bench.json"
    command = [sys.executable, "-m", "pdserve", "bench", "--url", system.url, "--model", "bench"]
    command += ["--ignore-eos", "--temperature", "0", "--json", str(answer), *flags]
    before = prompt_tokens(system)
    cpu, busy, begin = system.cpu(), machine_busy(), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, text=True)
    wall = time.perf_counter() - begin
    used = system.cpu() - cpu
    got = json.loads(answer.read_text())["summary"]
    client = children_cpu.note()
    after = prompt_tokens(system)
    if got["errors"]:
        raise RuntimeError(f"{system.name}: {got['error_messages']}")
    return Sample(
        rate=got["output_tokens_per_second"],
        ttft=got["ttft"]["mean"] * 1e3,
        ttft50=got["ttft"]["p50"] * 1e3,
        itl=got["itl"]["p50"] * 1e3,
        cpu=used / got["output_tokens"] * 1e3,
        foreign=max(0.0, (machine_busy() - busy - used - client) / wall),
        computed=after[0] - before[0],
        prompt=after[1] - before[1],
    )


class ChildrenCpu:
    """CPU time of this script's children that have ended: the clients."""

    def __init__(self) -> None:
        self._seen = 0.0

    def note(self) -> float:
        """Seconds since the last call."""
        times = os.times()
        now = times.children_user + times.children_system
        spent, self._seen = now - self._seen, now
        return spent


children_cpu = ChildrenCpu()


def prompt_tokens(system: System) -> tuple[float, float]:
    """(computed prompt tokens, all prompt tokens) of its engines so far."""
    computed = prompt = 0.0
    for url in system.counters:
        with urllib.request.urlopen(url, timeout=30) as answer:
            page = answer.read().decode()
        if "pdserve_" in page:
            whole = counter(page, "pdserve_prompt_tokens_total")
            cached = counter(page, "pdserve_cached_prompt_tokens_total")
        else:
            whole = counter(page, "vllm:prompt_tokens_total")
            cached = counter(page, "vllm:prompt_tokens_cached_total")
        prompt += whole
        computed += whole - cached
    return computed, prompt


def counter(page: str, name: str) -> float:
    """The sum of a metric's samples. Raises `LookupError` if there is none."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", page, re.M)
    if not found:
        raise LookupError(f"there is no metric {name}")
    return sum(map(float, found))


def wait_quiet(patience: float) -> None:
    """Waits until the machine is nearly idle, or until the patience ends."""
    until = time.monotonic() + patience
    while True:
        busy, begin = machine_busy(), time.perf_counter()
        time.sleep(1.5)
        if (machine_busy() - busy) / (time.perf_counter() - begin) < QUIET:
            return
        if time.monotonic() > until:
            print("the machine is not quiet; measuring all the same", file=sys.stderr)
            return


# ---------------------------------------------------------------- the tables

Rounds = dict[tuple[str, str], list[Sample]]
"""(load, arm) -> one sample per round."""


def measure_single(args: argparse.Namespace, model: Path, folder: Path) -> list[str]:
    """The first table: one engine each."""
    rounds: Rounds = {}
    with (
        one_pdserve(args.vllm, model, folder) as ours,
        one_vllm(args.vllm, model, folder) as theirs,
    ):
        warm_up([ours, theirs], folder)
        for number in range(args.rounds):
            for streams in args.streams:
                arms = [ours, theirs] if number % 2 else [theirs, ours]
                flags = single_flags(streams)
                for system in arms:
                    sample = measured(system, flags, folder, args.patience)
                    noted(rounds, f"{streams} streams", system.name, sample)
    return table(rounds, [f"{n} streams" for n in args.streams], ["pdserve", "vllm serve"])


def single_flags(streams: int) -> list[str]:
    """The load of one round; no later one has its seed."""
    requests = max(8, 3 * streams)
    flags = ["--endpoint", "completions", "--input-tokens", PROMPT]
    flags += ["--output-tokens", OUTPUT, "--concurrency", str(streams), "--warmup", "0"]
    return [*flags, "--requests", str(requests), "--seed", str(random.randrange(1 << 31))]


def warm_up(systems: list[System], folder: Path) -> None:
    """Lets every arm compute once what it will compute later."""
    for system in systems:
        for streams in (1, 16):
            measured(system, single_flags(streams), folder, 0.0)


def noted(rounds: Rounds, load: str, arm: str, sample: Sample) -> None:
    rounds.setdefault((load, arm), []).append(sample)
    print(f"{load}, {arm}: {sample}", file=sys.stderr)


def middle(samples: Sequence[Sample], name: str) -> float:
    return float(statistics.median(getattr(sample, name) for sample in samples))


def table(rounds: Rounds, loads: list[str], arms: list[str]) -> list[str]:
    """One line per load and arm, then the ratios of the first arm to the second."""
    lines = [
        "| load | arm | tokens/s | TTFT mean / p50, ms | ITL p50, ms | CPU s per 1,000 tokens "
        "| others, cores |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for load in loads:
        for arm in arms:
            got = rounds[load, arm]
            lines.append(
                f"| {load} | {arm} | {middle(got, 'rate'):,.1f} "
                f"| {middle(got, 'ttft'):.1f} / {middle(got, 'ttft50'):.1f} "
                f"| {middle(got, 'itl'):.2f} | {middle(got, 'cpu'):.2f} "
                f"| {middle(got, 'foreign'):.2f} |"
            )
    lines += ["", f"{arms[0]} to {arms[1]}, by round: median (least to most)", ""]
    for load in loads:
        ours, theirs = rounds[load, arms[0]], rounds[load, arms[1]]
        said = [
            f"tokens/s {spread(ours, theirs, 'rate', lambda a, b: a / b)}",
            f"TTFT {spread(ours, theirs, 'ttft50', lambda a, b: a - b, '+')} ms",
            f"ITL {spread(ours, theirs, 'itl', lambda a, b: a / b)}",
            f"CPU {spread(ours, theirs, 'cpu', lambda a, b: a / b)}",
        ]
        lines.append(f"- {load}: {'; '.join(said)}")
    return lines


def spread(
    ours: list[Sample],
    theirs: list[Sample],
    name: str,
    compare: Callable[[float, float], float],
    sign: str = "",
) -> str:
    """The median of each round's comparison, and its range."""
    values = [
        compare(getattr(a, name), getattr(b, name)) for a, b in zip(ours, theirs, strict=True)
    ]
    low, high = min(values), max(values)
    return f"{statistics.median(values):{sign}.3f} ({low:{sign}.2f} to {high:{sign}.2f})"


# ---------------------------------------------------------------- routers

GROUPS, MEMBERS, PREFIX, SUFFIX = 12, 6, 700, 60
"""Groups of prompts, requests of each, and words that are shared and not."""


def measure_routers(args: argparse.Namespace, model: Path, folder: Path) -> list[str]:
    """The second table: two engines and a router each."""
    rounds: Rounds = {}
    with (
        routed_pdserve(args.vllm, model, folder) as ours,
        routed_vllm(args.vllm, args.router, model, folder) as theirs,
    ):
        systems = [ours, *theirs]
        warm_up(systems, folder)
        for number in range(args.rounds):
            turn = number % len(systems)
            for system in systems[turn:] + systems[:turn]:
                flags = shared_prefixes(folder / "prompts.jsonl")
                sample = measured(system, flags, folder, args.patience)
                noted(rounds, "routed", system.name, sample)
    return routers_table(rounds, [system.name for system in systems])


def shared_prefixes(path: Path) -> list[str]:
    """Writes prompts that nobody has seen, in a random order, and returns the flags of the run."""
    source = random.Random()
    vocabulary = sorted(set(re.findall(r"[a-z]{3,}", (ROOT / "README.md").read_text())))
    prompts = []
    for _ in range(GROUPS):
        shared = " ".join(source.choices(vocabulary, k=PREFIX // 3))
        ends = (" ".join(source.choices(vocabulary, k=SUFFIX // 3)) for _ in range(MEMBERS))
        prompts += [f"{shared} {end}" for end in ends]
    source.shuffle(prompts)
    rows = [json.dumps({"prompt": prompt, "max_tokens": 16}) for prompt in prompts]
    path.write_text("\n".join(rows) + "\n")
    flags = ["--endpoint", "completions", "--prompts", str(path), "--concurrency", "4"]
    return [*flags, "--warmup", "0", "--requests", str(len(prompts))]


def routers_table(rounds: Rounds, arms: list[str]) -> list[str]:
    lines = [
        "| arm | prompt tokens | computed | computed share | TTFT mean / p50, ms | tokens/s "
        "| CPU s per 1,000 tokens | others, cores |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for arm in arms:
        got = rounds["routed", arm]
        share = statistics.median(sample.computed / sample.prompt for sample in got)
        lines.append(
            f"| {arm} | {middle(got, 'prompt'):,.0f} | {middle(got, 'computed'):,.0f} "
            f"| {share:.3f} | {middle(got, 'ttft'):.0f} / {middle(got, 'ttft50'):.0f} "
            f"| {middle(got, 'rate'):.1f} | {middle(got, 'cpu'):.1f} "
            f"| {middle(got, 'foreign'):.2f} |"
        )
    return lines


# ---------------------------------------------------------------- the report


def version_of(python: Path) -> str:
    """vLLM's version there."""
    code = "import vllm.version; print(vllm.version.__version__)"
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.split()[-1]


def report(args: argparse.Namespace, single: list[str], routers: list[str]) -> list[str]:
    """The page."""
    head = [
        "# Beside vLLM",
        "",
        f"vLLM {version_of(args.vllm)} for CPUs, a random model of 91 M parameters in bfloat16, "
        f"prompts of {PROMPT} tokens, answers of 32 to 96; {args.rounds} rounds. "
        "`bench/peers/vllm.py` says what is compared.",
        "",
        *(f"- {fact}" for fact in facts()),
        "",
    ]
    lines = [*head, "## One engine", "", *single]
    if routers:
        what = (
            f"{GROUPS} groups of {MEMBERS} prompts that share about {PREFIX} tokens, "
            "16 tokens of output, 4 streams, two engines with one core each."
        )
        lines += ["", "## Two engines and a router", "", what, "", *routers]
    return lines


def main() -> None:
    args = arguments()
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, args.nice)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model")
        children_cpu.note()
        single = measure_single(args, model, folder) if args.streams else []
        routers = measure_routers(args, model, folder) if args.router else []
    lines = report(args, single, routers)
    print("\n".join(lines))
    if args.write:
        args.write.write_text("\n".join(lines) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--router", type=Path, help="the program vllm-router")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds to wait for a quiet machine"
    )
    parser.add_argument("--nice", type=int, default=-8, help="of all processes")
    parser.add_argument("--write", type=Path, help="write the report there as Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
