"""Compares real processes on the wall clock with the simulator, on the same requests.

    python bench/live_policies.py --trace FILE [--policies A,B] [--requests N] [--write PAGE]

A router, workers with `engine=sim` and a frontend run as processes of this machine. A client sends
the requests over HTTP at the trace's times, streams the answers and measures them. The code of
`pdserve simulate` then replays the same requests for the same cluster. Both rank the policies by
mean time to first token; Kendall's tau says how far they agree. Real processes share this machine's
cores, which the simulator does not know. So their times are longer, and only the order is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from bench.policy_grid.compare import kendall, mean
from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.replay.metrics import quantile
from pdserve.sim.replay.run import replay
from pdserve.sim.workloads.mooncake import BLOCK, MooncakeTrace
from pdserve.sim.workloads.trace_request import length_of
from pdserve.sim.workloads.transform import TraceTransform, transform_trace
from tests.chaos.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.sim.workloads.trace_request import TraceRequest

_POLICIES: Final = "ttft,kv_load,least_loaded,random"
_FIRST, _BASE = 50, 1200
"""The range of the prompts' token ids. All models have them, also the bundled one with 1,280."""
_PATIENCE: Final = 120.0
_LONGEST: Final = 32_000


@dataclass(frozen=True, slots=True)
class Seen:
    """The results of one policy in one of the two ways."""

    firsts: list[float]
    """Times to first token."""
    failed: int
    hits: float
    """Share of the prompt tokens that came from a cache."""

    @property
    def mean(self) -> float:
        return mean(self.firsts)

    def at(self, share: float) -> float:
        return quantile(sorted(self.firsts), share)


def prompt_of(request: TraceRequest) -> list[int]:
    """Makes a prompt's tokens like `traces.base.tokens_of`, with ids of a small vocabulary."""
    tokens: list[int] = []
    for content, count in request.pieces:
        high, low = divmod(content, _BASE)
        tokens += ([_FIRST + low, _FIRST + high] * (count // 2 + 1))[:count]
    return tokens


class Caller:
    """Sends all requests of one policy's run."""

    def __init__(self, url: str, model: str) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self.firsts: list[float] = []
        self.failed = 0
        self.prompt_tokens = self.cached_tokens = 0

    async def run(self, requests: Sequence[TraceRequest]) -> None:
        """Sends each request at its time."""
        timeout = aiohttp.ClientTimeout(total=_PATIENCE)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            begin = time.monotonic() + 0.5
            tasks = [
                asyncio.create_task(self._ask(session, request, begin + request.at))
                for request in requests
            ]
            await asyncio.gather(*tasks)

    async def _ask(
        self, session: aiohttp.ClientSession, request: TraceRequest, moment: float
    ) -> None:
        await asyncio.sleep(moment - time.monotonic())
        body = {
            "model": self._model,
            "prompt": prompt_of(request),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first = time.monotonic(), 0.0
        try:
            async with session.post(self._url, json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        first = first or time.monotonic() - began
                        self._count(line)
        except (aiohttp.ClientError, TimeoutError) as error:
            print(f"a request failed: {error!r}", file=sys.stderr)
            self.failed += 1
            return
        self.firsts.append(first)

    def _count(self, line: bytes) -> None:
        if b'"prompt_tokens"' not in line:
            return
        usage = json.loads(line[6:]).get("usage")
        if usage:
            self.prompt_tokens += usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens += details.get("cached_tokens", 0)

    @property
    def seen(self) -> Seen:
        return Seen(self.firsts, self.failed, self.cached_tokens / max(1, self.prompt_tokens))


def live(policy: str, requests: Sequence[TraceRequest], options: argparse.Namespace) -> Seen:
    """Runs the policy with processes that are started for it."""
    engine = [f"blocks={options.kv_tokens // BLOCK}", "max_len=262144", "preset=h100-8b"]
    flags = [flag for option in engine for flag in ("--engine-option", option)]
    with tempfile.TemporaryDirectory() as home:
        cluster = Cluster(Path(home))
        try:
            cluster.router("--policy", policy)
            for _ in range(options.workers):
                where = ("--join", cluster.address, "--engine", "sim", *flags)
                cluster.start("worker", "", *where, "--block-size", str(BLOCK))
            frontend = cluster.frontend()
            cluster.wait_ready()
            time.sleep(2.0)
            _, models = frontend.get("/v1/models")
            caller = Caller(frontend.url, models["data"][0]["id"])
            asyncio.run(caller.run(requests))
            return caller.seen
        finally:
            cluster.close(looking=False)


def simulated(policy: str, requests: Sequence[TraceRequest], options: argparse.Namespace) -> Seen:
    """Runs the policy in the simulator."""
    config = ReplayConfig(workers=options.workers, policy=policy, kv_tokens=options.kv_tokens)
    result = replay(config, iter(requests))
    done = [record for record in result.records if record.completed]
    failed = len(result.records) - len(done)
    return Seen([record.ttft for record in done], failed, result.summary["hit_rate"])


def chosen(options: argparse.Namespace) -> list[TraceRequest]:
    """Returns the slice of the trace without very long prompts, which would have to be sent as
    JSON."""
    trace = MooncakeTrace(options.trace)
    short = [request for request in trace if length_of(request.pieces) <= _LONGEST]
    shape = TraceTransform(begin=0.5, jitter=3.0, speed=options.speed, limit=options.requests)
    return list(transform_trace(short, shape))


def main() -> int:
    """Runs both ways and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, required=True, help="conversation_trace.jsonl")
    parser.add_argument("--policies", default=_POLICIES)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--speed", type=float, default=1.4)
    parser.add_argument("--kv-tokens", type=int, default=2_000_000)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    requests = chosen(options)
    rows: dict[str, tuple[Seen, Seen]] = {}
    for policy in options.policies.split(","):
        rows[policy] = (live(policy, requests, options), simulated(policy, requests, options))
        for way, seen in zip(("live", "simulated"), rows[policy], strict=True):
            print(f"{policy} {way}: {seen.mean:.3f} s, {seen.failed} failed", file=sys.stderr)
    text = page(rows, requests, options)
    print(text)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    return 0


def page(
    rows: dict[str, tuple[Seen, Seen]],
    requests: Sequence[TraceRequest],
    options: argparse.Namespace,
) -> str:
    """Returns the result page."""
    lives, sims = zip(*rows.values(), strict=True)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = [
        "# Policies, live and simulated",
        "",
        f"{len(requests)} requests of Mooncake's conversation trace (second half, jittered, "
        f"{options.speed:g}x, prompts up to {_LONGEST:,} tokens), {options.workers} workers with "
        f"`engine=sim`, preset h100-8b, {options.kv_tokens / 1e6:g} M tokens of KV each. Live: a "
        "process for each role and each engine, HTTP, the wall clock. Simulated: the same requests "
        "in virtual time. Repeat with `python bench/live_policies.py --trace FILE`.",
        "",
        *(f"- {fact}" for fact in facts()),
        f"- load averages at the end: {load} (other work may have run on the machine)",
        "",
        "| policy | TTFT mean s, live | simulated | p90, live | simulated | hits, live "
        "| simulated | failed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for policy, (real, sim) in rows.items():
        lines.append(
            f"| {policy} | {real.mean:.3f} | {sim.mean:.3f} | {real.at(0.9):.3f} "
            f"| {sim.at(0.9):.3f} | {real.hits:.1%} | {sim.hits:.1%} "
            f"| {real.failed} + {sim.failed} |"
        )
    tau = kendall([one.mean for one in lives], [one.mean for one in sims])
    tail = kendall([one.at(0.9) for one in lives], [one.at(0.9) for one in sims])
    lines += ["", f"Kendall's tau of the rankings: {tau:.2f} by mean, {tail:.2f} by p90.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
