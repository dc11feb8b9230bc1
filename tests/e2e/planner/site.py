"""A router, a frontend, an agent, and planners that come and go: real processes.

All times of the planner file are a tenth of what a cluster has, or less.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from tests.chaos.cluster import Cluster, eventually, look_at
from tests.e2e import agent_workers
from tests.e2e.commands import pdserve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pdserve.agent.records import WorkerRecord
    from tests.chaos.cluster import Node

__all__ = ["Site", "site_at"]

SLOTS = 4
PACE = {"base": 0.15, "sequence": 0.0, "weights": 0.0, "token": 1e-3, "pair": 0.0, "kv": 0.0}
"""The engines' step times: a prompt of 200 tokens takes a third of a second, and each stream has
six tokens a second at any load: what is scarce is prefill, and not this machine."""
PACES = {
    "tick": "250ms",
    "slow-tick": "1s",
    "stable": "5s",
    "remove-interval": "1s",
    "start-prior": "3s",
    "dwell": "1s",
    "lease-slack": "1s",
    "min-first-tokens": 4,
}
POOL = {"model": "bundled", "slo-ttft": "2s@p95", "min": 1, "max": SLOTS}


class Site:
    """The cluster. Workers are started by planners alone."""

    router: Node
    front: Node
    agent: Node

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.agent_home = cluster.home / "agent"

    def open(self) -> None:
        cluster = self.cluster
        timing = cluster.home / "timing.json"
        timing.write_text(json.dumps({"roofline": PACE}))
        options = {"content": "on", "blocks": "16000", "timing": str(timing)}
        engine = [f for k, v in options.items() for f in ("--engine-option", f"{k}={v}")]
        self.router = cluster.router()
        self.router.wait_for_line(r"router \S+ at ")
        self.front = cluster.frontend("--slo-ttft", "2s")
        slots = ("--agent-slots", f"cpu=x{SLOTS}", "--agent-dir", str(self.agent_home))
        room = ("--max-sequences", "512", "--kv-fetch", "never")
        flags = (*slots, "--engine", "sim", *engine, *room)
        self.agent = cluster.start("agent", "", "--join", cluster.address, *flags)

    @contextlib.contextmanager
    def planner(
        self, name: str, *, pool: Mapping[str, Any] = {}, paces: Mapping[str, Any] = {}
    ) -> Iterator[Node]:
        """A planner with a file of its own: settings that differ from the usual ones. A name that
        was there before is a later life."""
        home = self.cluster.home
        path = home / f"{name}.toml"
        path.write_text(planner_file({**PACES, **paces}, {**POOL, **pool}))
        flags = ("--planner", "act", "--planner-file", str(path), "--join", self.cluster.address)
        environ = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}
        node = self.cluster.make("planner", name, *flags, **environ)
        with node:
            node.wait_for_line(r"planner \S+ at ")
            yield node
            if not node.killed:
                node.end()
        look_at(node)

    # ------------------------------------------------------------------ looking

    def say(self, *arguments: str) -> str:
        """Runs `pdserve planner` with these arguments, which must succeed."""
        done = pdserve(self.cluster, "planner", *arguments)
        assert done.returncode == 0, done
        return done.stdout

    def _asked(self, *arguments: str) -> Any:
        """What a command tells as JSON. On a machine that is overloaded a node may not answer in
        time, and is asked again."""

        def answer() -> Any:
            done = pdserve(self.cluster, *arguments, "--json")
            told.append(done.stderr)
            return (json.loads(done.stdout),) if done.returncode == 0 else None

        told: list[str] = []
        return eventually(answer, lambda: (arguments, told[-1]))[0]

    def reports(self) -> dict[str, Any]:
        """The planners' reports, of those that have joined and can be asked."""
        return {k: v for k, v in self._asked("planner").items() if v}

    def plan(self) -> dict[str, Any]:
        """The newest plan; empty: there is none."""
        plans = [plan for one in self.reports().values() for plan in one["plans"]]
        return max(plans, key=lambda one: (one["term"], one["number"]), default={})

    def present(self) -> dict[str, int]:
        """Serving workers by mode, as the planner sees them."""
        return self.plan().get("present", {})

    def workers(self) -> dict[str, Any]:
        """The workers' reports by node."""
        members = self._asked("status")["members"]
        return {one["node"]: one["report"] for one in members if one["role"] == "worker"}

    def records(self) -> list[WorkerRecord]:
        """All workers that were ever started."""
        return agent_workers.records(self.agent_home)

    def live_records(self) -> list[WorkerRecord]:
        """Workers that have not ended."""
        return [one for one in self.records() if one.ended is None]

    def pids(self) -> dict[str, int]:
        """Worker processes that run, by change."""
        return agent_workers.pids(self.cluster.address)

    def shown(self) -> str:
        """What an operator sees, for a failure."""
        return pdserve(self.cluster, "planner").stdout

    def until_present(self, timeout: float = 60.0, **mix: int) -> None:
        """Until these workers serve and nothing is under way."""

        def reached() -> bool:
            plan = self.plan()
            return plan.get("present") == mix and not plan["changes"]

        eventually(reached, self.shown, timeout)

    def until_whole(self) -> None:
        """Until every worker process serves, and none is on its way in or out: no one has an
        orphan."""

        def whole() -> bool:
            reports = self.workers().values()
            calm = all(one and not one["drain"] and not one["reason"] for one in reports)
            return calm and len(reports) == len(self.pids()) and not self.plan().get("changes")

        eventually(whole, lambda: (self.shown(), self.pids(), self.workers()))


def planner_file(paces: dict[str, Any], pool: dict[str, Any]) -> str:
    """Its text."""
    lines = ["[planner]", *(f"{k} = {json.dumps(v)}" for k, v in paces.items())]
    lines += ["[[planner.pool]]", *(f"{k} = {json.dumps(v)}" for k, v in pool.items())]
    return "\n".join([*lines, "[planner.actuator]", 'type = "agents"', ""])


@contextlib.contextmanager
def site_at(home: Path) -> Iterator[Site]:
    """A site, and what is left of it: no worker may have met a defect."""
    with Cluster(home) as cluster:
        site = Site(cluster)
        try:
            site.open()
            yield site
        finally:
            agent_workers.kill_workers(cluster.address)
        for log in sorted(site.agent_home.glob("*.log")):
            assert "Traceback" not in log.read_text(), log.read_text()
