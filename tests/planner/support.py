"""A model of a pool, simple and without chance, to try the planner's rules against."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pdserve.ids import NodeId, NodeLife
from pdserve.messages.planner import Instance, Kind
from pdserve.planner.config import PlannerConfig, PoolConfig
from pdserve.planner.core import PlannerCore
from pdserve.planner.outlook import DemandView, Horizon, PoolOutcome
from pdserve.planner.pool import Worker
from pdserve.planner.tick import PlannerInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.planner.outlook import Load, PoolCandidate
    from pdserve.planner.tick import PlannerOutput

MODEL = "m"
ME = NodeId("planner-1")


class LinearJudge:
    """A worker does one work per second. Requests miss in proportion to what is too much, and the
    times grow with the load as in an M/M/1 queue. Prefill and decode workers each do one half."""

    def __init__(self) -> None:
        self.asked: list[tuple[Load, tuple[PoolCandidate, ...]]] = []
        self.unreachable = 0.0
        """Share of the requests that no worker serves in time; 1: nothing else can be late."""
        self.decode_weight = 1.0
        """Decode work per prefill work."""

    def judge(self, traffic, objectives, load: Load, candidates: Sequence[PoolCandidate]):
        self.asked.append((load, tuple(candidates)))
        return [self._outcome(objectives, load, one) for one in candidates]

    def _outcome(self, objectives, load: Load, candidate: PoolCandidate) -> PoolOutcome:
        _, itl = objectives
        mix = Counter(slot.mode for slot in candidate.slots)
        work = load.work * (2.0 - load.cached) + load.backlog / 60.0
        both = mix["aggregated"] + mix["both"]
        busy, causes = {}, {}
        if mix["prefill"] or mix["decode"]:
            half = work / 2
            busy["prefill"] = half / max(1e-9, (mix["prefill"] + both / 2))
            busy["decode"] = half * self.decode_weight / max(1e-9, (mix["decode"] + both / 2))
        else:
            busy["aggregated"] = work / max(1e-9, both)
        miss = 0.0
        for mode, rho in busy.items():
            share = max(0.0, 1 - 0.9 / rho) if rho > 0 else 0.0
            causes["decode" if mode == "decode" else "queue"] = share
            miss = max(miss, share)
        rho = min(0.999, max(busy.values(), default=0.0))
        if self.unreachable >= 1:
            return PoolOutcome(miss=0.0, utilisation=busy, unreachable=1.0)
        return PoolOutcome(
            miss=miss,
            causes=causes,
            wait_p95=0.2 / (1 - rho),
            itl_p95=0.2 * (itl or 1.0) / (1 - rho),
            utilisation=busy,
            unreachable=self.unreachable,
        )


class LastValue:
    """A forecast: what was is what will be, `spread` more at the p90."""

    def __init__(self, spread: float = 1.0) -> None:
        self.value = 0.0
        self.spread = spread
        self.frozen = False
        """It learns nothing more."""
        self.asked: list[float] = []
        self.shifts = 0
        self.later: Horizon | None = None
        """What it says of times beyond 125 s; None: the same."""

    def observe(self, at: float, value: float) -> None:
        if not self.frozen:
            self.value = value

    def shifted(self) -> None:
        self.shifts += 1

    def at(self, horizon: float) -> Horizon:
        self.asked.append(horizon)
        if self.later is not None and horizon > 125.0:
            return self.later
        return Horizon(self.value, self.spread * self.value, self.spread * self.value)


def life(number: int, epoch: int = 1) -> NodeLife:
    return NodeLife(NodeId(f"w{number}"), epoch)


def worker(number: int, mode: str = "aggregated", **more) -> Worker:
    return Worker(life=life(number), model=MODEL, mode=mode, **more)


def demand(work: float, **more) -> DemandView:
    """A steady load."""
    fields = {"level": work, "peak_300": work, "first_tokens": 100, **more}
    return DemandView(work=work, **fields)


def instance(change: str, state: str, kind: str = "gpu", **more) -> Instance:
    return Instance(change=change, kind=kind, actuator="fake", state=state, **more)


def pool(**more) -> PoolConfig:
    return PoolConfig(**{"model": MODEL, "ttft": 1.0, "max": 8, **more})


def config(*pools: PoolConfig, **more) -> PlannerConfig:
    return PlannerConfig(**{"mode": "act", "pools": pools or (pool(),), **more})


KINDS = (Kind(name="gpu", actuator="fake"),)


@dataclass
class Bench:
    """A core with its inputs, which a test changes between ticks."""

    config: PlannerConfig = field(default_factory=config)
    judge: LinearJudge = field(default_factory=LinearJudge)
    forecast: LastValue = field(default_factory=LastValue)
    now: float = 1000.0
    term: int = 1

    def __post_init__(self) -> None:
        self.restart()
        self.seen = PlannerInput(wall=0.0, planners=(ME,), kinds=KINDS)

    def restart(self) -> None:
        """The planner begins anew."""
        self.core = PlannerCore(
            self.config,
            me=ME,
            term=self.term,
            judge=self.judge,
            forecaster=lambda: self.forecast,
        )

    def load(self, work: float, **more) -> None:
        self.seen = replace(self.seen, demand={MODEL: demand(work, **more)})

    def see(self, *workers: Worker, **more) -> None:
        self.seen = replace(self.seen, workers=workers, **more)

    def tick(self, seconds: float = 5.0, **more) -> PlannerOutput:
        self.now += seconds
        output = self.core.tick(self.now, replace(self.seen, **more))
        self.last = output
        return output

    def until(self, seconds: float) -> list[PlannerOutput]:
        """Ticks for so long, with the same inputs."""
        return [self.tick() for _ in range(int(seconds / 5))]


def actions(output: PlannerOutput) -> list[str]:
    """What is ordered, in short."""
    found = []
    for order in output.orders:
        change = order.change
        what = change.node or change.mode
        if change.action == "mode":
            what = f"{change.node}>{change.mode}"
        found.append(f"{order.verb} {change.action} {what}")
    return found


def binding(output: PlannerOutput) -> str:
    return output.plans[0].binding
