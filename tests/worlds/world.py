"""The world: hosts, the processes on them, the network between them, and one clock.

Everything random is drawn from the seed, each purpose from a source of its own. What happens is
noted in `event_log`; what must not happen is noted in `violations`. Faults are verbs here, their
plan is `faults`', what must hold in the end is `oracle.checks`'.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

from pdserve.errors import PdserveError
from pdserve.ids import NodeId
from pdserve.net.transport.memory import MemoryWorld
from pdserve.runtime.node import Node, NodeConfig
from pdserve.runtime.registry import MemberAppeared, MemberChanged, MemberGone
from pdserve.sim.rng_tree import RngTree
from pdserve.testing.fake_rdma import FakeFabric
from tests.worlds.event_log import EventLog
from tests.worlds.load_clients import DEFAULT_PROFILE, LoadClients
from tests.worlds.loop import VirtualProcess, WorldLoop
from tests.worlds.oracle.outcomes import OutcomeOracle
from tests.worlds.roles import Frontend, NodeSettings, Router, VirtualRole, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve.ids import Bytes, Seconds
    from pdserve.runtime.registry import MemberEvent
    from tests.worlds.faults import Fault
    from tests.worlds.load_clients import TrackedRequest
    from tests.worlds.planner.stage import Stage

__all__ = ["VirtualHost", "World"]

_log = logging.getLogger(__name__)

_KEY: Final = b"the key of all simulated clusters, 32 bytes or more"
_PORT: Final = 7000
_EPOCH: Final = 1_700_000_000
"""Unix seconds at which worlds begin."""
_AGAIN: Final[Seconds] = 1.0
"""A process that ended by itself is started again after this, as a service manager does."""


def _write_time(size: Bytes) -> Seconds:
    """Slow enough that faults fall into the middle of a transfer."""
    return 0.0005 + size * 1e-6


class VirtualHost:
    """One machine: at most one process at a time."""

    def __init__(self, name: str, role: str, settings: NodeSettings, ahead: Seconds) -> None:
        self.name = name
        self.role = role
        self.settings = settings
        self.ahead = ahead
        """Seconds by which its wall clock is ahead."""
        self.process: VirtualProcess | None = None
        self.part: VirtualRole | None = None
        self.callers: LoadClients | None = None
        self.members: dict[str, int] = {}
        """Members that its process has reported, with their lives."""
        self.ready = False
        """Its role has started."""
        self.lives = 0
        self.status = 0
        """Exit status of its last process, negative for a signal."""
        self.usual: NodeSettings | None = None
        """Settings before a start by an actuator has changed some; None: none has."""
        self.wanted = True
        """True if it is started again when it ends."""
        self.busy = False
        """True while it is being stopped or lost, so that no fault touches it."""

    @property
    def up(self) -> bool:
        """A process runs here and is not on its way out."""
        return self.process is not None and not self.busy

    @property
    def address(self) -> str:
        return f"{self.name}:{_PORT}"


class World:
    """See above. Make it with the loop that it is to run on."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = RngTree(seed)
        self.loop = WorldLoop(self.dice.fork("order"))
        self.net = MemoryWorld(self.dice.fork("network"))
        self.trace = EventLog(self.loop.time)
        self.fabric = FakeFabric(self.dice.fork("fabric"), pace=_write_time)
        """What KV moves over."""
        self.fabric.context = self.net.context
        self.hosts: dict[str, VirtualHost] = {}
        self.seeds: tuple[str, ...] = ()
        self.models: tuple[str, ...] = ("model",)
        self.rate = 1.0
        """Requests per second and frontend."""
        self.habits = DEFAULT_PROFILE
        """The profile of the clients."""
        self.options = ""
        """Options of the command that makes such a world."""
        self.violations: list[str] = []
        self.faults: Counter[str] = Counter()
        """How often each fault happened."""
        self.effects: Counter[str] = Counter()
        """Number of times that each fault had an effect."""
        self.active: dict[Fault, None] = {}
        """Faults that last."""
        self.felt: Counter[tuple[str, str]] = Counter()
        """(fault, what happened while it lasted)."""
        self.accounts: list[TrackedRequest] = []
        """Requests that have not ended."""
        self.outcomes: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()
        """Clients that turned away, by where their requests were."""
        self.tiers: Counter[str] = Counter()
        """What the tiers of all workers have done: hits in tokens, the rest in blocks."""
        self.makers: dict[str, Callable[[VirtualHost, Node], VirtualRole]] = {}
        """By role, what makes its part of a process, where it is not the usual one."""
        self.stage: Stage | None = None
        """What a world with planners has besides."""
        self.judge = OutcomeOracle(self)
        self.lost_with_frontend = 0
        self._cuts: dict[tuple[str, str], Counter[int]] = {}
        self._cut_number = 0
        self._killed: list[VirtualProcess] = []
        self._ending: set[asyncio.Task[None]] = set()

    def complain(self, what: str) -> None:
        """A rule is broken."""
        self.violations.append(what)
        self.trace.note("-", "VIOLATION", what)

    def happened(self, host: str, kind: str, words: str = "") -> None:
        """Note an event that others may count."""
        self.trace.note(host, kind, words)
        for fault in self.active:
            self.felt[fault.kind, kind] += 1

    # ------------------------------------------------------------------ hosts and processes

    def add(self, name: str, role: str, settings: NodeSettings) -> VirtualHost:
        """A machine, still off."""
        ahead = self.dice.fork("clock", name).uniform(-30.0, 30.0)
        host = self.hosts[name] = VirtualHost(name, role, settings, ahead)
        return host

    def of_role(self, role: str) -> list[VirtualHost]:
        return [host for host in self.hosts.values() if host.role == role]

    def start(self, host: VirtualHost) -> None:
        """Start its process, if none runs."""
        if host.process is not None:
            return
        host.lives += 1
        process = host.process = VirtualProcess(f"{host.name}#{host.lives}")
        self.happened(host.name, "start", f"life {host.lives}")
        self.loop.start(process, self._live(host, process), f"main {process.name}")

    async def _live(self, host: VirtualHost, process: VirtualProcess) -> None:
        """What a process does from its start until it serves."""
        part = host.part = self._part(host)
        part.node.on_member(lambda event: self._member(host, event))
        part.node.on_superseded = lambda reason: self._exits(host, process, reason)
        try:
            await part.start()
        except PdserveError as error:
            self._exits(host, process, f"{type(error).__name__}: {error}")
            return
        host.ready = True
        self.happened(host.name, "up", f"epoch {part.node.epoch}")
        if isinstance(part, Frontend):
            self._call(host, part)

    def _part(self, host: VirtualHost) -> VirtualRole:
        node, settings = self._node(host), host.settings
        if host.role in self.makers:
            return self.makers[host.role](host, node)
        if host.role == "router":
            return Router(node, settings)
        if host.role == "worker":
            return Worker(node, settings, self.fabric, partial(self.engine_died, host))
        return Frontend(node, settings)

    def engine_died(self, host: VirtualHost, why: str) -> None:
        """The engine of a worker has ended."""
        self.judge.died(host.name)
        self.happened(host.name, "engine", why)

    def _call(self, host: VirtualHost, part: Frontend) -> None:
        random = self.dice.fork("callers", host.name, host.lives)
        host.callers = LoadClients(
            part,
            self.models,
            f"{host.name}.{host.lives}",
            random,
            rate=self.rate,
            habits=self.habits,
            begin=lambda account: self._begin(host, account),
            leaves=self.judge.leaves,
            complain=self.complain,
        )
        host.callers.start()

    def wall(self, host: VirtualHost) -> float:
        """The clock of a host, in Unix seconds."""
        return _EPOCH + host.ahead + self.loop.time()

    def _node(self, host: VirtualHost) -> Node:
        name, life = host.name, host.lives
        config = NodeConfig(
            node=NodeId(name),
            role=host.role,
            listen=host.address,
            join=tuple(seed for seed in self.seeds if seed != host.address),
            cluster="world",
        )
        return Node(
            config,
            self.net.network(name),
            keys=lambda: (_KEY,),
            entropy=self.dice.fork("entropy", name, life).randbytes,
            random=self.dice.fork("node", name, life),
            wall=partial(self.wall, host),
        )

    def _exits(self, host: VirtualHost, process: VirtualProcess, reason: str) -> None:
        """The process ends by itself, and is started again."""
        if host.process is not process:
            return
        host.status = 1
        self.happened(host.name, "exit", reason)
        self.call_later(0.0, lambda: self._vanish(host, process))
        self.call_later(_AGAIN, lambda: self._restart(host))

    def _vanish(self, host: VirtualHost, process: VirtualProcess) -> None:
        _ = self._crash(host, process)

    def _restart(self, host: VirtualHost) -> None:
        if host.wanted and not host.busy:
            self.start(host)

    def call_later(self, delay: Seconds, action: Callable[[], None]) -> None:
        """Do something that belongs to no process."""
        self.loop.call_later(delay, action, context=self.net.context)

    # ------------------------------------------------------------------ the ends of processes

    def kill(self, host: VirtualHost) -> int:
        """kill -9; returns how many connections that reset."""
        process = host.process
        if process is None:
            return 0
        host.status = -9
        return self._crash(host, process)

    def _crash(self, host: VirtualHost, process: VirtualProcess) -> int:
        if host.process is not process:
            return 0
        before = self.net.connections
        self.loop.kill(process)
        self._killed.append(process)
        self.net.crash(host.name)
        self.net.resume(host.name)
        self._ended(host)
        return before - self.net.connections

    def _ended(self, host: VirtualHost) -> None:
        """Notes the end of a process: everything that it owned is gone."""
        if isinstance(host.part, Worker):
            host.part.engine.free()
            self.tiers += host.part.engine.tally
        host.process = host.part = host.callers = None
        host.ready = False
        host.members.clear()
        for account in [a for a in self.accounts if a.name.startswith(f"{host.name}.")]:
            self.accounts.remove(account)
            self.judge.forgotten(account)
            self.lost_with_frontend += 1
            self.outcomes["connection lost with its frontend"] += 1
        self.judge.died(host.name)
        self.happened(host.name, "down")

    async def stop(self, host: VirtualHost, *, leave: bool, within: Seconds = 2.0) -> None:
        """Ask the process to end, wait until it has, and look what it left behind. `within`: for
        what a worker has to hand over."""
        process, part = host.process, host.part
        if process is None or part is None:
            self.kill(host)
            return
        host.busy = True
        self.happened(host.name, "stop", "with a goodbye" if leave else "")
        if host.callers is not None:
            host.callers.rate = 0.0
        work = self._stop(host, part, leave=leave, within=within)
        ending = self.loop.start(process, work, f"stop {host.name}")
        until = self.loop.time() + 60.0
        while host.process is process and not ending.done() and self.loop.time() < until:
            _ = await asyncio.wait({ending}, timeout=1.0)  # it may be killed meanwhile
        if host.process is process:
            if not ending.done():
                self.complain(f"{host.name} does not end: {self._remains(process)}")
            elif ending.exception() is not None:
                self.complain(f"{host.name} cannot end: {ending.exception()!r}")
            else:
                await self._left_behind(host, process)
            host.status = 0
            self._crash(host, process)
        host.busy = False

    def terminate(self, host: VirtualHost, within: Seconds = 6.0) -> None:
        """SIGTERM by another process of the host: it ends in order, whoever asks meanwhile."""

        def stop() -> None:
            if host.process is not None and not host.busy:
                self._ending.add(
                    ending := self.loop.create_task(self.stop(host, leave=True, within=within))
                )
                ending.add_done_callback(self._ending.discard)

        self.call_later(0.0, stop)

    async def _stop(
        self, host: VirtualHost, part: VirtualRole, *, leave: bool, within: Seconds
    ) -> None:
        await part.stop(leave=leave, within=within)
        if isinstance(part, Frontend):
            for wrong in self.judge.traces.rest(part):
                self.complain(f"{host.name}: {wrong}")
        if host.callers is not None:
            await host.callers.close()
        if isinstance(part, Worker):
            leaked = part.engine.leaked
            if leaked:
                self.complain(f"{host.name} has lost {leaked} blocks")

    async def _left_behind(self, host: VirtualHost, process: VirtualProcess) -> None:
        await asyncio.sleep(0.1)
        tasks = [t for t in self.loop.tasks_of(process) if not t.done()]
        timers = self.loop.timers_of(process)
        ends = self.net.connections_of(host.name)
        for what, left in (("tasks", tasks), ("timers", timers), ("connections", ends)):
            if left:
                self.complain(f"{host.name} has left {what} behind: {left}")

    def _remains(self, process: VirtualProcess) -> list[str]:
        return [task.get_name() for task in self.loop.tasks_of(process)]

    # ------------------------------------------------------------------ faults

    def cut(self, pairs: Iterable[tuple[str, str]]) -> int:
        """Nothing gets through in these directions until `mend`; cuts may overlap."""
        self._cut_number += 1
        for pair in pairs:
            self._cuts.setdefault(pair, Counter())[self._cut_number] = 1
            self.net.set_conditions(*pair, silent=True)
        return self._cut_number

    def mend(self, number: int) -> None:
        """End one cut."""
        for pair, cuts in tuple(self._cuts.items()):
            if cuts.pop(number, None) is not None and not cuts:
                del self._cuts[pair]
                self.net.set_conditions(*pair, silent=False)

    def is_cut(self, a: str, b: str) -> bool:
        """Something does not get through between them."""
        return (a, b) in self._cuts or (b, a) in self._cuts

    def around(self, host: str) -> list[tuple[str, str]]:
        """Both directions between a host and every other."""
        others = [other for other in self.hosts if other != host]
        return [(host, other) for other in others] + [(other, host) for other in others]

    def pause(self, host: VirtualHost) -> VirtualProcess | None:
        """SIGSTOP."""
        process = host.process
        if process is None or process.paused:
            return None
        self.net.pause(host.name)
        self.loop.pause(process)
        return process

    def resume(self, host: VirtualHost, process: VirtualProcess) -> int:
        """SIGCONT; returns how many callbacks had become due."""
        if host.process is not process:
            return 0
        due = self.loop.resume(process)
        self.net.resume(host.name)
        return due

    # ------------------------------------------------------------------ what is heard

    def _member(self, host: VirtualHost, event: MemberEvent) -> None:
        member = event.member
        who = f"{member.node}@{member.epoch % 10_000_000}"
        self._keeps_order(host, event, who)
        if isinstance(event, MemberGone) and event.reason != "left":
            self.judge.died(member.node)
        if isinstance(event, MemberGone) and event.reason == "died":
            self.judge.held_for_dead(host, member.node, member.epoch)
        if isinstance(event, MemberAppeared):
            self.happened(host.name, "appeared", who)
        elif isinstance(event, MemberGone):
            self.happened(host.name, event.reason.replace(" ", "-"), who)
        elif isinstance(event, MemberChanged):
            before = event.before
            if member.suspect != before.suspect:
                self.happened(host.name, "suspects" if member.suspect else "trusts", who)
            if member.reachable != before.reachable:
                self.happened(host.name, "reaches" if member.reachable else "loses", who)
            if member.card != before.card:
                self.happened(host.name, "card", who)

    def _keeps_order(self, host: VirtualHost, event: MemberEvent, who: str) -> None:
        """For each life, a node reports `MemberAppeared`, changes and `MemberGone`: nothing before,
        nothing after, and one life of a node at a time."""
        node, epoch = event.member.node, event.member.epoch
        present = host.members.get(node)
        if isinstance(event, MemberAppeared):
            if present is not None:
                self.complain(f"{host.name} hears of {who} before {present} is gone")
            host.members[node] = epoch
        elif present != epoch:
            what = type(event).__name__
            self.complain(f"{host.name} hears {what} of {who}, which is not there: {present}")
        elif isinstance(event, MemberGone):
            del host.members[node]

    def _begin(self, host: VirtualHost, account: TrackedRequest) -> None:
        self.accounts.append(account)
        self.happened(host.name, "ask", account.name)

        def ended(account: TrackedRequest) -> None:
            if account in self.accounts:
                self.accounts.remove(account)
            self.outcomes[account.outcome] += 1
            self.judge.ended(host, account)
            words = f"{account.name} {account.outcome}, {account.tokens} tokens"
            self.happened(host.name, account.outcome.split()[0], words)

        account.on_end = ended

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Checks, after the run, that nothing of the world is left."""
        for host in self.hosts.values():
            if host.process is not None:
                _ = self.kill(host)
        for process in self._killed:
            self.loop.bury(process)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.calm()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
