"""`python -m pdserve.sim SEED`: run one world and print what happens in it."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from pdserve.sim.handoffs import draw_handoffs
from pdserve.sim.run import Failure, draw_plan, run_plan


def main() -> int:
    """Exit status 1 if the run breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.sim", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--nodes", type=int, help="instead of what the seed draws")
    parser.add_argument("--handoffs", action="store_true", help="a world of handoffs")
    parser.add_argument("--quiet", action="store_true", help="only how it went")
    parser.add_argument("--log", action="store_true", help="what the nodes log besides")
    options = parser.parse_args()
    if options.log:
        logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s", stream=sys.stdout)
    else:
        logging.disable(logging.CRITICAL)
    if options.handoffs:
        plan = draw_handoffs(options.seed)
    else:
        plan = draw_plan(options.seed, options.nodes)
    began = time.process_time()
    try:
        report = run_plan(plan, None if options.quiet else print)
    except Failure as failure:
        print(failure)
        return 1
    print(f"{len(plan.roles)} nodes, {report.virtual:.1f} s, agreed after {report.converged:.1f} s")
    print("faults  ", dict(report.faults))
    print("felt    ", dict(report.effects))
    print("requests", dict(report.outcomes))
    print(f"trace   {report.digest}, {time.process_time() - began:.1f} s of CPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
