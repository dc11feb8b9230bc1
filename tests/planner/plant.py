"""A cluster that obeys a planner: workers, an actuator, load and accidents, without real time.

It is far simpler than a real one, and meaner: starts are pending, fail, never become ready or come
in another mode; workers die; orders are lost; routers fall silent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import TYPE_CHECKING

from pdserve.ids import NodeId, NodeLife
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.planner.demand_series import DemandBucket, DemandHealth, DemandSeries
from pdserve.planner.driver.demand_view import demand_view
from pdserve.planner.pool import Worker
from pdserve.planner.tick import PlannerInput, Refusal
from tests.planner.support import KINDS, ME, MODEL, instance

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.planner.outlook import DemandView
    from pdserve.planner.tick import Order, PlannerOutput

TICK = 5.0
HEALTHY = DemandHealth(age=1.0)
LEARNT = replace(LatencyModel(), fitted=True)


@dataclass
class Chances:
    """How often something goes wrong, per start, order or tick."""

    fails: float = 0.0
    never_ready: float = 0.0
    wrong_mode: float = 0.0
    pending: float = 0.0
    """Starts that stay pending for ever."""
    lost: float = 0.0
    refused: float = 0.0
    dies: float = 0.0
    silent: float = 0.0
    """Ticks at which the demand is not known."""
    operator: float = 0.0
    """Ticks at which an operator starts or drains a worker."""


@dataclass
class Run:
    """One instance that was asked for."""

    change: str
    mode: str
    state: str = "pending"
    at: float = 0.0
    """When its state changes next; infinite: never."""
    fate: str = ""
    node: str = ""


@dataclass
class Plant:
    """The cluster. `load` gives the work per second at a time."""

    load: Callable[[float], float]
    random: Random = field(default_factory=lambda: Random(1))
    chances: Chances = field(default_factory=Chances)
    boot: float = 40.0
    drain: float = 10.0
    modes: tuple[str, ...] = ("aggregated",)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.workers: dict[NodeLife, Worker] = {}
        self.until: dict[NodeLife, float] = {}
        """When a worker that drains or switches is through."""
        self.refusals: dict[str, Refusal] = {}
        self.works: list[float] = []
        self.born = 0
        for mode in self.modes:
            self.join(mode)

    def join(self, mode: str, change: str = "", state: str = "ready") -> Worker:
        self.born += 1
        life = NodeLife(NodeId(f"w{self.born}"), self.born)
        kind = "gpu" if change else ""
        one = Worker(life=life, model=MODEL, mode=mode, change=change, kind=kind, state=state)  # type: ignore[arg-type]
        self.workers[life] = one
        return one

    # ------------------------------------------------------------------ what the planner sees

    def seen(self) -> PlannerInput:
        refusals, self.refusals = self.refusals, {}
        known = {} if self.random.random() < self.chances.silent else {MODEL: self.view()}
        return PlannerInput(
            wall=self.now,
            planners=(ME,),
            demand=known,
            workers=tuple(self.workers.values()),
            instances=tuple(
                instance(run.change, run.state, reason=run.fate) for run in self.runs.values()
            ),
            kinds=KINDS,
            refusals=refusals,
        )

    def view(self) -> DemandView:
        """Requests of 0.05 s of work each."""
        buckets = tuple(
            DemandBucket(
                TICK * at,
                TICK,
                work * TICK / 0.05,
                work=work * TICK,
                work_squared=work * TICK * 0.05,
            )
            for at, work in enumerate(self.works[-120:])
        )
        series = DemandSeries(MODEL, HEALTHY, buckets, times=LEARNT, first_tokens=100)
        return replace(demand_view(series), seen=inf)

    # ------------------------------------------------------------------ what happens

    def step(self) -> None:
        """Five seconds pass."""
        self.now += TICK
        self.works.append(self.load(self.now))
        for run in [*self.runs.values()]:
            self._advance(run)
        for life, at in [*self.until.items()]:
            if self.now >= at:
                self._through(life)
        for life in [*self.workers]:
            if self.random.random() < self.chances.dies:
                self._gone(life)
        if self.random.random() < self.chances.operator:
            self._operate()

    def _advance(self, run: Run) -> None:
        if self.now < run.at:
            return
        if run.state == "pending" and run.fate != "pending":
            run.state, run.at = "booting", self.now + self.boot / 2
        elif run.state == "booting":
            if run.fate == "fails":
                run.state, run.at = "failed", self.now + 60
                return
            mode = run.mode
            if run.fate == "wrong":
                mode = "prefill" if mode != "prefill" else "decode"
            worker = self.join(mode, run.change, "loading")
            run.state, run.node, run.at = "running", worker.node, self.now + self.boot / 2
        elif run.state == "running" and run.fate != "never" and run.node:
            self._ready(run)
        elif run.state in ("ending", "failed", "ended"):
            del self.runs[run.change]

    def _ready(self, run: Run) -> None:
        run.at = float("inf")
        for life, one in self.workers.items():
            if one.change == run.change and one.state == "loading":
                self.workers[life] = replace(one, state="ready")

    def _through(self, life: NodeLife) -> None:
        del self.until[life]
        one = self.workers.get(life)
        if one is None:
            return
        if one.state == "draining":
            self._gone(life)
        else:
            self.workers[life] = replace(one, state="ready", mode=one.target, target="")

    def _gone(self, life: NodeLife) -> None:
        one = self.workers.pop(life, None)
        self.until.pop(life, None)
        if one is not None and one.change in self.runs:
            run = self.runs[one.change]
            run.state, run.at = "ended", self.now + 60

    def _operate(self) -> None:
        ready = [one for one in self.workers.values() if one.state == "ready"]
        if len(ready) > 2 and self.random.random() < 0.5:
            self._drain(self.random.choice(ready))
        else:
            self.join(self.random.choice(self.modes))

    def _drain(self, one: Worker) -> None:
        self.workers[one.life] = replace(one, state="draining")
        self.until[one.life] = self.now + self.drain

    # ------------------------------------------------------------------ orders

    def obey(self, output: PlannerOutput) -> None:
        for order in output.orders:
            if self.random.random() < self.chances.lost:
                continue
            if order.verb == "end":
                self._end(order)
            elif self.random.random() < self.chances.refused:
                self.refusals[order.change.id] = Refusal("vetoed", "not now")
            else:
                self._begin(order)

    def _end(self, order: Order) -> None:
        run = self.runs.get(order.instance)
        if run is None:
            return
        for life, one in [*self.workers.items()]:
            if one.change == order.instance:
                assert one.state in ("draining", "loading"), "ended while it served"
                del self.workers[life]
        run.state, run.at = "ending", self.now + TICK

    def _begin(self, order: Order) -> None:
        change = order.change
        if change.action == "start":
            if change.id not in self.runs:
                fate = self._fate()
                self.runs[change.id] = Run(change.id, change.mode, at=self.now + TICK, fate=fate)
            return
        life = NodeLife(change.node or NodeId(""), change.epoch)
        one = self.workers.get(life)
        if one is None:
            return
        if change.action == "stop" and one.state == "ready":
            self._drain(one)
        elif change.action == "undo_drain" and one.state == "draining":
            self.until.pop(life, None)
            self.workers[life] = replace(one, state="ready")
        elif change.action == "mode" and one.state == "ready":
            self.workers[life] = replace(one, state="leaving", target=change.mode)
            self.until[life] = self.now + self.drain

    def _fate(self) -> str:
        chances, drawn = self.chances, self.random.random()
        for name, chance in (
            ("fails", chances.fails),
            ("never", chances.never_ready),
            ("wrong", chances.wrong_mode),
            ("pending", chances.pending),
        ):
            if drawn < chance:
                return name
            drawn -= chance
        return ""

    # ------------------------------------------------------------------ figures

    @property
    def serving(self) -> Counter[str]:
        return Counter(one.mode for one in self.workers.values() if one.state == "ready")

    @property
    def charged(self) -> int:
        """Workers and instances that cost something."""
        joined = {one.change for one in self.workers.values() if one.change}
        alive = [
            run
            for run in self.runs.values()
            if run.change not in joined and run.state in ("pending", "booting", "running", "ending")
        ]
        return len(self.workers) + len(alive)
