"""Draws worlds in which planners start, stop and switch workers while requests flow.

Times of planners are a tenth of the usual ones, so that much happens within a minute. The load
rises and falls; meanwhile planners die with a change under way, do not see each other, or are cut
off from workers, routers and agents; starts are lost, slow, fail, or never become ready.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pdserve.planner.config import PlannerConfig, PoolConfig
from pdserve.sim.rng_tree import RngTree
from tests.worlds.faults import Fault
from tests.worlds.load_clients import ClientProfile
from tests.worlds.planner.stage import PlannerSetup
from tests.worlds.roles import NodeSettings
from tests.worlds.run import WorldPlan

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.messages.handoff import WorkerMode

__all__ = ["PLANNER_TROUBLES", "QUICK", "draw_planners"]

_BEGIN: Final[Seconds] = 12.0
"""Routers have seen enough by then."""
_LASTS: Final[Seconds] = 40.0

QUICK: Final = PlannerConfig(
    mode="act",
    tick=1.0,
    slow_tick=3.0,
    stable=8.0,
    dwell=5.0,
    reversal_ticks=2,
    remove_interval=5.0,
    hold=8.0,
    min_first_tokens=5,
    alarm=10.0,
    start_prior=3.0,
    drain_prior=1.0,
    pending_timeout=12.0,
    start_backoff=3.0,
    start_backoff_most=12.0,
    drain_timeout=8.0,
    switch_timeout=10.0,
    switch_retry=10.0,
    lease_slack=3.0,
    switches_per_hour=20,
)
"""Times of planners in these worlds."""

HABITS: Final = ClientProfile(
    lengths=(9, 30, 60),
    answers=(10, 40, 90),
    choices=(1, 1, 2),
    alike=0.3,
    hurried=0.05,
    deadlines=(2.0, 8.0),
    fickle=0.1,
    patience=(0.5, 2.0, 5.0),
)


def draw_planners(seed: int) -> WorldPlan:
    """One such world."""
    random = RngTree(seed).fork("planners")
    choose = random.choice
    counts = {"r": choose((1, 2)), "f": choose((1, 2)), "p": choose((1, 2, 2))}
    agents, batch = choose(((1, 0), (2, 0), (0, 3), (1, 2), (1, 2)))
    modes: tuple[WorkerMode, ...] = choose(
        (("aggregated",), ("aggregated",), ("decode", "prefill"))
    )
    by_hand = [f"w{n}" for n in range(max(len(modes), choose((1, 2, 4))))]
    names = [f"{kind}{n}" for kind, count in counts.items() for n in range(count)]
    names += [*by_hand, *(f"a{n}" for n in range(agents))]
    kinds = {"r": "router", "f": "frontend", "p": "planner", "w": "worker", "a": "agent"}
    roles = {name: kinds[name[0]] for name in names}
    usual = NodeSettings(
        pace=0.2, load_time=choose((0.2, 1.0, 3.0)), restart_time=choose((0.2, 2.0)), disagg="rule"
    )
    settings = dict.fromkeys(roles, usual)
    for number, name in enumerate(by_hand):
        settings[name] = replace(usual, mode=modes[number % len(modes)])
    setup = PlannerSetup(
        config=_config(random, modes),
        worker=usual,
        machines={f"a{n}": 2 for n in range(agents)},
        batch=batch,
        pending=choose((0.0, 1.0, 4.0)),
    )
    plan = WorldPlan(
        seed=seed,
        roles=roles,
        settings=settings,
        models=("model",),
        starts={name: random.random() for name in roles},
        rate=choose((0.3, 0.6)) / counts["f"],
        faults=tuple(_faults(random, roles, batch)),
        faults_end=_BEGIN + _LASTS,
        habits=HABITS,
        options=" --planner",
        setup=setup,
    )
    # Drawn apart, so that a seed's world is otherwise the same.
    return _SPECIAL[RngTree(seed).fork("special").choice(_SPECIALS)](plan)


# ---------------------------------------------------------------------------- rare settings


def _nothing_special(plan: WorldPlan) -> WorldPlan:
    return plan


def _objective(plan: WorldPlan, **changed: Any) -> WorldPlan:
    """With other objectives."""
    setup = _setup(plan)
    pools = tuple(replace(one, **changed) for one in setup.config.pools)
    return replace(plan, setup=replace(setup, config=replace(setup.config, pools=pools)))


def _out_of_reach(plan: WorldPlan) -> WorldPlan:
    return replace(plan, setup=replace(_setup(plan), out_of_reach=True))


def _nothing_starts(plan: WorldPlan) -> WorldPlan:
    """Without any actuator: what serves was started by hand. What an operator takes away then is
    not made up for by a planner, so none does."""
    gone = {name for name, role in plan.roles.items() if role == "agent"}
    by_hand = {f"w{number}": "worker" for number in range(2)}
    roles = {name: role for name, role in plan.roles.items() if name not in gone} | by_hand
    usual = replace(_setup(plan).worker, mode=plan.settings["w0"].mode)
    return replace(
        plan,
        roles=roles,
        settings={name: plan.settings.get(name, usual) for name in roles},
        starts={name: plan.starts.get(name, 0.0) for name in roles},
        faults=tuple(
            one
            for one in plan.faults
            if one.kind not in _BY_HAND and one.kind not in _OF_BATCH and not gone & {one.a, one.b}
        ),
        setup=replace(_setup(plan), machines={}, batch=0),
    )


def _setup(plan: WorldPlan) -> PlannerSetup:
    assert isinstance(plan.setup, PlannerSetup)
    return plan.setup


_BY_HAND: Final = ("drained-by-hand", "pinned", "switched-by-hand")
_SPECIAL: Final[dict[str, Callable[[WorldPlan], WorldPlan]]] = {
    "": _nothing_special,
    "no objective": partial(_objective, ttft=None, itl=None),
    "only an objective of the ITL": partial(_objective, ttft=None, itl=0.4),
    "an objective out of reach": _out_of_reach,
    "nothing starts workers": _nothing_starts,
}
"""Settings under which limits bind that do not bind elsewhere."""
_SPECIALS: Final = (*([""] * 12), *_SPECIAL)


def _config(random: Random, modes: tuple[str, ...]) -> PlannerConfig:
    choose = random.choice
    more: tuple[WorkerMode, ...] = ("aggregated", "decode", "prefill")
    pool = PoolConfig(
        model="model",
        ttft=choose((1.0, 2.0)),
        itl=choose((None, None, 0.4)),
        min=max(len(modes), choose((1, 1, 2))),
        max=choose((4, 5)),
        modes=choose(((), more)) if len(modes) == 1 else more[1:],
    )
    return replace(QUICK, pools=(pool,), budget=choose((0.0, 0.0, 5.0, 6.0)))


def _faults(random: Random, roles: dict[str, str], batch: int) -> list[Fault]:
    """The load goes up and down; some kinds of trouble, one after the other or at once."""
    faults = _loads(random)
    kinds = random.sample(sorted(PLANNER_TROUBLES), random.choice((0, 1, 3, 6, 12)))
    rate = random.choice((0.15, 0.35))
    now = _BEGIN
    while kinds and (now := now + random.expovariate(rate)) < _BEGIN + _LASTS:
        faults += PLANNER_TROUBLES[random.choice(kinds)](random, roles, now)
    return [one for one in faults if one.kind not in _OF_BATCH or batch]


def _loads(random: Random) -> list[Fault]:
    """Waves of load, and rests between them."""
    found, now = [], _BEGIN * random.random()
    while now < _BEGIN + _LASTS:
        lasts = random.uniform(8.0, 20.0)
        found.append(Fault("load", now, lasts, "f0", "", random.choice((2.0, 3.0, 5.0))))
        now += lasts + random.choice((1.0, 4.0, 25.0))
    return found


_OF_BATCH: Final = frozenset(
    (
        *("starts-slow", "starts-silent", "answers-lost", "starts-denied", "starts-fail"),
        *("never-ready", "stuck-pending", "wrong-mode", "list-lies", "hosts-unknown", "lease"),
    )
)


# ---------------------------------------------------------------------------- troubles


def _of(role: str, roles: dict[str, str]) -> list[str]:
    return [name for name, one in roles.items() if one == role]


def _any(random: Random, role: str, roles: dict[str, str]) -> str:
    return random.choice(_of(role, roles) or _of("planner", roles))


def _one(kind: str, lasts: Seconds, amount: float = 0.0) -> _Trouble:
    """A fault that concerns no host in particular."""

    def draw(random: Random, roles: dict[str, str], now: Seconds) -> list[Fault]:
        return [Fault(kind, now, lasts * random.uniform(0.7, 1.4), "p0", "", amount)]

    return draw


def _of_agent(kind: str, *lasts: Seconds) -> _Trouble:
    def draw(random: Random, roles: dict[str, str], now: Seconds) -> list[Fault]:
        return [Fault(kind, now, random.choice(lasts), _any(random, "agent", roles))]

    return draw


def _dies(role: str) -> _Trouble:
    """One of a role is killed, and comes back after a moment or a while."""

    def draw(random: Random, roles: dict[str, str], now: Seconds) -> list[Fault]:
        lasts = random.choice((0.01, 1.0, 8.0))
        return [Fault("crash", now, lasts, _any(random, role, roles))]

    return draw


def _apart(one: str, other: str) -> _Trouble:
    """Two do not hear each other."""

    def draw(random: Random, roles: dict[str, str], now: Seconds) -> list[Fault]:
        a, b = _any(random, one, roles), _any(random, other, roles)
        kind = random.choice(("cut", "one-way"))
        return [Fault(kind, now, random.choice((1.0, 6.0, 20.0)), a, b, 0.2)] if a != b else []

    return draw


def _parted(random: Random, roles: dict[str, str], now: Seconds) -> list[Fault]:
    """The cluster falls apart; where there are two planners, perhaps between them."""
    planners = _of("planner", roles)
    lasts = random.choice((4.0, 15.0, 25.0))
    share = random.choice((0.3, 0.5))
    return [Fault("partition", now, lasts, planners[0], planners[-1], share)]


def _alone(random: Random, roles: dict[str, str], now: Seconds) -> list[Fault]:
    """A planner hears nobody, or stands still."""
    kind = random.choice(("isolate", "pause"))
    return [Fault(kind, now, random.choice((3.0, 12.0, 25.0)), _any(random, "planner", roles))]


def _all_planners_die(random: Random, roles: dict[str, str], now: Seconds) -> list[Fault]:
    return [Fault("crash", now, random.choice((2.0, 15.0)), one) for one in _of("planner", roles)]


def _engines(random: Random, roles: dict[str, str], now: Seconds) -> list[Fault]:
    """Engines die or are slow; so are those of workers that were started."""
    kind = random.choice(("engine", "slow-worker"))
    return [Fault(kind, now, 4.0, _any(random, "worker", roles), "", 5.0)]


if TYPE_CHECKING:
    _Trouble = Callable[[Random, dict[str, str], Seconds], list[Fault]]

PLANNER_TROUBLES: Final[dict[str, _Trouble]] = {
    "starts are slow": _one("starts-slow", 6.0, 4.0),
    "starts are not answered": _one("starts-silent", 12.0),
    "answers are lost": _one("answers-lost", 10.0),
    "starts are denied": _one("starts-denied", 8.0),
    "starts fail": _one("starts-fail", 8.0),
    "workers are never ready": _one("never-ready", 8.0),
    "jobs are pending for ever": _one("stuck-pending", 10.0),
    "workers come in another mode": _one("wrong-mode", 8.0),
    "a list lies": _one("list-lies", 8.0),
    "hosts are unknown": _one("hosts-unknown", 8.0),
    "jobs have a time limit": _one("lease", 15.0, 14.0),
    "processes cannot be started": _of_agent("launch-fails", 4.0, 10.0),
    "processes are never ready": _of_agent("launch-never-ready", 4.0, 10.0),
    "an agent dies in a start": _of_agent("agent-dies-starting", 4.0, 10.0),
    "a planner dies with a start under way": _one("planner-dies-starting", 12.0, 1.0),
    "a planner dies with a drain under way": _one("planner-dies-draining", 20.0, 1.0),
    "a planner dies with a switch under way": _one("planner-dies-switching", 20.0, 1.0),
    "a worker that changes dies": _one("changing-worker-dies", 20.0, 1.0),
    "the load returns in a drain": _one("crowd-at-drain", 25.0, 15.0),
    "all others die in a drain": _one("others-die-at-drain", 25.0, 6.0),
    "an operator pauses": _one("paused", 8.0),
    "an operator pins": _one("pinned", 12.0),
    "an operator pins modes": _one("pinned", 12.0, 1.0),
    "an operator drains": _one("drained-by-hand", 0.0),
    "an operator switches": _one("switched-by-hand", 0.0),
    "a planner dies": _dies("planner"),
    "all planners die": _all_planners_die,
    "an agent dies": _dies("agent"),
    "a worker dies": _dies("worker"),
    "a router dies": _dies("router"),
    "engines break": _engines,
    "planner and worker are apart": _apart("planner", "worker"),
    "planner and router are apart": _apart("planner", "router"),
    "planner and agent are apart": _apart("planner", "agent"),
    "the cluster falls apart": _parted,
    "a planner is alone": _alone,
}
"""What may go wrong."""
