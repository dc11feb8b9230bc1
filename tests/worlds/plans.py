"""Plans made by hand, for tests that need a certain world and not a drawn one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from tests.worlds.faults import Fault
from tests.worlds.load_clients import DEFAULT_PROFILE, LONG_PROMPTS
from tests.worlds.roles import NodeSettings
from tests.worlds.run import WorldPlan, run_plan
from tests.worlds.tier_scenarios import ALIKE

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.messages.handoff import WorkerMode
    from tests.worlds.load_clients import ClientProfile
    from tests.worlds.run import WorldReport

ROLES = {
    "r0": "router",
    "r1": "router",
    "w0": "worker",
    "w1": "worker",
    "f0": "frontend",
    "f1": "frontend",
}


def plan(
    seed: int,
    faults: list[Fault],
    *,
    until: Seconds,
    rate: float = 2.0,
    patience: float = 1.0,
    modes: dict[str, WorkerMode] = {},  # noqa: B006  never written to
    habits: ClientProfile = DEFAULT_PROFILE,
    kv_time: float = 1.0,
    pace: Seconds = 0.02,
) -> WorldPlan:
    """Six hosts that start together, and these faults. `modes`: of workers, which may be others."""
    roles = {**ROLES, **dict.fromkeys(modes, "worker")}
    return WorldPlan(
        seed=seed,
        roles=roles,
        settings={
            name: NodeSettings(mode=modes.get(name, "aggregated"), pace=pace) for name in roles
        },
        models=("model",),
        starts=dict.fromkeys(roles, 0.0),
        rate=rate,
        faults=tuple(faults),
        faults_end=until,
        patience=patience,
        habits=habits,
        kv_time=kv_time,
    )


def one_after_another(*faults: Fault, begin: Seconds, gap: Seconds) -> list[Fault]:
    """Each begins `gap` after the end of the one before."""
    placed, now = [], begin
    for fault in faults:
        placed.append(replace(fault, at=now))
        now += fault.lasts + gap
    return placed


def handed_over(seed: int) -> WorldReport:
    """Long prompts over slow paths, and what usually happens to prefill workers meanwhile."""
    faults = one_after_another(
        Fault("kv-lost", 0.0, 4.0, "w2", "w0", 0.5),
        Fault("cut", 0.0, 9.0, "w2", "w0"),
        Fault("engine", 0.0, 0.0, "w2"),
        Fault("crash", 0.0, 1.0, "w1"),
        Fault("crash", 0.0, 1.0, "w2"),
        Fault("pause", 0.0, 9.0, "w1"),
        Fault("crash", 0.0, 1.0, "w2"),
        begin=6.0,
        gap=4.0,
    )
    modes: dict[str, WorkerMode] = {"w0": "decode", "w1": "prefill", "w2": "prefill"}
    return run_plan(
        plan(
            seed,
            faults,
            until=faults[-1].at + 4.0,
            rate=1.5,
            modes=modes,
            habits=LONG_PROMPTS,
            kv_time=500.0,
            pace=0.05,
        )
    )


def with_tiers(seed: int) -> WorldReport:
    """Three workers with tiers that fetch from each other, and what may go wrong with that."""
    faults = one_after_another(
        Fault("tier-reads", 0.0, 20.0, "w0", "", 1.0),
        Fault("tier-slow", 0.0, 10.0, "w2", "", 8.0),
        Fault("tier-copies", 0.0, 6.0, "w1", "", 0.3),
        Fault("tier-writes", 0.0, 15.0, "w1", "", 1.0),
        Fault("kv-slow", 0.0, 6.0, "w1", "w0", 0.3),
        Fault("kv-wrong", 0.0, 6.0, "w1", "w0", 0.3),
        Fault("kv-lost", 0.0, 6.0, "w1", "w0", 0.3),
        Fault("crash", 0.0, 1.0, "w1"),
        Fault("cut", 0.0, 6.0, "w2", "w0"),
        Fault("drain", 0.0, 1.0, "w2", "", 5.0),
        Fault("engine", 0.0, 0.0, "w0"),
        Fault("tier-full", 0.0, 15.0, "w0", "", 2.0),
        begin=12.0,
        gap=1.5,
    )
    three = dict.fromkeys(("w0", "w1", "w2"), "aggregated")
    made = plan(
        seed,
        faults,
        until=faults[-1].at + 6.0,
        rate=2.0,
        modes=cast("dict[str, WorkerMode]", three),
        habits=ALIKE,
        kv_time=50.0,
        pace=0.05,
    )
    tiers = {"host_blocks": 12, "disk_blocks": 300, "kv_fetch": "always"}
    settings = {name: replace(one, **tiers) for name, one in made.settings.items()}  # type: ignore[arg-type]
    return run_plan(replace(made, settings=settings))


def everything(seed: int) -> WorldReport:
    """Each kind of fault in a healthy world, long enough to be felt."""
    faults = one_after_another(
        Fault("kv-slow", 0.0, 3.0, "w2", "w0", 0.05),
        Fault("kv-lost", 0.0, 4.0, "w2", "w0", 0.2),
        Fault("kv-late", 0.0, 4.0, "w2", "w0", 0.2),
        Fault("kv-wrong", 0.0, 4.0, "w2", "w0", 0.2),
        Fault("delay", 0.0, 4.0, "r0", "w0", 0.05),
        Fault("slow", 0.0, 4.0, "f0", "w0", 20_000.0),
        Fault("reset", 0.0, 0.0, "f0", "w0"),
        Fault("reset-inside", 0.0, 5.0, "w0", "r0", 20.0),
        Fault("engine", 0.0, 0.0, "w0"),
        Fault("amnesia", 0.0, 0.0, "r0"),
        Fault("cut", 0.0, 4.0, "r0", "w0"),
        Fault("one-way", 0.0, 4.0, "w0", "f0", 0.2),
        Fault("partition", 0.0, 4.0, "r0", "w0", 0.5),
        Fault("pause", 0.0, 4.0, "w1"),
        Fault("leave", 0.0, 2.0, "w1"),
        Fault("drain", 0.0, 1.0, "w0", "", 5.0),
        Fault("step", 0.0, 15.0, "w0", "", 1.0),
        Fault("slow-worker", 0.0, 4.0, "w0", "", 5.0),
        Fault("crowd", 0.0, 0.0, "f0", "", 20.0),
        Fault("stall", 0.0, 15.0, "w0"),
        Fault("crash", 0.0, 4.0, "r1"),
        Fault("crash", 0.0, 0.01, "f1"),
        Fault("lose", 0.0, 20.0, "w1"),
        Fault("isolate", 0.0, 25.0, "f1"),
        Fault("pause", 0.0, 20.0, "w0"),
        # What the last ones do must be mended when all is at rest, and by nothing else.
        Fault("cut", 0.0, 30.0, "w0", "w1"),
        Fault("reset", 0.0, 0.0, "f0", "f1"),
        Fault("amnesia", 0.0, 0.0, "r0"),
        begin=8.0,
        gap=4.0,
    )
    end = faults[-1].at + 6.0
    # Those that need another one: a process that has been asked to end, and has much to hand over.
    for kind, at in (("engine-going", end), ("kill", end + 8.0)):
        faults += [
            Fault("crowd", at, 0.0, "f0", "", 20.0),
            Fault("drain", at + 0.1, 1.0, "w0", "", 5.0),
            Fault(kind, at + 0.11, 0.0, "w0"),
        ]
    modes: dict[str, WorkerMode] = {"w0": "decode", "w1": "decode", "w2": "prefill"}
    return run_plan(plan(seed, faults, until=end + 16.0, modes=modes))
