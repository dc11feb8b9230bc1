"""Runs cells in processes and keeps each result as one line of a file, so that an interrupted run
goes on.

A line holds for the load's requests and for the arm's own sources: the rules of the benchmark, or
the product's planner. The rest of the product may differ between two lines, so each names the
commit that it was made with, and the page lists them; a new file measures all anew.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pdserve
from bench.machine import commit
from bench.planner_arms.cells import MOST, PLANNERS, SHARE, SLOTS, run_one
from bench.planner_arms.loads import load_of, requests

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bench.planner_arms.cells import Cell

__all__ = ["Results"]

_NICE: Final = 15
_RULES: Final = ("aibrix", "base", "driver", "dynamo", "fixed", "hpa", "llm_d")
_PLANNING: Final = (*PLANNERS, "clairvoyant")
"""Arms that use the product's planner."""


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """What was found, by cell."""

    def __init__(self, data: Path, files: Mapping[str, Path] = MappingProxyType({})) -> None:
        """`files`: public traces by name; cells of others do not run."""
        self._data, self._files = data, dict(files)
        self._rules = _digest(Path(__file__).parent / f"{name}.py" for name in _RULES)
        planner = Path(pdserve.__file__).parent / "planner"
        decisions = [one for one in planner.rglob("*.py") if "actuators" not in one.parts]
        self._planner = _digest([Path(__file__).parent / "clairvoyant.py", *decisions])
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

    def commits(self, cells: Sequence[Cell]) -> Counter[str]:
        """How many of the results were made with which commit."""
        lines = [self._lines.get(self._key(cell)) for cell in cells]
        return Counter(line["commit"] for line in lines if line)

    def run(self, cells: Sequence[Cell], processes: int) -> None:
        """Runs what is missing; 0 `processes`: in this one."""
        known = self.known(cells)
        todo = [
            (self._key(cell), cell, self._files)
            for cell in cells
            if cell not in known and self._can(cell)
        ]
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

    def _can(self, cell: Cell) -> bool:
        part = load_of(cell.load).part
        return part is None or part.name in self._files

    def _key(self, cell: Cell) -> str:
        sources = self._planner if cell.arm in _PLANNING else self._rules
        text = json.dumps([sources, SLOTS, MOST, SHARE, asdict(cell), _world(cell.load, cell.seed)])
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def _world(load: str, seed: int) -> list[str]:
    """What decides the requests and the cluster of a load, as text."""
    found = load_of(load)
    cluster = f"{found.initial} {found.compressed:g} {found.split} {found.step:g}"
    if found.part is not None:
        return [cluster, repr(found.part)]
    digest = hashlib.sha256()
    for one in requests(found, seed, {}):
        digest.update(repr((one.at, one.pieces, one.output_tokens)).encode())
    return [cluster, digest.hexdigest()[:16]]


def _be_nice() -> None:
    os.nice(_NICE)


def _run_line(task: tuple[str, Cell, Mapping[str, Path]]) -> dict[str, Any]:
    key, cell, files = task
    began = time.process_time()
    result = run_one(cell, files)
    return {
        "key": key,
        "cell": asdict(cell),
        "commit": commit(),
        "seconds": time.process_time() - began,
        "result": result,
    }
