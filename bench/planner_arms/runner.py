"""Runs cells in processes and keeps each result as one line of a file, so that an interrupted run
goes on. A line holds for the sources that it was made with."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.planner_arms.cells import run_one
from bench.policy_grid.runner import sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.planner_arms.cells import Cell

__all__ = ["Results"]

_NICE: Final = 19
_PAGE: Final = "report.py"
"""What it says does not change what was measured."""


def _digest() -> str:
    """A digest of the product and of the arms."""
    digest = hashlib.sha256(sources().encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name != _PAGE:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """What was found, by cell."""

    def __init__(self, data: Path) -> None:
        self._data, self._sources = data, _digest()
        self._lines: dict[str, dict[str, Any]] = {}
        if data.exists():
            for text in data.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # a killed run may leave half a line
                self._lines[line["key"]] = line

    def known(self, cells: Sequence[Cell]) -> dict[Cell, dict[str, Any]]:
        """Results that there are."""
        keys = {cell: self._key(cell) for cell in cells}
        return {c: self._lines[k]["result"] for c, k in keys.items() if k in self._lines}

    def cpu(self, cells: Sequence[Cell]) -> float:
        """Process seconds that they took."""
        lines = [self._lines.get(self._key(cell)) for cell in cells]
        return float(sum(line["seconds"] for line in lines if line))

    def run(self, cells: Sequence[Cell], processes: int) -> None:
        """Runs what is missing; 0 `processes`: in this one."""
        known = self.known(cells)
        todo = [(self._key(cell), cell) for cell in cells if cell not in known]
        if not processes:
            self._keep(map(_run_line, todo))
            return
        context = multiprocessing.get_context("spawn")
        with context.Pool(processes, initializer=_be_nice) as pool:
            self._keep(pool.imap_unordered(_run_line, todo))

    def _keep(self, lines: Iterable[dict[str, Any]]) -> None:
        self._data.parent.mkdir(parents=True, exist_ok=True)
        with self._data.open("a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")
                file.flush()
                self._lines[line["key"]] = line
                print(line["cell"], f"{line['seconds']:.0f} s of CPU", file=sys.stderr)

    def _key(self, cell: Cell) -> str:
        text = json.dumps([self._sources, asdict(cell)])
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def _be_nice() -> None:
    os.nice(_NICE)


def _run_line(task: tuple[str, Cell]) -> dict[str, Any]:
    key, cell = task
    began = time.process_time()
    result = run_one(cell)
    seconds = time.process_time() - began
    return {"key": key, "cell": asdict(cell), "result": result, "seconds": seconds}
