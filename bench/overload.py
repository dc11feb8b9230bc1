"""Measures how much of an overload is still served in time.

    python bench/overload.py [--seconds 40] [--runs 3] [--only WORDS] [--live] [--write]

Goodput is the number of requests per second whose first token comes within a limit, and whose mean
time between tokens is within another limit. For clients that state no limit, it is the number of
requests per second that complete within the server's time limit. The knee is the highest load of a
sweep at which at least 90 % of the requests are served in this way. The result is the goodput at
twice and at four times that load, as a share of the goodput at the knee. Clients either state when
they need their first token (the header x-pdserve-slo-ttft-ms), or state nothing and have the
server's own time limit. A refused client does not try again.

In virtual time, the production frontends' dispatch, routers and workers run on simulated engines;
the figures depend only on code and seed. `--live` uses real processes on this machine: a router, a
frontend, and two workers with `engine=sim` that is slow enough; those figures depend on the
machine's other work. `--write` writes all runs to bench/results/overload.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.replay.metrics import quantile
from pdserve.sim.replay.run import replay
from pdserve.sim.workloads.trace_request import TraceRequest
from tests.chaos.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.ids import Seconds

RESULT: Final = Path(__file__).parent / "results" / "overload.md"
TTFT: Final[Seconds] = 2.0
"""Longest useful time to the first token."""
ITL: Final[Seconds] = 0.1
"""Longest useful mean time between tokens."""
WARM: Final[Seconds] = 10.0
"""Warm-up at half the capacity, which is not counted; routers learn how long prompts take."""
SERVED: Final = 0.9
"""Share of requests that are served in time up to the knee."""
STEP: Final = 1.2
"""Factor from one load of the sweep to the next."""


@dataclass(frozen=True, slots=True)
class Load:
    """The lengths of the requests, and the first load."""

    title: str
    prompt: tuple[int, float, int]
    """Median, sigma and maximum of a lognormal distribution of tokens."""
    output: tuple[int, float, int]
    begin: float
    """Requests per second and worker at which a sweep begins: about half the knee."""

    def draw(self, random: Random) -> tuple[int, int]:
        """Draws the prompt and output tokens of a request."""
        return _draw(random, *self.prompt), _draw(random, *self.output)


def _draw(random: Random, median: int, sigma: float, most: int) -> int:
    return max(1, min(most, round(median * random.lognormvariate(0, sigma))))


SLOWDOWN: Final = 8.0
"""Slowdown of the engines in real processes, so that this machine's cores are not the limit."""
SETTLE: Final = 0.5
"""Share of the time in which completions do not count, because the load has just changed."""
CHAT: Final = Load("chat", (600, 1.0, 8000), (150, 0.7, 1000), 22.0)
SLOW: Final = Load("chat", (300, 0.8, 4000), (40, 0.6, 200), 3.0)
LONG: Final = Load("long prompts", (4000, 0.8, 30000), (60, 0.6, 400), 4.0)


@dataclass(frozen=True, slots=True)
class Point:
    """The results of one run at one load."""

    offered: float
    """Offered requests per second."""
    good: float
    """Requests per second that were served in time."""
    outcomes: Counter[str]
    late: int
    """Completed requests whose first token came too late."""
    slow: int
    """Completed requests with a first token in time and slow tokens after it."""
    ttft: float
    """Time to first token of completed requests, 90th percentile."""


@dataclass(frozen=True, slots=True)
class Case:
    """The settings of one curve."""

    load: Load
    says: bool
    """True if clients state when they need their first token."""
    patience: Seconds = 600.0
    """The server's time limit."""
    workers: int = 2
    routers: int = 1

    @property
    def begin(self) -> float:
        """The sweep's first load in requests per second."""
        return self.load.begin * self.workers

    @property
    def title(self) -> str:
        said = f"SLO {TTFT:g} s said" if self.says else f"nothing said, limit {self.patience:g} s"
        return f"{self.load.title}, {self.workers} workers, {self.routers} routers, {said}"


def trace(case: Case, rate: float, warm: float, seconds: Seconds, seed: int) -> list[TraceRequest]:
    """Poisson arrivals: `warm` per second at first, then `rate`."""
    random = Random(f"overload {seed}")
    made: list[TraceRequest] = []
    now, end = 0.0, WARM + seconds
    while (now := now + random.expovariate(warm if now < WARM else rate)) < end:
        prompt, output = case.load.draw(random)
        number = len(made)
        slo = TTFT if case.says else None
        made.append(TraceRequest(number, now, ((number, prompt),), output, slo_ttft=slo))
    return made


def _window(end: Seconds, seconds: Seconds) -> bool:
    return WARM + SETTLE * seconds <= end <= WARM + seconds


def simulated(case: Case, rate: float, warm: float, seconds: Seconds, seed: int) -> Point:
    """Runs one load in virtual time."""
    config = ReplayConfig(
        workers=case.workers,
        routers=case.routers,
        frontends=4 * case.routers,
        patience=case.patience,
        seed=seed,
        block_size=64,
    )
    records = replay(config, iter(trace(case, rate, warm, seconds, seed))).records
    if case.says:
        counted = [record for record in records if record.arrival >= WARM]
    else:  # requests that wait at the end are served later, and say nothing about the rate
        counted = [record for record in records if _window(record.end, seconds)]
    done = [record for record in counted if record.completed]
    in_time = [record for record in done if record.ttft <= (TTFT if case.says else case.patience)]
    good = [record for record in in_time if record.itl <= ITL]
    return Point(
        sum(record.arrival >= WARM for record in records) / seconds,
        len(good) / (seconds if case.says else seconds * (1 - SETTLE)),
        Counter(record.outcome for record in counted),
        len(done) - len(in_time),
        len(in_time) - len(good),
        quantile(sorted(record.ttft for record in done), 0.9),
    )


# ---------------------------------------------------------------------- one curve


@dataclass(frozen=True, slots=True)
class Curve:
    """The results of one case."""

    case: Case
    sweep: list[Point]
    knee: float
    """Offered load at the knee."""
    at: dict[int, list[Point]]
    """Runs by multiple of the knee."""

    def goodput(self, times: int) -> float:
        """The median of the runs."""
        return statistics.median(point.good for point in self.at[times])

    def share(self, times: int) -> float:
        """Goodput as a share of the goodput at the knee."""
        return self.goodput(times) / self.goodput(1)


def curve(case: Case, run: Callable[[float, float, int], Point], runs: int) -> Curve:
    """Finds the knee and measures its multiples. `run` takes a rate, the warm-up rate and a
    seed."""
    sweep: list[Point] = []
    rate, below = case.begin, 0
    while below < 2:
        point = run(rate, rate / 2, 1)
        show(case, point)
        sweep.append(point)
        below = below + 1 if point.good < SERVED * point.offered else 0
        rate *= STEP
    within = [point.offered for point in sweep if point.good >= SERVED * point.offered]
    knee = max(within, default=sweep[0].offered)
    at = {}
    for times in (1, 2, 4):
        at[times] = [run(times * knee, knee / 2, 100 + seed) for seed in range(runs)]
        show(case, *at[times])
    return Curve(case, sweep, knee, at)


def show(case: Case, *points: Point) -> None:
    """Prints a point."""
    for point in points:
        words = ", ".join(f"{word} {times}" for word, times in sorted(point.outcomes.items()))
        print(
            f"{case.title}: {point.offered:7.1f}/s good {point.good:7.1f}/s "
            f"late {point.late} slow {point.slow} p90 {point.ttft:.2f} s; {words}",
            flush=True,
        )


# ---------------------------------------------------------------------- real processes


def live(case: Case, rate: float, warm: float, seconds: Seconds, seed: int, url: str) -> Point:
    """Runs one load against a running frontend, on the wall clock."""
    asked = trace(case, rate, warm, seconds, seed)
    found = asyncio.run(_ask_all(case, asked, url))
    if case.says:
        counted = [one for one in found if one.at >= WARM]
    else:
        counted = [one for one in found if _window(one.end, seconds)]
    done = [one for one in counted if one.outcome == "completed"]
    in_time = [one for one in done if one.ttft <= (TTFT if case.says else case.patience)]
    good = [one for one in in_time if one.itl <= ITL]
    return Point(
        sum(request.at >= WARM for request in asked) / seconds,
        len(good) / (seconds if case.says else seconds * (1 - SETTLE)),
        Counter(one.outcome for one in counted),
        len(done) - len(in_time),
        len(in_time) - len(good),
        quantile(sorted(one.ttft for one in done), 0.9),
    )


@dataclass(slots=True)
class Seen:
    """One request as its client saw it; seconds since the beginning of the run."""

    at: Seconds
    ttft: Seconds = -1.0
    itl: Seconds = 0.0
    end: Seconds = 0.0
    outcome: str = ""


async def _ask_all(case: Case, asked: Sequence[TraceRequest], url: str) -> list[Seen]:
    timeout = aiohttp.ClientTimeout(total=case.patience + 60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        begin = time.monotonic() + 0.2
        tasks = [asyncio.create_task(_ask(session, url, begin, request)) for request in asked]
        return await asyncio.gather(*tasks)


async def _ask(
    session: aiohttp.ClientSession, url: str, begin: Seconds, request: TraceRequest
) -> Seen:
    seen = Seen(request.at)
    await asyncio.sleep(begin + request.at - time.monotonic())
    began, tokens = time.monotonic(), 0
    ((content, length),) = request.pieces
    body = {
        "prompt": ([50 + content // 1100 % 1100, 50 + content % 1100] * (length // 2 + 1))[:length],
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    said = request.slo_ttft
    headers = {} if said is None else {"x-pdserve-slo-ttft-ms": f"{1000 * said:.0f}"}
    try:
        async with session.post(url, json=body, headers=headers) as response:
            seen.outcome = str(response.status)
            async for line in response.content:
                if line.startswith(b"data: {"):
                    seen.outcome = "error" if b'"error"' in line[:12] else seen.outcome
                    tokens += 1
                    if seen.ttft < 0:
                        seen.ttft = time.monotonic() - began
                elif line.startswith(b"data: [DONE]"):
                    seen.outcome = "completed"
    except (aiohttp.ClientError, TimeoutError):
        seen.outcome = "lost"
    took = time.monotonic() - began
    seen.end = request.at + took
    if tokens > 1:
        seen.itl = (took - seen.ttft) / (tokens - 1)
    return seen


@contextlib.contextmanager
def standing(case: Case) -> Iterator[str]:
    """Starts a cluster of real processes and gives its URL."""
    options = [f"slowdown={SLOWDOWN}", "max_len=32768", "preset=h100-8b"]
    flags = [flag for option in options for flag in ("--engine-option", option)]
    with tempfile.TemporaryDirectory() as home:
        cluster = Cluster(Path(home))
        try:
            cluster.router()
            for _ in range(case.workers):
                where = ("--join", cluster.address, "--engine", "sim", *flags)
                cluster.start("worker", "", *where, "--block-size", "64")
            frontend = cluster.frontend("--request-timeout", f"{case.patience:g}s")
            cluster.wait_ready()
            time.sleep(2.0)
            yield f"{frontend.url}/v1/completions"
        finally:
            cluster.close(looking=False)


# ---------------------------------------------------------------------- the page


HEAD: Final = """\
# Goodput under overload

{facts}

Requests per second that are served well: those of clients that say by when they need their first
token ({ttft:g} s) count if it comes by then and their tokens follow within {itl:g} s on average;
those of others if they complete within the server's time limit. The *knee* is the highest load of
a sweep (steps of {step:.0%}) at which {served:.0%} of what is asked is served so. Chat: prompts of
600 tokens at the median, up to 8,000, outputs of 150; long prompts: 4,000, up to 30,000, outputs of
60. Engines: preset `h100-8b`. {seconds:g} s after {warm:g} s of warm-up at half the knee; medians
of {runs} seeds. Nobody who is refused asks again. Rows of *simulated* clusters are virtual time and
do not depend on the machine; *live* ones are real processes whose engines take {slow:g} times as
long. A share above 100 %: what is refused first is what takes longest, so what is left is shorter.

Repeat with `{command}`.

| cluster | knee, requests/s | goodput there | at 2 times | share | at 4 times | share |
|---|---:|---:|---:|---:|---:|---:|
"""


def row(found: Curve, how: str) -> str:
    """A row of the table."""
    cells = [f"{found.knee:.1f}", f"{found.goodput(1):.1f}"]
    for times in (2, 4):
        cells += [f"{found.goodput(times):.1f}", f"{found.share(times):.0%}"]
    return f"| {how}: {found.case.title} | " + " | ".join(cells) + " |"


def main() -> None:
    """Sweeps, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose titles have these words")
    parser.add_argument("--live", action="store_true", help="real processes too")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    seconds, rows = options.seconds, []
    for case in CASES:
        if options.only in case.title:
            simulating = partial(_simulating, case, seconds)
            rows.append(row(curve(case, simulating, options.runs), "simulated"))
            print(rows[-1], flush=True)
    for case in LIVE if options.live else ():
        if options.only in case.title:
            with standing(case) as url:
                rows.append(
                    row(curve(case, partial(_asking, case, seconds, url), options.runs), "live")
                )
            print(rows[-1], flush=True)
    if options.write:
        head = HEAD.format(
            facts="\n".join(f"- {fact}" for fact in facts()),
            ttft=TTFT,
            itl=ITL,
            step=STEP - 1,
            served=SERVED,
            seconds=seconds,
            warm=WARM,
            runs=options.runs,
            slow=SLOWDOWN,
            command=" ".join(["python bench/overload.py", *sys.argv[1:]]),
        )
        RESULT.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


def _simulating(case: Case, seconds: Seconds, rate: float, warm: float, seed: int) -> Point:
    return simulated(case, rate, warm, seconds, seed)


def _asking(case: Case, seconds: Seconds, url: str, rate: float, warm: float, seed: int) -> Point:
    return live(case, rate, warm, seconds, seed, url)


CASES: Final = (
    Case(CHAT, True),
    Case(CHAT, False, 60.0),
    Case(CHAT, False, 10.0),
    Case(LONG, True),
    Case(LONG, False, 60.0),
    Case(CHAT, True, workers=8, routers=2),
)
LIVE: Final = (Case(SLOW, True), Case(SLOW, False, 20.0))

if __name__ == "__main__":
    main()
