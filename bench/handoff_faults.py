"""Measures what a client sees when its prefill worker dies in the middle of a transfer.

    python bench/handoff_faults.py [--rounds N] [--write bench/results/handoff_faults.md]

Real processes with `--engine=sim`, whose KV has content: two prefill workers, one decode worker, a
router and a frontend on one machine. When some KV of a prompt has arrived, its prefill worker is
killed or stopped. The scenarios and their rules are in tests/chaos/test_handoffs.py; this program
only measures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from tests.chaos.cluster import Cluster, Node
from tests.chaos.test_handoffs import Roles, free, sending, sent

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
STEPS = 40
"""Number of blocks of a prompt; each takes a tenth of a second."""
SCENARIOS = {
    "undisturbed": "nothing happens",
    "killed": "kill -9, another prefill worker is there",
    "only": "kill -9, it was the only one: the decode worker computes",
    "engine": "kill -9 of its engine process alone",
    "frozen": "SIGSTOP for good, another prefill worker is there",
}
ROWS: dict[str, list[tuple[float, float]]] = {name: [] for name in SCENARIOS}
"""Seconds by scenario: (from the request to the first token, from the fault to the first token)."""


def first_token(
    roles: Roles, decode: Node, prefills: list[Node], fault: Callable[[Node], object] | None
) -> tuple[tuple[float, float], Node | None]:
    """Sends the prompt that the fault hits, and measures its first token."""
    before = {node.name: sent(node) for node in prefills}
    text = roles.prompt(STEPS)
    began = time.monotonic()
    stream = roles.stream(decode, text)
    victim, hit = None, began
    if fault is not None:
        victim = sending(prefills, before)
        fault(victim)
        hit = time.monotonic()
    stream.wait_tokens(1)
    now = time.monotonic()
    roles.check(text, stream)
    return (now - began, now - hit), victim


def note(name: str, sample: tuple[float, float]) -> None:
    ROWS[name].append(sample)
    print(f"{name:<12} first token after {sample[0]:.3f} s, {sample[1]:.3f} s after the fault")


def measure(rounds: int) -> None:
    """Runs all scenarios."""
    with tempfile.TemporaryDirectory() as home:
        cluster = Cluster(Path(home))
        try:
            run(Roles(cluster), rounds)
        finally:
            cluster.close(looking=False)


def run(roles: Roles, rounds: int) -> None:
    decode = roles.decode("d1")
    prefills = {name: roles.prefill(name) for name in ("p1", "p2")}

    def ready() -> list[Node]:
        for name, node in prefills.items():
            if node.killed:
                prefills[name] = roles.prefill(name)
        roles.wait_ready(decode)
        free(decode, *prefills.values())
        return list(prefills.values())

    for _ in range(rounds):
        note("undisturbed", first_token(roles, decode, ready(), None)[0])
        sample, _ = first_token(roles, decode, ready(), Node.kill)
        note("killed", sample)
        (left,) = (node for node in prefills.values() if not node.killed)
        note("only", first_token(roles, decode, [left], Node.kill)[0])
        note("engine", first_token(roles, decode, ready(), lambda node: node.core().kill())[0])
        sample, victim = first_token(roles, decode, ready(), Node.pause)
        note("frozen", sample)
        assert victim is not None
        victim.resume()
        victim.kill()


def row(name: str) -> str:
    undisturbed = statistics.median(total for total, _ in ROWS["undisturbed"])
    totals = [total for total, _ in ROWS[name]]
    after = [rest for _, rest in ROWS[name]]
    columns = [totals]
    if name != "undisturbed":
        columns.append(after)
    if name in ("killed", "engine", "frozen"):  # another prefill worker computes the prompt again
        columns.append([rest - undisturbed for rest in after])
    cells = [f"{of(values):.2f}" for values in columns for of in (statistics.median, max)]
    cells += [""] * (6 - len(cells))
    return f"| {SCENARIOS[name]} | {' | '.join(cells)} | {len(totals)} |"


def report() -> str:
    """Returns the result file."""
    machine = "\n".join(f"- {fact}" for fact in facts())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    rows = "\n".join(row(name) for name in SCENARIOS)
    return f"""# A prefill worker that dies in the middle of a transfer

The first token of one prompt of about {STEPS} blocks, whose prefill takes a tenth of a second for
each; the fault comes when some of its KV has arrived at the decode worker. Seconds, median and
worst. Every text was compared with that of a worker which does everything by itself. Repeat with
`python bench/handoff_faults.py`.

{machine}
- Load averages at the end: {load} (other work ran on the machine)

| | after the request | worst | after the fault | worst | of that, not computing | worst | samples |
|---|---:|---:|---:|---:|---:|---:|---:|
{rows}

The prompt is computed anew from its beginning. "Not computing" is what is left when the time of an
undisturbed prompt is taken away: until the fault was noticed, and until the next worker had it. A
process that ends is noticed by its connections; one that stands still by the cluster's pings, or by
the attempt's lease of 6 s, whichever is first. The decode worker's own engine is fifteen times as
fast as the prefill workers' here.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path, default=HERE / "results" / "handoff_faults.md")
    options = parser.parse_args()
    measure(options.rounds)
    options.write.write_text(report())


if __name__ == "__main__":
    main()
