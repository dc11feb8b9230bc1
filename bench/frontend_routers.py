"""Measures what frontends lose whose routers are their own, against one common router.

    python bench/frontend_routers.py --trace FILE [--speed S] [--seeds N] [--write FILE]

FILE is Mooncake's conversation trace. N frontends with one router, against N frontends that each
ask a router of their own (`--with-router`), N = 2, 4, 8. Replays in virtual time use production
code, and both arms see the same world: a busy machine does not change the figures. Load 1 is the
trace `--speed` times as fast, as in bench/policies.py, from which the meaning of a good request
comes, too.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from bench.policy_grid.cells import Scale
from bench.policy_grid.compare import difference, mean
from bench.policy_grid.report import first, good
from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.replay.run import replay
from pdserve.sim.workloads.mooncake import MooncakeTrace
from pdserve.sim.workloads.transform import TraceTransform, transform_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

FRONTENDS: Final = (2, 4, 8)
LOADS: Final = (0.75, 1.0, 1.2)
_KNEE: Final = 2.538
"""Load 1 of bench/results/policies.md."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of frontends at a load."""

    frontends: int
    load: float


def run(trace: Path, cell: Cell, seed: int, speed: float, *, own: bool) -> dict[str, Any]:
    """Replays one cell; returns the summary."""
    scale = Scale()
    config = ReplayConfig(
        workers=scale.workers,
        frontends=cell.frontends,
        routers=cell.frontends if own else 1,
        with_router=own,
        seed=seed,
        engine_options={"preset": "h100-8b"},
        noise=scale.noise,
        kv_tokens=scale.kv_tokens,
    )
    shape = TraceTransform(
        begin=0.5, jitter=3.0, speed=speed * cell.load, limit=scale.requests, seed=seed
    )
    found = replay(config, transform_trace(MooncakeTrace(trace), shape))
    summary: dict[str, Any] = found.plain(requests=False)["summary"]
    return summary


def row(cell: Cell, common: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]) -> str:
    """One row of the page."""
    less = difference([good(r) for r in own], [good(r) for r in common])
    later = difference([first(r) for r in own], [first(r) for r in common])
    return (
        f"| {cell.frontends} | {cell.load:g} | {mean([good(r) for r in common]):.1%} | "
        f"{mean([good(r) for r in own]):.1%} | {less.mean:+.1%} ({less.low:+.1%} to "
        f"{less.high:+.1%}) | {later.mean:+.1%} ({later.low:+.1%} to {later.high:+.1%}) |"
    )


PAGE: Final = """\
# Routers of frontends

{facts}
- Command: `python bench/frontend_routers.py --trace conversation_trace.jsonl`

N frontends ask one router, or each a router of its own (`--with-router`). 8 simulated workers,
{requests} requests of the second half of Mooncake's conversation trace, seeds 1 to {seeds}; the
same world for both arms, in virtual time. A request is good if its first token came within 1 s + 2
times its prefill on an idle worker. Differences are own against common, with a 95 % interval over
seeds.

| frontends | load | good, common | good, own | difference | mean time to first token |
|---:|---:|---:|---:|---:|---:|
{rows}
"""


def main() -> None:
    """Replays, prints and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--speed", type=float, default=_KNEE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    rows = []
    for count, load in product(FRONTENDS, LOADS):
        cell, seeds = Cell(count, load), range(1, options.seeds + 1)
        arms = [
            [run(options.trace, cell, seed, options.speed, own=own) for seed in seeds]
            for own in (False, True)
        ]
        rows.append(row(cell, *arms))
        print(rows[-1], flush=True)
    if options.write:
        lines = "\n".join(f"- {fact}" for fact in facts())
        page = PAGE.format(
            facts=lines, requests=Scale().requests, seeds=options.seeds, rows="\n".join(rows)
        )
        options.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
