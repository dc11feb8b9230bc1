"""The whole server on an accelerator: the same answers in every layout, and load on a real size.

    python bench/gpu/serve.py --out DIR               # needs a GPU, and no installation
    python bench/gpu/serve.py --device cpu --dry      # on a CPU, with a small model and load

First the bundled model answers the same greedy prompts in float32: on the CPU, on the device in one
process, and on the device with prefill and decode in different processes. The answers must be
equal, all prompts must be prefilled remotely, and the decode worker must have received KV by the
expected transfer. Then a model of a real size with random weights in bfloat16 is put under load by
`pdserve bench`, and half as long again, not streamed, for the times that the server tells.
The exit status is 1 if an answer differs, the KV came another way, or a server did not start.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.servers import OWN_TIMES, Server, free_port, metric, served
from bench.machine import facts

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT = (
    "A decode worker takes requests and produces their tokens, a prefill worker computes their "
    "prompts, and between the two the KV moves block by block, while it is computed. "
)
PROMPTS = [f"{number}: " + TEXT * (1 + number % 3) for number in range(8)]
TOKENS = 24
"""Tokens of each answer that is compared."""
LOADS = ((1, 8), (16, 64), (64, 192))
"""Callers and requests of each load."""
DRY_LOADS = ((1, 4), (4, 8))
DRY_MODEL = "small-llama"
INPUT, OUTPUT = 512, 128
"""Tokens of a load's prompts and answers."""
LOAD_LIMIT = 120.0
"""Seconds of the longest load."""
KV = "512MiB"
"""KV of each worker whose answers are compared; several share the device."""


@dataclass(slots=True)
class Report:
    """All results."""

    device: str
    model: str
    """The model of the loads."""
    answers: dict[str, str] = field(default_factory=dict)
    """Layout -> how its answers compare with the CPU's."""
    loads: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    logs: list[str] = field(default_factory=list)
    """Of all servers; they are written to a file of their own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything, prints, writes. Returns the exit status."""
    options = _arguments(arguments)
    transfer = options.transfer or ("cuda_ipc" if options.device == "cuda" else "shm")
    report = Report(options.device, DRY_MODEL if options.dry else options.model)
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            _compare_layouts(options.device, transfer, folder, report)
            _load(options.device, folder, report, DRY_LOADS if options.dry else LOADS)
    finally:
        report.seconds = time.perf_counter() - begin
        _write(report, options.out)
    return 1 if report.failures else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transfer", help="between processes [cuda_ipc on cuda, otherwise shm]")
    parser.add_argument("--model", default="llama-3.2-1b", help="of the load [%(default)s]")
    parser.add_argument("--out", type=Path, help="folder for gpu_serve.json and gpu_serve.log")
    parser.add_argument("--dry", action="store_true", help="a small model, little load")
    return parser.parse_args(arguments)


def _write(report: Report, folder: Path | None) -> None:
    for name, found in report.answers.items():
        print(f"{name}: {found}")
    for failure in report.failures:
        print("FAILED", failure)
    print(f"{report.seconds:.0f} s")
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    told = asdict(report)
    (folder / "gpu_serve.log").write_text("\n".join(told.pop("logs")))
    text = json.dumps(told | {"machine": list(facts())}, indent=2)
    (folder / "gpu_serve.json").write_text(text + "\n")


# ---------------------------------------------------------------- the same answers everywhere


def _compare_layouts(device: str, transfer: str, folder: Path, report: Report) -> None:
    """Compares the answers of each layout with those of one process on the CPU."""
    with served(folder, "cpu", report.logs) as server:
        flags = ("--port", str(server.port), "--device", "cpu", "--dtype", "float32")
        server.start("all", *flags, "--aggregated")
        try:
            server.wait()
            expected = [server.complete(prompt, TOKENS)[0] for prompt in PROMPTS]
        except OSError as error:  # TimeoutError is one
            report.failures.append(f"the CPU's answers: {error}\n{server.logs()}")
            return
    with served(folder, "one-process", report.logs) as server:
        flags = ("--port", str(server.port), "--device", device, "--dtype", "float32")
        server.start("all", *flags, "--disagg", "always", "--kv-memory", KV)
        _compare("prefill and decode in one process", server, expected, report)
    with served(folder, "processes", report.logs) as server:
        metrics = _start_apart(server, device, transfer)
        _compare(f"prefill and decode by {transfer}", server, expected, report)
        _check_received(metrics, transfer, report)


def _start_apart(server: Server, device: str, transfer: str) -> int:
    """Starts a router, a frontend, a prefill and a decode worker. Returns the decode worker's
    metrics port."""
    listen = f"127.0.0.1:{free_port()}"
    metrics = free_port()
    compute = ("--device", device, "--dtype", "float32", "--kv-memory", KV)
    join = ("--join", listen)
    server.start("router", "--role=router", "--listen", listen)
    worker = ("--role=worker", "--transfer", transfer, *compute, *join)
    server.start("prefill", *worker, "--mode=prefill")
    decode = ("--mode=decode", "--disagg=always", "--metrics-port", str(metrics))
    server.start("decode", *worker, *decode)
    server.start("frontend", "--role=frontend", "--port", str(server.port), *join)
    return metrics


def _compare(name: str, server: Server, expected: Sequence[str], report: Report) -> None:
    """Asks for all answers, and notes what is not as expected."""
    try:
        server.wait(remote=True)
        answers = [server.complete(prompt, TOKENS) for prompt in PROMPTS]
    except OSError as error:  # TimeoutError is one
        report.failures.append(f"{name}: {error}\n{server.logs()}")
        return
    equal = sum(text == wanted for (text, _), wanted in zip(answers, expected, strict=True))
    prefills = [prefill for _, prefill in answers]
    remote = sum(prefill.startswith("remote") for prefill in prefills)
    report.answers[name] = f"{equal} of {len(expected)} equal, {remote} prefilled remotely"
    if equal < len(expected):
        report.failures.append(f"{name}: {equal} of {len(expected)} answers are equal")
    if remote < len(expected):
        report.failures.append(f"{name}: prefill was {sorted(set(prefills))}\n{server.logs()}")


def _check_received(metrics: int, transfer: str, report: Report) -> None:
    """Checks that the decode worker has received bytes by this transfer."""
    labels = {"backend": transfer, "direction": "received"}
    try:
        received = metric(metrics, "pdserve_transfer_bytes_total", **labels)
    except OSError as error:
        report.failures.append(f"the decode worker's metrics: {error}")
        return
    report.answers[f"bytes received by {transfer}"] = f"{received:,.0f}"
    if not received:
        report.failures.append(f"the decode worker has received nothing by {transfer}")


# ---------------------------------------------------------------- load on a real size


def _load(device: str, folder: Path, report: Report, loads: Sequence[tuple[int, int]]) -> None:
    """Puts one worker under the load of several numbers of callers."""
    made = _write_model(report.model, folder, device)
    with served(folder, "load", report.logs) as server:
        flags = ("--model", str(made), "--device", device, "--port", str(server.port))
        server.start("all", *flags, "--aggregated", "--dtype", "bfloat16")
        try:
            server.wait()
        except TimeoutError as error:
            report.failures.append(f"load on {report.model}: {error}")
            return
        for seed, (callers, requests) in enumerate(loads):
            load = _run_bench(server, callers, requests, seed, report)
            load["own"] = _own_times(server, callers, requests // 2, seed, report)
            report.loads.append(load)


def _write_model(name: str, folder: Path, device: str) -> Path:
    """Writes a checkpoint with random weights and a tokenizer with text for every token."""
    from bench.gpu import shapes

    made = folder / name
    made.mkdir()
    shapes.write_filled(shapes.SHAPES[name], made, device)
    shapes.write_tokenizer(shapes.SHAPES[name], made)
    return made


def _run_bench(
    server: Server, callers: int, requests: int, seed: int, report: Report
) -> dict[str, Any]:
    """Runs a closed loop and returns its summary. Loads of different seeds share no prompts, so
    nothing comes from the cache."""
    file = server.folder / f"bench-{callers}.json"
    command = [sys.executable, "-m", "pdserve", "bench", "--url", server.url, "--ignore-eos"]
    command += ["--concurrency", str(callers), "--requests", str(requests), "--seed", str(seed)]
    command += ["--input-tokens", str(INPUT), "--output-tokens", str(OUTPUT)]
    command += ["--json", str(file)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LOAD_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        report.failures.append(f"bench with {callers}: not done in {LOAD_LIMIT:.0f} s")
        return {"callers": callers}
    print(done.stdout[-1500:], flush=True)
    if done.returncode or not file.exists():
        report.failures.append(f"bench with {callers}: {done.stderr[-800:]}\n{server.logs()}")
        return {"callers": callers}
    return {"callers": callers, "summary": json.loads(file.read_text())["summary"]}


def _own_times(
    server: Server, callers: int, requests: int, seed: int, report: Report
) -> dict[str, float]:
    """Returns the medians of the times that the server tells of itself under the same load, in
    milliseconds."""
    rng = random.Random(f"own times, {seed}")
    prompts = [rng.choices(range(100, 1200), k=INPUT) for _ in range(requests)]
    try:
        with ThreadPoolExecutor(callers) as pool:
            told = list(pool.map(lambda prompt: server.own_times(prompt, OUTPUT), prompts))
    except (OSError, KeyError) as error:  # TimeoutError is an OSError
        report.failures.append(f"own times with {callers} callers: {error!r}\n{server.logs()}")
        return {}
    found = {name: statistics.median(each[name] for each in told) for name in OWN_TIMES}
    words = ", ".join(f"{name.removesuffix('_ms')} {value:.1f} ms" for name, value in found.items())
    print(f"the server's own medians with {callers} callers: {words}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
