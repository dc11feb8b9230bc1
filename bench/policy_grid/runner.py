"""Runs cells in processes and keeps each result as one line of a file.

A later run reuses a line if its cell, its scale and the sources are the same. So an interrupted run
resumes, and a run after a change of the code starts anew."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pdserve
from bench.atomic_tiers import AtomicCluster, AtomicTiers, anywhere, by_prefix
from bench.policy_grid.cells import Arm, Scale, World
from bench.policy_grid.losses import Ledger, atomic_losses, losses
from pdserve.kv.tiers.admission import HostAdmission
from pdserve.kv.tiers.eviction import EvictionOrder
from pdserve.perf_model.step_time import preset_of
from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.replay.run import replay
from pdserve.sim.workloads.generate import generator
from pdserve.sim.workloads.mooncake import BLOCK, MooncakeTrace
from pdserve.sim.workloads.trace_file import open_trace
from pdserve.sim.workloads.transform import TraceTransform, transform_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdserve.sim.workloads.trace_request import TraceRequest

__all__ = ["Runner", "requests_of", "run_one"]

Job = tuple[World, Arm, int, float]
"""(world, arm, seed, speed of the trace)."""
Result = dict[str, Any]

_NICE = 10
_TELL_EVERY = 10
_MORE = 2.5
"""Workloads with short prompts have so many times the requests of a replay."""
_AGENTS = {"context": "24000", "step_input": "4000", "output": "150", "pause": "1"}
"""Coding agents: their contexts together are several times what the devices hold."""
_AGENTS_WORKERS = 2
"""Each program waits for its answers, so that no speed is too much for eight workers."""
_MIDDLE = 0.45
"""Where the middle of the trace begins, as a share of its time."""


class Traces(NamedTuple):
    """The files of the workloads that are not generated."""

    conversation: Path
    code: Path | None = None


class Runner:
    """Runs cells in processes and keeps their results in a file."""

    def __init__(
        self, trace: Path, scale: Scale, data: Path, processes: int, *, code: Path | None = None
    ) -> None:
        self._traces = Traces(trace, code)
        self._scale = scale
        self._data = data
        self._sources = sources()
        self._known = self._read()
        self._pool = multiprocessing.get_context("spawn").Pool(processes, initializer=_be_nice)
        self.seconds = 0.0
        """Process seconds that the known results took, in earlier runs too."""

    @property
    def code(self) -> Path | None:
        """Azure's code trace, if there is one."""
        return self._traces.code

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()
        self._pool.join()

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Returns results in the order of `jobs`."""
        keys = [self._key(job) for job in jobs]
        missing = [
            (key, job) for key, job in zip(keys, jobs, strict=True) if key not in self._known
        ]
        todo = [(self._traces, self._scale, key, job) for key, job in dict(missing).items()]
        if todo:
            self._fill(todo)
        self.seconds += sum(self._known[key]["seconds"] for key in dict.fromkeys(keys))
        return [self._known[key]["result"] for key in keys]

    def known(self, jobs: Sequence[Job]) -> list[Result | None]:
        """Returns what earlier runs have found, in the order of `jobs`; runs nothing."""
        lines = [self._known.get(self._key(job)) for job in jobs]
        self.seconds += sum(line["seconds"] for line in lines if line is not None)
        return [None if line is None else line["result"] for line in lines]

    def _fill(self, todo: list[tuple[Traces, Scale, str, Job]]) -> None:
        self._data.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with self._data.open("a", encoding="utf-8") as file:
            for count, line in enumerate(self._pool.imap_unordered(_run_line, todo), 1):
                file.write(json.dumps(line) + "\n")
                file.flush()
                self._known[line["key"]] = line
                if count % _TELL_EVERY == 0:
                    took = time.monotonic() - began
                    rest = took / count * (len(todo) - count)
                    print(f"{count}/{len(todo)}, {rest:.0f} s to go", file=sys.stderr)

    def _key(self, job: Job) -> str:
        world, arm, seed, speed = job
        tiers = [arm.host_tokens, arm.fetch]
        what = [asdict(world), arm.policy, dict(arm.options), dict(arm.router), tiers, seed]
        text = json.dumps([self._sources, asdict(self._scale), what, round(speed, 6)])
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


def sources() -> str:
    """A digest of the code, which is part of a result's key."""
    root = Path(pdserve.__file__).parent
    digest = hashlib.sha256()
    for path in _files((root, root.parent / "engines")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _files(folders: Iterable[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def _be_nice() -> None:
    os.nice(_NICE)


def _run_line(task: tuple[Traces, Scale, str, Job]) -> dict[str, Any]:
    traces, scale, key, job = task
    began = time.process_time()
    result = run_one(traces, scale, job)
    return {"key": key, "result": result, "seconds": time.process_time() - began}


def run_one(traces: Traces, scale: Scale, job: Job) -> Result:
    """Runs one replay and returns its summary."""
    world, arm, seed, _ = job
    config = ReplayConfig(
        workers=workers_of(world, scale),
        routers=world.routers,
        frontends=1 if world.routers == 1 else 3 * world.routers,
        policy=arm.policy,
        policy_options=arm.options,
        router_options=arm.router,
        seed=seed,
        engine_options={"preset": world.preset},
        slow_share=0.25 if world.slow else 0.0,
        slow_factor=2.0,
        noise=scale.noise,
        kv_tokens=scale.kv_tokens,
        host_kv=arm.host_tokens * preset_of(world.preset).shape.token_bytes,
        kv_fetch=arm.fetch,
    )
    ledger = Ledger(BLOCK)
    result = replay(config, requests_of(traces, scale, job), watch=ledger)
    plain = result.plain(requests=False)
    numbers: Result = plain["summary"]
    numbers["host"] = [worker["tiers"].get("host", {}) for worker in plain["workers"]]
    numbers["fetches"] = _sum(worker["fetches"] for worker in plain["workers"])
    numbers["losses"] = dict(losses(ledger.changes, ledger.looks(result.records)))
    numbers["atomic"] = dict(atomic_losses(ledger, atomic_cluster(scale, arm)))
    return numbers


def workers_of(world: World, scale: Scale) -> int:
    """How many workers a cell has."""
    return min(_AGENTS_WORKERS, scale.workers) if world.workload == "agentic" else scale.workers


def requests_of(traces: Traces, scale: Scale, job: Job) -> Iterator[TraceRequest]:
    """What the clients of a cell send. A seed gives the same requests to all arms."""
    world, _, seed, speed = job
    shape = TraceTransform(speed=speed * world.load, limit=scale.requests, seed=seed)
    more = round(scale.requests * _MORE)
    match world.workload:
        case "conversation":
            begin = 0.0 if world.tuning or world.whole else 0.5
            end = 0.5 if world.tuning else 1.0
            part = replace(shape, begin=begin, end=end, jitter=world.jitter)
            return transform_trace(MooncakeTrace(traces.conversation), part)
        case "middle":
            part = replace(shape, begin=_MIDDLE, jitter=world.jitter, limit=more)
            return transform_trace(MooncakeTrace(traces.conversation), part)
        case "code":
            assert traces.code is not None
            return transform_trace(open_trace(traces.code), replace(shape, begin=0.5, limit=more))
        case "agentic":
            made = generator("agentic", {"requests": str(scale.requests), **_AGENTS}, seed=seed)
            return transform_trace(made, shape)
        case kind:
            made = generator(kind, {"requests": str(more)}, seed=seed)
            return transform_trace(made, replace(shape, limit=more))


def _sum(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for part in parts:
        total.update(part)
    return dict(total)


def atomic_cluster(scale: Scale, arm: Arm) -> AtomicCluster:
    """The workers of an arm, for requests that take no time. A policy that looks at prefixes goes
    to the worker with most of the prompt, among those that have served at most a tenth more than
    the mean."""
    device, host = scale.kv_tokens // BLOCK, arm.host_tokens // BLOCK
    workers = [
        AtomicTiers(
            device, host, order=EvictionOrder(), admission=HostAdmission("auto", max(1, host))
        )
        for _ in range(scale.workers)
    ]
    route = anywhere() if arm.policy == "random" else by_prefix(1.1)
    return AtomicCluster(workers, route, pool=arm.fetch != "never")
