"""Many worlds: counted in blocks, so that a long run can be divided and taken up again.

    python -m tests.worlds --seeds 0:500 --json worlds.json
    python -m tests.worlds --seeds 500:1000 --json more.json
    python -m tests.worlds --totals worlds.json more.json

Of five seeds in a row two are worlds as `run` draws them, one is of handoffs, one of migrations,
one of tiers; every fiftieth is large. A block that a file has already is not run again.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from tests.worlds.faults import KINDS
from tests.worlds.handoff_scenarios import draw_handoffs
from tests.worlds.migration_scenarios import draw_migrations
from tests.worlds.oracle.coverage import count_visits, unvisited_cells
from tests.worlds.oracle.outcomes import too_few
from tests.worlds.run import WorldFailure, draw_plan, run_plan
from tests.worlds.tier_scenarios import draw_tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tests.worlds.oracle.coverage import Cells
    from tests.worlds.run import WorldPlan

__all__ = ["BatchResult", "draw_mixed", "read", "run_block", "run_blocks", "total"]

_BLOCK = 50
_LARGE = 20
"""Nodes."""
_LEAST, _ENOUGH = 0.4, 20
"""Share of requests that must complete, over so many worlds and more: more than half do."""


class BatchResult(msgspec.Struct):
    """What some worlds in a row have come to."""

    first: int
    count: int
    cells: dict[str, int] = {}
    """Visits, by `state: event`."""
    faults: dict[str, int] = {}
    felt: dict[str, int] = {}
    outcomes: dict[str, int] = {}
    cancelled: dict[str, int] = {}
    """Clients that turned away, by where their requests were."""
    failures: list[str] = []
    virtual: float = 0.0
    """Seconds."""
    cpu: float = 0.0

    def __str__(self) -> str:
        words = f"{self.count} worlds, {len(self.failures)} failures"
        return f"seeds {self.first} to {self.first + self.count - 1}: {words}, {self.cpu:.0f} s"

    @property
    def too_few(self) -> str:
        """Why the share of requests that completed is too small, in words; empty: it is not, or
        there are too few worlds to tell."""
        return too_few(self.outcomes, _LEAST) if self.count >= _ENOUGH else ""

    @property
    def missing(self) -> list[str]:
        """Cells that no world visited, and faults without an effect."""
        cells: Cells = Counter({_cell(words): n for words, n in self.cells.items()})
        return unvisited_cells(cells) + sorted(
            f"fault {kind}" for kind in KINDS.keys() - self.felt.keys()
        )


def _cell(words: str) -> tuple[str, str]:
    state, _, event = words.rpartition(": ")
    return state, event


def draw_mixed(seed: int) -> WorldPlan:
    """What a seed stands for in a long run."""
    match seed % 5:
        case 2:
            return draw_handoffs(seed)
        case 3:
            return draw_migrations(seed)
        case 4:
            return draw_tiers(seed)
    return draw_plan(seed, nodes=_LARGE if seed % 50 == 1 else None)


def run_block(first: int, count: int, draw: Callable[[int], WorldPlan] = draw_mixed) -> BatchResult:
    """Runs some worlds; notes failures and raises none."""
    began = time.process_time()
    cells: Cells = Counter()
    faults: Counter[str] = Counter()
    felt: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    cancelled: Counter[str] = Counter()
    block = BatchResult(first, count)
    with count_visits(cells):
        for seed in range(first, first + count):
            try:
                report = run_plan(draw(seed))
            except WorldFailure as failure:
                block.failures.append(str(failure))
                continue
            faults += report.faults
            felt += report.effects
            outcomes += report.outcomes
            cancelled += report.cancelled
            block.virtual += report.virtual
    block.cells = {f"{state}: {event}": n for (state, event), n in sorted(cells.items())}
    block.faults, block.felt = dict(faults), dict(felt)
    block.outcomes, block.cancelled = dict(outcomes), dict(cancelled)
    block.cpu = time.process_time() - began
    return block


def run_blocks(
    first: int, end: int, file: Path | None, draw: Callable[[int], WorldPlan] = draw_mixed
) -> list[BatchResult]:
    """All seeds from `first`, before `end`; each block is printed and written when it is done."""
    blocks = read([file]) if file is not None and file.exists() else []
    done = {(block.first, block.count) for block in blocks}
    for start in range(first, end, _BLOCK):
        count = min(_BLOCK, end - start)
        if (start, count) in done:
            continue
        block = run_block(start, count, draw)
        print(block, flush=True)
        for failure in block.failures:
            print(failure, flush=True)
        blocks.append(block)
        if file is not None:
            file.write_bytes(msgspec.json.encode(blocks))
    return blocks


def read(files: Iterable[Path]) -> list[BatchResult]:
    """Reads the results of earlier runs."""
    return [
        b for file in files for b in msgspec.json.decode(file.read_bytes(), type=list[BatchResult])
    ]


def total(blocks: list[BatchResult]) -> BatchResult:
    """All of them as one."""
    whole = BatchResult(min((b.first for b in blocks), default=0), sum(b.count for b in blocks))
    for name in ("cells", "faults", "felt", "outcomes", "cancelled"):
        counts: Counter[str] = sum((Counter(getattr(b, name)) for b in blocks), Counter())
        setattr(whole, name, dict(sorted(counts.items())))
    whole.failures = [failure for block in blocks for failure in block.failures]
    whole.virtual = sum(block.virtual for block in blocks)
    whole.cpu = sum(block.cpu for block in blocks)
    return whole
