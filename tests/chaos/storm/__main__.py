"""`python -m tests.chaos.storm`: one storm for as long as one likes, and its report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from bench.machine import facts
from tests.chaos.storm import report, schedule
from tests.chaos.storm.storm import Wishes, run
from tests.chaos.storm.storm_requests import Sizes


def main() -> int:
    """0 if nothing was lost; else 1, and what is known of it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.storm",
        description="Faults on a cluster of real processes under load; every answer is checked.",
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="of faults and load")
    parser.add_argument("--seed", default=os.environ.get("PDSERVE_TEST_SEED", "0"))
    parser.add_argument("--engine", choices=["sim", "torch"], default="sim")
    parser.add_argument("--streams", type=int, default=0, help="requests at once")
    parser.add_argument("--every", type=float, default=2.5, help="seconds between two faults")
    parser.add_argument("--kinds", default="", help="only these faults, separated by commas")
    parser.add_argument("--report", type=Path, help="a page; beside it the same as JSON")
    options = parser.parse_args()
    kinds = tuple(kind for kind in options.kinds.split(",") if kind)
    if unknown := set(kinds) - set(schedule.BY_NAME):
        parser.error(
            f"no such fault: {', '.join(unknown)}; there are {', '.join(schedule.BY_NAME)}"
        )
    small = options.engine == "torch"
    storm = run(
        Wishes(
            options.seed,
            options.seconds,
            options.engine,
            options.streams or (24 if small else 220),
            options.every,
            kinds,
            Sizes(60, 20, 300, (100, 400)) if small else Sizes(),
            say=lambda line: print(line, flush=True),
        )
    )
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    about = [*facts(), f"Load averages at the end: {load}"]
    page = report.markdown(storm, about)
    if options.report is not None:
        options.report.write_text(page)
        content = json.dumps(report.as_json(storm), indent=2)
        options.report.with_suffix(".json").write_text(content + "\n")
    print(page)
    if storm.problems:
        print(report.failure(storm), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
