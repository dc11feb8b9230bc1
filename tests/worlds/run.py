"""Runs one world from its seed, in five phases.

grow      hosts start at times of their own, in any order
faults    clients send requests, faults are injected
calm      no more faults, every host that should run does; clients are served
rest      no more requests: bookings, credits and blocks return
end       each process is asked to stop, and leaves nothing behind
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from pdserve.router.config import RouterConfig
from pdserve.sim.rng_tree import RngTree
from pdserve.testing.virtual_time import Deadlock
from tests.worlds.faults import GENTLE, Fault, draw_faults, inject, with_finale
from tests.worlds.load_clients import DEFAULT_PROFILE, ClientProfile
from tests.worlds.loop import Livelock
from tests.worlds.oracle.checks import at_rest, membership, ready, undisturbed_handoffs, unfinished
from tests.worlds.oracle.outcomes import too_few
from tests.worlds.planner.phases import judge_in_calm
from tests.worlds.planner.stage import Stage
from tests.worlds.roles import NodeSettings, Router, Worker
from tests.worlds.world import World

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.messages.tiers import KvFetchMode
    from tests.worlds.load_clients import TrackedRequest
    from tests.worlds.planner.stage import PlannerSetup
    from tests.worlds.world import VirtualHost

__all__ = ["WorldFailure", "WorldPlan", "WorldReport", "draw_plan", "run", "run_plan"]

_CONVERGES: Final[Seconds] = 150.0
"""Within this after the last fault the nodes agree. Two halves look for each other every 15 s or
so, and a node that was cut off puts off its verdicts for a minute."""
_SERVED: Final[Seconds] = 120.0
"""Within this some request receives something, as long as any has not ended."""
_LONGEST: Final[Seconds] = 900.0
"""Within this the longest queue is worked off by the slowest worker."""
_RESTS: Final[Seconds] = 40.0
_LOOK: Final[Seconds] = 0.25
_PROBES: Final = 3
"""Requests per frontend that must be served once all agree."""


_STEP_FAILED: Final = "a step of %d tokens failed"


class WorldFailure(AssertionError):
    """A run broke a rule; the message names the seed's command, the rule and the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldPlan:
    """What a seed stands for."""

    seed: int
    roles: dict[str, str]
    """Roles of the hosts, in the order of their names; the first two are the seeds of all."""
    settings: dict[str, NodeSettings]
    models: tuple[str, ...]
    starts: dict[str, Seconds]
    rate: float
    """Requests per second and frontend."""
    faults: tuple[Fault, ...]
    faults_end: Seconds
    patience: float = 1.0
    """Factor of the usual timeouts; below 1 where a rule is expected to be broken."""
    habits: ClientProfile = DEFAULT_PROFILE
    """The profile of the clients."""
    kv_time: float = 1.0
    """Factor of a KV write's usual duration, until all is calm."""
    options: str = ""
    """Options of the command that draws this plan."""
    least: float = 0.05
    """Least share of requests that must complete, without those that clients cancel. It is small,
    because in some worlds no worker could serve most of the time; the oracle judges each end."""
    setup: PlannerSetup | None = None
    """What planners have; None: there are none."""
    left_dead: tuple[str, ...] = ()
    """Hosts that stay off once the faults are over."""


@dataclass(frozen=True, slots=True)
class WorldReport:
    """How a run went."""

    plan: WorldPlan
    digest: str
    lines: list[str]
    faults: Counter[str]
    effects: Counter[str]
    outcomes: Counter[str]
    cancelled: Counter[str]
    """Clients that turned away, by where their requests were."""
    events: Counter[str]
    felt: Counter[tuple[str, str]]
    """(fault, what happened while it lasted)."""
    tiers: Counter[str]
    """What the workers' tiers have done: hits in tokens, the rest in blocks."""
    traces: Counter[str]
    """Reasons for which traces were kept, and spans of all requests by name."""
    converged: Seconds
    """Seconds from the last fault until all nodes agreed."""
    virtual: Seconds


def draw_plan(seed: int, nodes: int | None = None) -> WorldPlan:
    """Everything that a run decides beforehand."""
    random = RngTree(seed).fork("plan")
    count = nodes or random.choice((5, 5, 6, 7, 8, 10, 12))
    routers = max(1, min(count - 2, random.choice((1, 2, 2, 3))))
    frontends = max(1, min(count - routers - 1, random.choice((1, 2, 2, 3))))
    workers = count - routers - frontends
    names = [f"r{i}" for i in range(routers)] + [f"w{i}" for i in range(workers)]
    names += [f"f{i}" for i in range(frontends)]
    kinds = {"r": "router", "w": "worker", "f": "frontend"}
    roles = {name: kinds[name[0]] for name in names}
    models = ("model",) if workers < 3 or random.random() < 0.7 else ("model", "other")
    policy = random.choice(("ttft", "least_loaded", "power_of_two"))
    hold = RngTree(seed).fork("hold")
    hold_work = hold.choice((0.0, 0.01, 0.1))
    hold_limit = hold.choice((16, 32))  # slow workers must get through it before the end
    common = {
        "router": RouterConfig(policy=policy, hold_work=hold_work, hold_limit=hold_limit),
        "tokenizer_bytes": random.choice((500, 40_000, 400_000)),
        "router_wait": random.choice((1.0, 5.0)),
    }
    settings = {
        name: NodeSettings(
            model=models[i % len(models)],
            pace=random.choice((0.005, 0.02, 0.1)),
            load_time=random.choice((0.0, 0.5, 3.0)),
            restart_time=random.choice((0.2, 2.0)),
            **common,  # type: ignore[arg-type]
        )
        for i, name in enumerate(names)
    }
    if RngTree(seed).fork("moves").random() < 0.25:
        settings = {name: replace(one, moves_kv=False) for name, one in settings.items()}
    _give_modes(RngTree(seed).fork("modes"), settings, roles)
    _give_tiers(RngTree(seed).fork("tiers"), settings)
    lasts = random.choice((15.0, 30.0))
    begin = random.uniform(0.0, 6.0)
    faults = draw_faults(random, roles, begin, begin + lasts, random.choice((0.2, 0.6)))
    doubles = [(n, roles[n], settings[n].model, settings[n].mode == "prefill") for n in names]
    spare = [
        name
        for name, *kind in doubles[2:]
        if any(other != name and kind == alike for other, *alike in doubles)
        and (roles[name] != "router" or routers > 1)
    ]
    return WorldPlan(
        seed=seed,
        roles=roles,
        settings=settings,
        models=models,
        starts={name: random.choice((0.0, 0.0, 1.0, 4.0)) * random.random() for name in names},
        rate=random.choice((0.5, 2.0, 5.0)),
        faults=with_finale(faults, *_finale(RngTree(seed).fork("finale"), names)),
        faults_end=begin + lasts,
        left_dead=(random.choice(spare),) if spare and random.random() < 0.3 else (),
    )


def _finale(random: Random, names: list[str]) -> list[Fault]:
    """One host is silent for a moment; or a link is lost, just before all must be linked."""
    a, b = random.sample(names, 2)
    match random.choice(("", "pause", "reset")):
        case "pause":
            return [Fault("pause", 0.0, random.uniform(2.2, 2.9), a)]
        case "reset":
            return [Fault("reset", 0.0, 0.0, a, b)]
    return []


def _give_modes(random: Random, settings: dict[str, NodeSettings], roles: dict[str, str]) -> None:
    """In two of three worlds, each model that several workers serve is prefilled by some of them
    and decoded by the others."""
    if random.random() < 0.33:
        return
    models: dict[str, list[str]] = {}
    for name, role in roles.items():
        if role == "worker":
            models.setdefault(settings[name].model, []).append(name)
    for workers in models.values():
        some = random.randint(1, len(workers) - 1) if len(workers) > 1 else 0
        prefill = set(random.sample(workers, some))
        for name in workers if prefill else ():
            settings[name] = replace(
                settings[name],
                mode="prefill" if name in prefill else "decode",
                disagg=random.choice(("always", "always", "rule", "predict")),
            )


def _give_tiers(random: Random, settings: dict[str, NodeSettings]) -> None:
    """In one of three worlds some workers have tiers."""
    if random.random() < 0.33:
        for name in settings:
            if random.random() < 0.8:
                settings[name] = give_tiers(random, settings[name])


def give_tiers(random: Random, settings: NodeSettings) -> NodeSettings:
    """Settings of a worker with tiers."""
    modes: tuple[KvFetchMode, ...] = ("auto", "always", "always", "never")
    return replace(
        settings,
        host_blocks=random.choice((8, 16, 60)),
        disk_blocks=random.choice((0, 100, 400)),
        kv_fetch=random.choice(modes),
    )


def run(seed: int, nodes: int | None = None) -> WorldReport:
    """One whole run. Raises `WorldFailure`."""
    return run_plan(draw_plan(seed, nodes))


def run_plan(plan: WorldPlan, on_line: Callable[[str], None] | None = None) -> WorldReport:
    """Runs a given plan."""
    world = World(plan.seed)
    world.trace.on_line = on_line
    errors = _Errors(world)
    logging.getLogger("pdserve").addHandler(errors)
    try:
        return world.loop.run_until_complete(_Run(plan, world).whole())
    except (Livelock, Deadlock) as error:
        raise WorldFailure(_message(world, str(error))) from None
    finally:
        logging.getLogger("pdserve").removeHandler(errors)
        world.close()


class _Errors(logging.Handler):
    """What is logged as an error should not have happened: faults are no errors of ours."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == _STEP_FAILED:
            return  # on purpose; who is to blame is the judge's business
        cause = record.exc_info[1] if record.exc_info else None
        self._world.complain(f"logged: {record.getMessage()}" + (f": {cause!r}" if cause else ""))


class _Run:
    """See above."""

    def __init__(self, plan: WorldPlan, world: World) -> None:
        self.plan = plan
        self.world = world
        world.models = plan.models
        world.rate, world.habits = plan.rate, plan.habits
        usual = self._usual_pace = world.fabric.pace
        world.fabric.pace = lambda size: usual(size) * plan.kv_time
        world.options = plan.options
        for name, role in plan.roles.items():
            world.add(name, role, plan.settings[name])
        self.stage = None if plan.setup is None else Stage(world, plan.setup)
        world.seeds = tuple(host.address for host in list(world.hosts.values())[:2])

    async def whole(self) -> WorldReport:
        world, plan = self.world, self.plan
        world.judge.watch()
        if self.stage is not None:
            self.stage.watch()
        for name in plan.roles:
            world.call_later(plan.starts[name], partial(world.start, world.hosts[name]))
        await self._faults()
        quiet = world.loop.time()
        if GENTLE.issuperset(fault.kind for fault in plan.faults) and world.trace.counts["died"]:
            world.complain("somebody was held for dead although everybody could be heard")
        await self._calm()
        await self._until("the nodes agree", self._disagreements, _CONVERGES)
        converged = world.loop.time() - quiet
        if self.stage is not None:
            await judge_in_calm(self.stage, self._until)
        await self._serve()
        await self._rest()
        await self._end()
        return WorldReport(
            plan,
            world.trace.digest,
            world.trace.lines,
            world.faults,
            world.effects,
            world.outcomes,
            world.cancelled,
            world.trace.counts,
            world.felt,
            world.tiers,
            world.judge.traces.seen,
            converged,
            world.loop.time(),
        )

    async def _faults(self) -> None:
        world, plan = self.world, self.plan
        going = [asyncio.ensure_future(inject(world, fault)) for fault in plan.faults]
        end = max(plan.faults_end, *plan.starts.values())
        while world.loop.time() < end or not all(fault.done() for fault in going):
            await asyncio.sleep(1.0)
            self._look()
        for fault in going:
            fault.result()

    async def _calm(self) -> None:
        """From here on nothing goes wrong any more, and what waits must be served."""
        world = self.world
        world.fabric.pace = self._usual_pace
        for name in self.plan.left_dead:
            host = world.hosts[name]
            host.wanted = False
            world.kill(host)
        for host in world.hosts.values():
            if host.wanted:
                world.start(host)
            if host.callers is not None:
                host.callers.habits = replace(host.callers.habits, poison=0.0)
        world.habits = replace(world.habits, poison=0.0)
        world.happened("-", "CALM")
        self._look()

    def _disagreements(self) -> Iterator[str]:
        for host in self.world.hosts.values():
            if host.wanted and not host.ready:
                yield f"{host.name} has not come up"
        yield from membership(self.world)
        yield from ready(self.world)

    async def _serve(self) -> None:
        """Waits until every frontend is served again."""
        world = self.world
        world.happened("-", "SERVE")
        frontends = [host for host in world.of_role("frontend") if host.process is not None]
        for host in frontends:
            if host.callers is not None:
                host.callers.rate = 0.0
        await self._until("every request ends", lambda: unfinished(world), _SERVED, self._served)
        await asyncio.sleep(_LOOK)
        books = self._books()
        probes = [probe for host in frontends for probe in self._ask(host, _PROBES)]
        long = [probe for host in frontends for probe in self._ask(host, 1, long=True)]
        await self._turn_away(long)
        await self._until("every probe ends", lambda: unfinished(world), _SERVED)
        for probe in probes:
            if probe.outcome != "completed":
                world.complain(f"{probe.name} was not served in calm: {probe.outcome}")
        await asyncio.sleep(_LOOK)
        routed, released, aborted = (b - a for a, b in zip(books, self._books(), strict=True))
        if released != routed:
            world.complain(f"{routed} answers of routers were given back {released} times")
        turned_away = sum(probe.outcome == "cancelled" for probe in long)
        if aborted < turned_away:  # what moves is aborted, too
            world.complain(f"{turned_away} clients turned away, engines know of {aborted}")
        self._look()

    def _ask(self, host: VirtualHost, count: int, *, long: bool = False) -> list[TrackedRequest]:
        assert host.callers is not None
        assert host.process is not None
        ask = partial(host.callers.ask_patiently, long=long)
        return [host.process.context.copy().run(ask) for _ in range(count)]

    async def _turn_away(self, accounts: list[TrackedRequest]) -> None:
        """Once their first tokens have come."""

        def waiting() -> Iterator[str]:
            for account in accounts:
                if not account.tokens:
                    yield f"{account.name} has no token"

        await self._until("every probe has a token", waiting, _SERVED)
        for account in accounts:
            host = self.world.hosts[account.name.partition(".")[0]]
            assert host.callers is not None
            assert host.process is not None
            host.process.context.copy().run(host.callers.turn_away, account)

    def _books(self) -> tuple[int, int, int]:
        """Routers' answers, those given back, submissions that engines dropped."""
        parts = [host.part for host in self.world.hosts.values() if host.up]
        routers = [part.service for part in parts if isinstance(part, Router)]
        workers = [part.service for part in parts if isinstance(part, Worker)]
        return (
            sum(router.routed for router in routers),
            sum(router.released for router in routers),
            sum(worker.engine.stats().aborted for worker in workers),
        )

    async def _rest(self) -> None:
        self.world.happened("-", "REST")
        await self._until("all is at rest", lambda: at_rest(self.world), _RESTS)
        if not self.plan.faults:
            for wrong in undisturbed_handoffs(self.world):
                self.world.complain(f"without any fault, {wrong}")
            self._look()

    async def _end(self) -> None:
        """Ends the processes in an order that the seed draws; the last ones have no peer left."""
        world = self.world
        world.happened("-", "END")
        hosts = [host for host in world.hosts.values() if host.up]
        random = world.dice.fork("end")
        random.shuffle(hosts)
        for host in hosts:
            host.wanted = False
            await world.stop(host, leave=random.random() < 0.5)
        if few := too_few(world.outcomes, self.plan.least):
            world.complain(few)
        ended = sum(world.outcomes.values()) - world.outcomes["taken for poison"]
        if ended != (asked := world.trace.counts["ask"]):
            world.complain(f"{asked} requests have come to {ended} ends")
        if world.net.connections:
            world.complain(f"{world.net.connections} ends of connections are left")
        self._look()

    def _served(self) -> tuple[int, int]:
        """Requests that have not ended, and what they have received: changes while workers serve,
        if only slowly."""
        accounts = self.world.accounts
        return len(accounts), sum(account.tokens for account in accounts)

    async def _until(
        self,
        what: str,
        missing: Callable[[], Iterator[str]],
        within: Seconds,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Watch until nothing is missing any more; name what is, when that takes too long without
        `progress`."""
        world = self.world
        within *= self.plan.patience
        until = (now := world.loop.time()) + within
        last, seen = now + _LONGEST, progress()
        while (first := next(missing(), None)) is not None:
            self._look()
            if (after := progress()) != seen:
                until, seen = min(world.loop.time() + within, last), after
            if world.loop.time() >= until:
                every = list(missing())
                more = f" (and {len(every) - 1} more)" if len(every) > 1 else ""
                world.complain(f"{within:g} s were not enough until {what}: {first}{more}")
                break
            await asyncio.sleep(_LOOK)
        self._look()

    def _look(self) -> None:
        """Raise if a rule was broken."""
        world = self.world
        world.violations += world.loop.problems
        world.loop.problems.clear()
        if world.violations:
            raise WorldFailure(_message(world, world.violations[0]))


def _message(world: World, what: str) -> str:
    return (
        f"seed {world.seed} at {world.loop.time():.3f} s: {what}\n"
        f"replay: python -m tests.worlds {world.seed}{world.options}"
    )
