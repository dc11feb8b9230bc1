"""Runs cells in processes and keeps each result as one line; see `policy_grid.runner`."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from bench.disagg_grid.cells import Arm, Scale, World, mix
from bench.disagg_grid.switching import switching
from bench.policy_grid.runner import sources
from pdserve.sim.replay.config import ReplayConfig, ReplaySlo
from pdserve.sim.replay.run import replay

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Job", "Result", "Runner", "run_one"]

Job = tuple[World, Arm, int, float]
"""(world, arm, seed, requests per second)."""
Result = dict[str, Any]

_NICE = 5
_TELL_EVERY = 20


class Runner:
    """Runs cells in processes and keeps their results in a file."""

    def __init__(self, scale: Scale, data: Path, processes: int) -> None:
        self._scale = scale
        self._data = data
        self._sources = sources()
        self._known = self._read()
        self._pool = multiprocessing.get_context("spawn").Pool(processes, initializer=_be_nice)
        self._asked: set[str] = set()

    @property
    def seconds(self) -> float:
        """Process seconds that all results so far took, in earlier runs too."""
        return float(sum(self._known[key]["seconds"] for key in self._asked))

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()
        self._pool.join()

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Returns results in the order of `jobs`."""
        keys = [self._key(job) for job in jobs]
        missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in self._known}
        if missing:  # one seed after the other, so that an interrupted run has all cells
            todo = sorted(missing.items(), key=lambda item: item[1][2])
            self._fill([(self._scale, key, job) for key, job in todo])
        self._asked.update(keys)
        return [self._known[key]["result"] for key in keys]

    def known(self, jobs: Sequence[Job]) -> list[Result] | None:
        """The results if there are all of them; runs nothing."""
        return self.run(jobs) if all(self._key(job) in self._known for job in jobs) else None

    def _fill(self, todo: list[tuple[Scale, str, Job]]) -> None:
        self._data.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with self._data.open("a", encoding="utf-8") as file:
            for count, line in enumerate(self._pool.imap_unordered(_run_line, todo), 1):
                file.write(json.dumps(line) + "\n")
                file.flush()
                self._known[line["key"]] = line
                if count % _TELL_EVERY == 0:
                    rest = (time.monotonic() - began) / count * (len(todo) - count)
                    print(f"{count}/{len(todo)}, {rest:.0f} s to go", file=sys.stderr)

    def _key(self, job: Job) -> str:
        world, arm, seed, rate = job
        what = [asdict(world), asdict(arm), seed, round(rate, 6)]
        text = json.dumps([self._sources, asdict(replace(self._scale, seeds=0)), what])
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def _read(self) -> dict[str, Any]:
        known: dict[str, Any] = {}
        if self._data.exists():
            for text in self._data.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # a killed run may leave half a line
                known[line["key"]] = line
        return known


def _be_nice() -> None:
    os.nice(_NICE)


def _run_line(task: tuple[Scale, str, Job]) -> dict[str, Any]:
    scale, key, job = task
    began = time.process_time()
    return {"key": key, "result": run_one(scale, job), "seconds": time.process_time() - began}


def run_one(scale: Scale, job: Job) -> Result:
    """Runs one replay and returns its summary."""
    world, arm, seed, rate = job
    config = ReplayConfig(
        workers=arm.workers,
        prefill=arm.prefill,
        decode=arm.decode,
        disagg=arm.disagg,
        bandwidth=world.bandwidth,
        policy="ttft",
        policy_options=arm.options,
        seed=seed,
        engine_options={"preset": world.kind.preset},
        noise=scale.noise,
        block_size=256,
        kv_tokens=scale.kv_tokens,
        warm_up=scale.warm_up,
        scaling=arm.planned,
        slo=ReplaySlo(ttft=world.kind.ttft, cold=2.0, itl=world.kind.itl),
    )
    planner = switching(world, scale) if arm.planned else None
    result = replay(config, mix(scale, rate * world.load, seed), scaler=planner)
    numbers: Result = result.plain(requests=False)["summary"]
    return numbers
