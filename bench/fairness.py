"""Measures the shares of tenants and priorities in an overloaded cluster with several routers.

    python bench/fairness.py [--seconds 35] [--seed 1]

Replays in virtual time use the production frontends' dispatch, routers and workers. Tenants that
share no prompts request half again as much as the workers can do. While all tenants that ask for
more than their share have requests without a first token, each tenant's work (seconds that its
prompts take an idle worker) is compared with its weight. The figures depend only on code and seed:
a busy machine does not change them. Writes bench/results/fairness.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.replay.metrics import jain, quantile
from pdserve.sim.replay.run import replay
from pdserve.sim.workloads.trace_request import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.sim.replay.record import ReplayRecord

RESULT: Final = Path(__file__).parent / "results" / "fairness.md"
WORKERS: Final = 4
OVERLOAD: Final = 1.5
WARM_UP: Final[Seconds] = 7.0
"""Warm-up at two thirds of the capacity, with requests of no tenant, in which routers learn how
long prompts take. It ends before membership closes idle links after 10 s; a frontend would then
leave its router for another."""
FRONTENDS: Final = 64
"""Number of frontends. One is used per router, since each frontend chooses its router itself."""
LENGTHS: Final = (500, 1000, 2000, 4000, 8000)
OUTPUT: Final = 4


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant and its load."""

    name: str
    weight: float
    load: float
    """The tenant's load as a share of the cluster's capacity."""
    priority: int = 0
    pinned: bool = False
    """True if all requests of the tenant go to the first frontend."""


@dataclass(frozen=True, slots=True)
class Case:
    """The settings of one replay."""

    title: str
    tenants: tuple[Tenant, ...]
    routers: int = 1
    options: Mapping[str, str] = field(default_factory=dict)


def cases() -> list[Case]:
    """All cases."""
    light, heavy = Tenant("light", 1, 0.5), Tenant("heavy", 3, 1.0)
    weights = (light, heavy)
    greedy = (Tenant("modest", 1, 1.5 / 11), Tenant("greedy", 1, 15 / 11))
    three = (Tenant("light", 1, 0.3), Tenant("heavy", 3, 0.75), Tenant("greedy", 1, 0.45))
    urgent = (Tenant("urgent", 1, 0.4, priority=1), Tenant("usual", 1, 1.1))
    pinned = (light, Tenant("heavy", 3, 1.0, pinned=True))
    nothing = {"hold_work": "0"}
    found = [Case("weights 1:3", weights, routers) for routers in (1, 2, 4, 8)]
    found += [Case("weights 1:3, heavy at one router", pinned, routers) for routers in (2, 4)]
    found += [
        Case("weights 1:3, `fifo`", weights, options={"queue_order": "fifo"}),
        Case("weights 1:3, nothing held", weights, options=nothing),
        Case("weights 1:3:1", three),
        Case("weights 1:3:1", three, 4),
        Case("one asks 10 times as much", greedy),
        Case("one asks 10 times as much", greedy, 4),
        Case("one asks 10 times as much, nothing held", greedy, options=nothing),
        Case("priorities 1 and 0", urgent),
        Case("priorities 1 and 0", urgent, 4),
        Case("priorities 1 and 0, nothing held", urgent, options=nothing),
    ]
    return found


# ---------------------------------------------------------------------- one replay


@dataclass(frozen=True, slots=True)
class Outcome:
    """The service that one tenant got."""

    tenant: Tenant
    work: Seconds
    """Work that began while all contenders had a backlog, in seconds of an idle worker."""
    served: float
    """Share of the tenant's requests that had begun when the last request was sent."""
    firsts: list[float]
    """Times to first token of all the tenant's requests, ascending."""
    medians: list[float]
    """Median times to first token of the tenant's requests at each router, ascending."""


def config(case: Case, seed: int) -> ReplayConfig:
    """The replay's configuration."""
    return ReplayConfig(
        workers=WORKERS,
        routers=case.routers,
        frontends=1 if case.routers == 1 else FRONTENDS,
        router_options=case.options,
        seed=seed,
        block_size=64,
    )


def doors(case: Case, seed: int) -> list[int]:
    """Returns one frontend of each router, found by a request to every frontend."""
    made = config(case, seed)
    ask = [TraceRequest(i, 0.0, ((i, 64),), 1, frontend=i) for i in range(made.frontends)]
    found: dict[str, int] = {}
    for record in replay(made, iter(ask)).records:
        found.setdefault(record.router, record.number)
    if len(found) < case.routers:
        raise RuntimeError(f"only {len(found)} of {case.routers} routers have frontends")
    return [found[router] for router in sorted(found)]


def prices(seed: int) -> dict[int, Seconds]:
    """Returns the time that a prompt takes an idle worker, by length."""
    ask = [TraceRequest(i, 5.0 * i, ((i, size),), 1) for i, size in enumerate(LENGTHS)]
    alone = ReplayConfig(workers=1, seed=seed, block_size=64)
    records = replay(alone, iter(ask)).records
    return {record.prompt_tokens: record.prefill_seconds for record in records}


def trace(
    case: Case, at: Sequence[int], cost: Mapping[int, Seconds], seconds: Seconds, seed: int
) -> list[TraceRequest]:
    """Poisson arrivals of each tenant, after the warm-up."""
    random = Random(f"fairness {seed}")
    mean = sum(cost.values()) / len(cost)
    asked: list[tuple[Seconds, Tenant]] = []
    quiet = Tenant("", 1, 0.67)
    for tenant in (quiet, *case.tenants):
        rate = tenant.load * WORKERS / mean
        now, end = (0.0, WARM_UP) if tenant is quiet else (WARM_UP, WARM_UP + seconds)
        while (now := now + random.expovariate(rate)) < end:
            asked.append((now, tenant))
    asked.sort(key=lambda each: each[0])
    return [
        TraceRequest(
            number,
            when,
            ((number, random.choice(LENGTHS)),),
            OUTPUT,
            tenant=tenant.name,
            weight=tenant.weight,
            priority=tenant.priority,
            frontend=at[0] if tenant.pinned else at[number % len(at)],
        )
        for number, (when, tenant) in enumerate(asked)
    ]


def contenders(case: Case) -> list[Tenant]:
    """Tenants that compete: those of one priority band whose load exceeds their share."""
    if len({tenant.priority for tenant in case.tenants}) > 1:
        return []
    weights = sum(tenant.weight for tenant in case.tenants)
    asking = [t for t in case.tenants if t.load > t.weight / weights]
    return asking if len(asking) > 1 else []


def backlogged(records: Iterable[ReplayRecord], names: set[str]) -> list[tuple[Seconds, Seconds]]:
    """Intervals in which each of these tenants has requests without a first token."""
    moments: list[tuple[Seconds, int, str]] = []
    for record in records:
        if record.tenant in names:
            moments += [(record.arrival, 1, record.tenant), (record.first, -1, record.tenant)]
    waiting = dict.fromkeys(sorted(names), 0)
    found: list[tuple[Seconds, Seconds]] = []
    since: Seconds | None = None
    for moment, change, name in sorted(moments):
        waiting[name] += change
        if all(waiting.values()):
            since = moment if since is None else since
        elif since is not None:
            found.append((since, moment))
            since = None
    return found


def measure(case: Case, cost: Mapping[int, Seconds], seconds: Seconds, seed: int) -> list[Outcome]:
    """Runs one replay and returns the outcome of each tenant."""
    asked = trace(case, doors(case, seed), cost, seconds, seed)
    records = replay(config(case, seed), iter(asked)).records
    lost = [record for record in records if not record.completed]
    if lost:
        raise RuntimeError(f"{len(lost)} requests did not complete: {lost[0].reason}")
    end = WARM_UP + seconds
    spans = backlogged(records, {tenant.name for tenant in contenders(case)})
    # After the last request's arrival no tenant sends requests any more.
    spans = [(begin, min(until, end)) for begin, until in spans if begin < end]
    return [
        _outcome(tenant, [r for r in records if r.tenant == tenant.name], cost, spans, end)
        for tenant in case.tenants
    ]


def _outcome(
    tenant: Tenant,
    records: Sequence[ReplayRecord],
    cost: Mapping[int, Seconds],
    spans: Sequence[tuple[Seconds, Seconds]],
    end: Seconds,
) -> Outcome:
    routers = sorted({record.router for record in records})
    begun = [r for r in records if any(begin < r.first <= until for begin, until in spans)]
    by_end = [record for record in records if record.first <= end]
    return Outcome(
        tenant,
        sum(cost[record.prompt_tokens] for record in begun),
        sum(cost[r.prompt_tokens] for r in by_end) / sum(cost[r.prompt_tokens] for r in records),
        sorted(record.ttft for record in records),
        sorted(
            quantile(sorted(r.ttft for r in records if r.router == router), 0.5)
            for router in routers
        ),
    )


# ---------------------------------------------------------------------- the page


def rows(case: Case, outcomes: Sequence[Outcome]) -> list[str]:
    """The rows of the table."""
    names = {tenant.name for tenant in contenders(case)}
    work = sum(o.work for o in outcomes if o.tenant.name in names)
    weights = sum(o.tenant.weight for o in outcomes if o.tenant.name in names)
    per_weight = [o.work / o.tenant.weight for o in outcomes if o.tenant.name in names]
    made = []
    for number, o in enumerate(outcomes):
        contends = o.tenant.name in names
        got = f"{o.work / work:.1%} | {o.tenant.weight / weights:.0%}" if contends else "|"
        index = f"{jain(per_weight):.3f}" if contends and number == 0 else ""
        head = f"{case.title} | {case.routers}" if number == 0 else "|"
        p50, p90 = (quantile(o.firsts, q) for q in (0.5, 0.9))
        each = " ".join(f"{median:.1f}" for median in o.medians) if case.routers > 1 else ""
        made.append(
            f"| {head} | {o.tenant.name} | {o.tenant.load:.2f} | {got} | {index} | "
            f"{o.served:.0%} | {p50:.2f} | {p90:.2f} | {each} |"
        )
    return made


INTRO: Final = """\
# Tenants, weights, priorities

**Fairness is per router.** Each router orders its own hold queue. A router does not know which
tenants another router has served. A cluster is fair as far as the frontends spread each tenant's
requests evenly over routers. A tenant that uses one router only competes there alone. Routers do
not take turns either: chance decides which router's request meets a worker that has just become
open. So under overload the queues of equal routers are not equally long (last column).

Tenants that share no prompts load {workers} simulated workers with {overload} times their capacity,
for {seconds:g} s of virtual time after {warm:g} s of lighter load; default policy; seed {seed}.
Virtual time: a busy machine does not change these figures. There are as many frontends as routers,
one at each router. Repeat with `python bench/fairness.py`.

- *asks*: the tenant's load as a share of the cluster's capacity.
- *got*: its share of the work that began while all competitors had requests without a first token.
- *due*: the share that its weight gives it. Empty for a tenant that asks for less than that, or has
  no competitor in its band.
- *Jain*: index of work over weight; 1 is even.
- *served*: the share of its requests that had begun when the last request was sent. TTFT is of all
  requests, also of those that were served later.

| case | routers | tenant | asks | got | due | Jain | served | TTFT p50, s | p90 | p50 by router |
|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---|
"""


def main() -> None:
    """Replays, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=35.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    cost = prices(options.seed)
    lines = []
    for case in cases():
        outcomes = measure(case, cost, options.seconds, options.seed)
        lines += rows(case, outcomes)
        print("\n".join(lines[-len(outcomes) :]), flush=True)
    intro = INTRO.format(
        workers=WORKERS,
        overload=OVERLOAD,
        seconds=options.seconds,
        warm=WARM_UP,
        seed=options.seed,
    )
    RESULT.write_text(intro + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
