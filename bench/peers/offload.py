"""KV below the device with vLLM for CPUs: pdserve's host tier, vLLM's own offload, LMCache.

    python -m bench.peers.offload [--vllm PYTHON] [--rounds N] [--write FILE]

PYTHON is the interpreter of an environment with vLLM and pdserve; LMCache is measured if it is
installed there, too. All arms serve one model with random weights (`bench.peers.vllm`) with the
same settings and as much host memory, and take turns. In a round, prompts that together are three
times the device's KV are asked for twice, in the same order: so the device has none of them when
they come back. Rounds repeat no prompt. An arm that does not start is told with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.frontend import free_port
from bench.machine import facts
from bench.pages import kept
from bench.peers import vllm as single
from bench.peers.vllm import BLOCK, ROOT, System, on_core, processes, prompt_tokens, settled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RESULT: Final = ROOT / "bench" / "results" / "offload.md"
_BY_HAND: Final = "## What it says"
"""The text from this heading on is written by hand and kept in the result."""
DEVICE: Final = 96 << 20
"""Bytes of the device's KV: 8,192 tokens of the model."""
HOST_GIB: Final = 1
PROMPTS, LENGTH, OUTPUT, STREAMS = 24, 1024, 8, 2
COMPUTES: Final = 1
"""The processor on which each arm's model computes, with one thread."""
_ERROR: Final = re.compile(r"^\(EngineCore.*?\b(\w*(?:Error|Exception): .*)$", re.M)
"""What the process of the engine says; that of the API only says that it has ended."""


@dataclass(frozen=True)
class Arm:
    """A system that is measured."""

    name: str
    flags: tuple[str, ...]
    extra: tuple[tuple[str, str], ...] = ()
    ours: bool = False


def transfer(connector: str) -> tuple[str, ...]:
    """vLLM's flags for a connector that stores and loads."""
    said = {"kv_connector": connector, "kv_role": "kv_both"}
    return ("--kv-transfer-config", json.dumps(said))


NATIVE: Final = ("--kv-offloading-size", str(HOST_GIB))
ARMS: Final = (
    Arm("pdserve, `--host-kv`", ("--host-kv", f"{HOST_GIB}GiB"), ours=True),
    Arm("pdserve without tiers", (), ours=True),
    Arm("vLLM without offload", ()),
    Arm("vLLM, `--kv-offloading-size`", NATIVE),
    Arm("vLLM, the same, simple", NATIVE, (("VLLM_USE_SIMPLE_KV_OFFLOAD", "1"),)),
    Arm(
        "vLLM with LMCache",
        transfer("LMCacheConnectorV1"),
        (
            ("LMCACHE_LOCAL_CPU", "True"),
            ("LMCACHE_MAX_LOCAL_CPU_SIZE", str(HOST_GIB)),
            ("LMCACHE_CHUNK_SIZE", str(BLOCK)),
        ),
    ),
)


@contextlib.contextmanager
def started(arm: Arm, python: Path, model: Path, log: Path) -> Iterator[System]:
    """The arm, answering. Raises `RuntimeError` with its error if it does not start."""
    port = free_port()
    flags = single.pdserve_flags(model) if arm.ours else single.vllm_flags(model, port)
    place = flags.index("--kv-memory" if arm.ours else "--kv-cache-memory-bytes") + 1
    flags[place] = str(DEVICE)
    program = ["-m", "pdserve", "--port", str(port)] if arm.ours else []
    command = [str(python), *program, *flags, *arm.flags]
    extra = {"PDSERVE_CONFIG": "none", "VLLM_NO_USAGE_STATS": "1", "PYTHONHASHSEED": "0"}
    # By itself vLLM keeps one core more for itself where a connector is, and on two cores then none
    # is left: so it computes with two threads in those arms, and with one in the others.
    extra |= on_core(COMPUTES)
    with processes([(command, extra | dict(arm.extra))], log) as pids:
        url = f"http://127.0.0.1:{port}"
        yield settled(System(arm.name, url, [f"{url}/metrics"], pids))


def reason(log: Path) -> str:
    """The last error of the engine in a log."""
    found = _ERROR.findall(log.read_text(errors="replace"))
    return found[-1] if found else "it gives no error"


def first_token(url: str, prompt: list[int]) -> float:
    """Seconds to the first token of a streamed completion; the whole answer is read."""
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    ask = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, first = time.perf_counter(), 0.0
    with urllib.request.urlopen(ask, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data:") and not first:
                first = time.perf_counter() - began
    return first


def ask_all(system: System, prompts: Sequence[list[int]]) -> dict[str, float]:
    """All prompts, `STREAMS` at a time: their times, and the tokens that were cached."""
    computed, whole = prompt_tokens(system)
    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as threads:
        times = list(threads.map(lambda prompt: first_token(system.url, prompt), prompts))
    wall = time.perf_counter() - began
    after = prompt_tokens(system)
    return {
        "ttft": 1e3 * statistics.median(times),
        "rate": sum(map(len, prompts)) / wall,
        "cached": (after[1] - whole) - (after[0] - computed),
    }


Figures = dict[str, list[dict[str, float]]]
"""Arm and pass -> a sample per round."""


def measure(systems: Sequence[System], rounds: int) -> Figures:
    """Every arm twice in each round, in another order each time."""
    figures: Figures = {}
    for number in range(rounds):
        draw = random.Random(number)
        prompts = [[draw.randrange(300, 1200) for _ in range(LENGTH)] for _ in range(PROMPTS)]
        first = number % len(systems)
        for system in (*systems[first:], *systems[:first]):
            for part in ("first", "again"):
                sample = ask_all(system, prompts)
                figures.setdefault(f"{system.name} {part}", []).append(sample)
                print(number, system.name, part, sample, file=sys.stderr, flush=True)
    return figures


def table(systems: Sequence[System], figures: Figures) -> list[str]:
    lines = [
        "| arm | cached tokens | TTFT at first, ms | TTFT again, ms | again / at first | "
        "prompt tokens/s at first | again |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for system in systems:
        first, again = (figures[f"{system.name} {part}"] for part in ("first", "again"))
        ratio = [b["ttft"] / a["ttft"] for a, b in zip(first, again, strict=True)]
        cells = [
            f"{statistics.median(each['cached'] for each in again):.0f}",
            text([each["ttft"] for each in first]),
            text([each["ttft"] for each in again]),
            text(ratio, "{:.2f}"),
            text([each["rate"] for each in first]),
            text([each["rate"] for each in again]),
        ]
        lines.append(f"| {system.name} | {' | '.join(cells)} |")
    return lines


def text(values: Sequence[float], form: str = "{:.0f}") -> str:
    """Median, lowest and highest."""
    parts = (statistics.median(values), min(values), max(values))
    middle, low, high = (form.format(value) for value in parts)
    return f"{middle} ({low} to {high})"


def main() -> None:
    """Start what starts, measure, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, default=RESULT)
    given = parser.parse_args()
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        model = single.write_model(Path(home) / "model")
        systems = []
        for number, arm in enumerate(ARMS):
            log = Path(home) / f"{number}.log"
            try:
                systems.append(stack.enter_context(started(arm, given.vllm, model, log)))
            except RuntimeError:
                failed.append(f"- {arm.name} does not start: `{reason(log)}`")
        load = os.getloadavg()[0]
        figures = measure(systems, given.rounds)
        page = [
            "# KV below the device, beside vLLM's own offload and LMCache",
            "",
            *(f"- {fact}" for fact in facts()),
            f"- Load of the machine before the first round: {load:.1f}",
            f"- `python -m bench.peers.offload --rounds {given.rounds}`: median, lowest to highest",
            "",
            f"{PROMPTS} prompts of {LENGTH} tokens, {STREAMS} at a time, {OUTPUT} tokens each, "
            f"asked for twice; the device has KV for {DEVICE // 12288:,} tokens, the host "
            f"{HOST_GIB} GiB. Random model of 91 M parameters in bfloat16; prompt tokens that were "
            "cached are what each engine's own counters say of the second time.",
            "",
            *table(systems, figures),
            *(["", *failed] if failed else []),
            "",
        ]
    written = "\n".join(page) + kept(given.write, _BY_HAND)
    given.write.write_text(written)
    print(written)


if __name__ == "__main__":
    main()
