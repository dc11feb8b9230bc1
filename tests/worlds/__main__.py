"""`python -m tests.worlds SEED`: run one world and print what happens in it; or many, see
`batch`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tests.worlds.batch import draw_mixed, read, run_blocks, total
from tests.worlds.handoff_scenarios import draw_handoffs
from tests.worlds.migration_scenarios import draw_migrations
from tests.worlds.planner.scenarios import draw_planners
from tests.worlds.run import WorldFailure, draw_plan, run_plan
from tests.worlds.tier_scenarios import draw_tiers

if TYPE_CHECKING:
    from tests.worlds.batch import BatchResult
    from tests.worlds.run import WorldPlan


def main() -> int:
    """Exit status 1 if a run breaks a rule."""
    options = _parser().parse_args()
    if options.log:
        logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s", stream=sys.stdout)
    else:
        logging.disable(logging.CRITICAL)
    if options.totals:
        return _sum_up(total(read(options.totals)))
    if options.seeds is not None:
        first, end = map(int, options.seeds.split(":"))
        draw = draw_planners if options.planner else draw_mixed
        return _sum_up(total(run_blocks(first, end, options.json, draw)))
    return _one(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.worlds", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--nodes", type=int, help="instead of what the seed draws")
    parser.add_argument("--handoffs", action="store_true", help="a world of handoffs")
    parser.add_argument("--migrations", action="store_true", help="a world of migrations")
    parser.add_argument("--tiers", action="store_true", help="a world of workers with tiers")
    parser.add_argument("--planner", action="store_true", help="a world with planners")
    parser.add_argument("--quiet", action="store_true", help="only how it went")
    parser.add_argument("--log", action="store_true", help="what the nodes log besides")
    parser.add_argument("--seeds", metavar="A:B", help="all worlds from A, before B")
    parser.add_argument("--json", type=Path, help="where their blocks are kept, and taken up from")
    parser.add_argument("--totals", type=Path, nargs="+", help="sum up such files")
    return parser


def _one(options: argparse.Namespace) -> int:
    plan = _plan(options)
    began = time.process_time()
    try:
        report = run_plan(plan, None if options.quiet else print)
    except WorldFailure as failure:
        print(failure)
        return 1
    print(f"{len(plan.roles)} nodes, {report.virtual:.1f} s, agreed after {report.converged:.1f} s")
    print("faults  ", dict(report.faults))
    print("felt    ", dict(report.effects))
    print("requests", dict(report.outcomes))
    print("tiers   ", dict(report.tiers))
    print(f"trace   {report.digest}, {time.process_time() - began:.1f} s of CPU")
    return 0


def _plan(options: argparse.Namespace) -> WorldPlan:
    if options.handoffs:
        return draw_handoffs(options.seed)
    if options.tiers:
        return draw_tiers(options.seed)
    if options.planner:
        return draw_planners(options.seed)
    if options.migrations:
        return draw_migrations(options.seed)
    return draw_plan(options.seed, options.nodes)


def _sum_up(block: BatchResult) -> int:
    """Writes the sums as JSON. The exit status does not depend on coverage, since few seeds need
    not have it."""
    words = {**msgspec.to_builtins(block), "missing": block.missing, "too_few": block.too_few}
    print(msgspec.json.format(msgspec.json.encode(words)).decode())
    return 1 if block.failures or block.too_few else 0


if __name__ == "__main__":
    raise SystemExit(main())
