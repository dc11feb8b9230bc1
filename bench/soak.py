"""Measures whether pdserve's memory grows over a long life: tables by process, with slopes.

    python bench/soak.py requests  [--count 1000000]   short requests, none like another
    python bench/soak.py members   [--count 10000]     nodes that join and leave or crash
    python bench/soak.py streams   [--count 2000]      streams that stay open for minutes
    python bench/soak.py handoffs  [--count 20000]     prompts computed on one worker for another

Real processes run on this machine. The scenes and their rules are in tests/soak; this program runs
them in full. `--json FILE` keeps every sample. The exit status is 1 if a process has grown by more
than the bytes per piece of work that count as a leak, and by more than an allocator and full logs
may take.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from tests.chaos.cluster import Cluster
from tests.soak import scenes
from tests.soak.memory import leaks
from tests.soak.test_long_life import LEAK, NOISE

COUNTS = {"requests": 1_000_000, "members": 10_000, "streams": 2_000, "handoffs": 20_000}
PORTIONS = {"requests": 80, "members": 50, "streams": 8, "handoffs": 40}
"""Number of portions of each scene; samples are taken after each portion."""


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scene", choices=sorted(COUNTS))
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--portions", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    count = options.count or COUNTS[options.scene]
    scene = getattr(scenes, options.scene)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            watch = scene(
                cluster,
                Path(folder),
                count=count,
                portions=options.portions or PORTIONS[options.scene],
                seed=options.seed,
                say=say,
            )
        finally:
            cluster.close(looking=False)
    if options.json:
        lines = {line.name: [asdict(s) for s in line.samples] for line in watch.lines}
        options.json.write_text(json.dumps(lines))
    print("\n".join(f"- {fact}" for fact in facts()))
    print(f"\n{count:,} in {(time.monotonic() - began) / 60:.0f} minutes\n")
    print(watch.table(scenes.UNITS[options.scene]))
    found = leaks(watch.lines, per_piece=LEAK, noise=NOISE)
    print("\n" + "\n".join(found or ["No process leaks."]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
