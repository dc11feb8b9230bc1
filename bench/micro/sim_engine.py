"""Measures what a simulated request costs the engine: CPU seconds of core, scheduler and pool.

    python bench/micro/sim_engine.py [--profile]

Prompts of 12,000 new tokens with 343 output tokens each (the means of the Mooncake conversation
trace) arrive as a Poisson process, in virtual time on one worker of preset h200-8b. Block hashes
come with the request, as a frontend sends them. Times are CPU times of this process, so that a busy
machine matters less. Writes bench/results/sim_engine.md.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import time
from dataclasses import dataclass
from pathlib import Path

from bench.machine import facts
from pdserve import accel
from pdserve.blocks.hashing import hash_secret_id, joined_hashes, prompt_root
from pdserve.clock import ManualClock
from pdserve.engine_core.engine_loader import load_core
from pdserve.messages.engine import EngineSpec, Submit
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids

RESULT = Path(__file__).parent.parent / "results" / "sim_engine.md"
SECRET = bytes(32)
PROMPT, OUTPUT, REQUESTS = 12_000, 343, 60
CASES = [
    (block, rate, steps) for block in (64, 512) for rate in (1.0, 2.5) for steps in (1, 32, 1000)
]
ROUNDS = 3


@dataclass
class Cost:
    cpu: float
    """CPU seconds per request."""
    calls: float
    """Steps of the core per request."""
    batch: float
    """Mean number of sequences of a step."""
    faster: float
    """How many times faster than real time this one worker runs, by CPU time."""


def requests(block_size: int, model: str) -> list[GenerateRequest]:
    rng = random.Random(1)
    found = []
    for number in range(REQUESTS):
        prompt = rng.choices(range(4, 32_000), k=PROMPT)
        root = prompt_root(SECRET, model, "")
        found.append(
            GenerateRequest(
                request_id=str(number),
                model="m",
                prompt=token_ids(prompt),
                sampling=SamplingParams(max_tokens=OUTPUT, eos_token_ids=(2,)),
                block_names=joined_hashes(prompt, block_size, parent=root, secret=SECRET),
                names_id=hash_secret_id(SECRET),
            )
        )
    return found


def live(block_size: int, rate: float, steps: int) -> Cost:
    """Runs a core under Poisson arrivals."""
    clock = ManualClock()
    core = load_core("sim", clock)
    options = {"vocab": "32000", "preset": "h200-8b", "steps_at_once": str(steps)}
    spec = EngineSpec(
        engine="sim",
        model="",
        block_size=block_size,
        max_batch_tokens=8192,
        hash_secret=SECRET,
        options=options,
    )
    capabilities = core.load(spec, lambda progress: None)
    todo = requests(block_size, capabilities.compat_hash)
    rng = random.Random(2)
    calls = 0
    at = 0.0
    gc.collect()
    begin = time.process_time()
    for handle, request in enumerate(todo):
        at += rng.expovariate(rate)
        while core.has_work or ((due := core.wake_at()) is not None and due <= at):
            if not core.has_work and due is not None:
                clock.advance(max(0.0, due - clock.now()))
            core.step()
            calls += 1
        clock.advance(max(0.0, at - clock.now()))
        core.handle(Submit(handle=handle, request=request))
    while core.has_work or (due := core.wake_at()) is not None:
        if not core.has_work and due is not None:
            clock.advance(max(0.0, due - clock.now()) + 1e-9)
        core.step()
        calls += 1
    cpu = time.process_time() - begin
    stats = core.stats()  # type: ignore[attr-defined]
    assert stats.finished == REQUESTS
    assert core.close() == 0
    batch = stats.output_tokens / stats.steps
    return Cost(cpu / REQUESTS, calls / REQUESTS, batch, clock.now() / cpu)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", action="store_true", help="one case, by function")
    if parser.parse_args().profile:
        profile = cProfile.Profile()
        profile.enable()
        live(64, 1.0, 1000)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    lines = [
        "# What a simulated request costs the engine",
        "",
        f"{PROMPT:,} prompt tokens, none of them cached, {OUTPUT} output tokens, one worker; the",
        f"best of {ROUNDS} rounds in CPU time, on a busy machine. Repeat with "
        "`python bench/micro/sim_engine.py`.",
        "",
        *(f"- {fact}" for fact in facts()),
        f"- {accel.describe()}",
        "",
        "| block | requests/s | steps at once | mean batch | CPU ms per request | core steps "
        "per request | times real time |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for block, rate, steps in CASES:
        costs = [live(block, rate, steps) for _ in range(ROUNDS)]
        cost = min(costs, key=lambda cost: cost.cpu)
        lines.append(
            f"| {block} | {rate} | {steps} | {cost.batch:.1f} | {cost.cpu * 1000:.2f} "
            f"| {cost.calls:.1f} | {cost.faster:.0f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
