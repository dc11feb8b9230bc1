"""Runs a planner: looks at the cluster, has the core decide, and has the orders carried out.

Every tick it sums up what routers, cards, loads and actuators say, and gives that to the core, in a
thread, because a what-if takes longer than the event loop may wait. Then it sends the orders and
tells what was decided: in its report, in the decision log and in metrics.

It keeps nothing that a later planner needs: a planner that dies leaves the cluster as it is, and
the next owner of a model finds every change in cards and lists. Operators' wishes are known to all
planners. Owned by `planner.node`; the tasks are the node's.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from functools import partial
from math import inf
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec.structs import replace

from pdserve.clock import until_next
from pdserve.errors import PdserveError
from pdserve.messages.demand import DEMAND, DemandReport
from pdserve.messages.planner import PlannerReport
from pdserve.messages.planner_orders import PLANNERS, PlannerState
from pdserve.messages.routing import LOAD, WorkerLoad
from pdserve.messages.status import NodeReport, StatusQuery
from pdserve.planner.core import PlannerCore
from pdserve.planner.driver.actuator_watch import ActuatorWatch
from pdserve.planner.driver.change_traces import ChangeTraces
from pdserve.planner.driver.cluster_sight import ClusterSight
from pdserve.planner.driver.measures import Measures
from pdserve.planner.driver.operators import Operators
from pdserve.planner.driver.orders import Orders
from pdserve.planner.driver.worker_view import fixed_workers
from pdserve.runtime.peers.peer_ref import ask_all
from pdserve.runtime.rpc_methods import REPORT
from pdserve.tracing.sink import NO_SINK
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Coroutine,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.node import NodeCard
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Metrics
    from pdserve.planner.actuators.base import Actuator
    from pdserve.planner.config import PlannerConfig
    from pdserve.planner.driver.decision_log import DecisionLog
    from pdserve.planner.outlook import Forecaster, Judge
    from pdserve.planner.tick import Order, PlannerOutput, Refusal
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import Member
    from pdserve.runtime.topics.service import Topics
    from pdserve.tracing.sink import TraceSink

__all__ = ["PlannerService", "in_a_thread"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SETTLE: Final[Seconds] = 3.0
"""Most seconds at the beginning in which cards, reports of routers and other planners arrive."""
_STILL: Final[Seconds] = 5.0
"""A tick that is late by more shows that the process stood still, as peers do that it declares
dead meanwhile: what it knows may be old."""
_LONG: Final[Seconds] = 60.0
"""A decision that takes longer is a defect, or the machine has far too much to do."""
_SLOW_DISK: Final[Seconds] = 10.0
"""A decision log that takes longer to write is told."""
_CLOSE: Final[Seconds] = 15.0
"""Longest wait at the end for tasks, for each actuator, and for the decision log: more than a call
of an actuator takes."""
_PATIENCE: Final[Seconds] = 1.0
"""Longest wait for the reports of workers that change; then the last ones count."""


async def in_a_thread(work: Callable[[], T]) -> T:
    """Runs it beside the event loop. Cancellation: it goes on, and its result is dropped."""
    return await asyncio.to_thread(work)


class PlannerService:
    """One planner: `open` once its node has joined, then `close`."""

    def __init__(
        self,
        config: PlannerConfig,
        node: Node,
        topics: Topics,
        card: NodeCard,
        actuators: Sequence[Actuator],
        *,
        judge: Judge,
        forecaster: Callable[[], Forecaster],
        wall: Callable[[], float],
        log: DecisionLog,
        degradations: Degradations,
        metrics: Metrics,
        traces: TraceSink = NO_SINK,
        random: Random | None = None,
        offload: Callable[[Callable[[], PlannerOutput]], Awaitable[PlannerOutput]] = in_a_thread,
    ) -> None:
        """`wall`: Unix seconds. `traces` gets one trace for each change that ends, whose ids
        `random` draws. `offload` runs one decision; in virtual time it runs at once."""
        self.config = config
        self.watches = tuple(ActuatorWatch(one) for one in actuators)
        self._node = node
        self._card = card
        self._wall = wall
        self._log = log
        self._degradations = degradations
        self._offload = offload
        self._judge, self._forecaster = judge, forecaster
        self._core: PlannerCore | None = None
        self._core_epoch = 0
        self._output: PlannerOutput | None = None
        self._fixed: dict[str, tuple[NodeId, ...]] = {}
        self._degraded: dict[str, str] = {}
        self._draining = False
        self._due = inf
        """When the present tick was to begin."""
        self._enabled: set[str] = set()
        """Kinds that operators have enabled since the last tick."""
        self._tasks: list[asyncio.Task[None]] = []
        self._writing: asyncio.Task[None] | None = None
        """Writes the decision log's file; None: there was nothing to write yet."""
        self.measures = Measures(metrics, config)
        self.traces = ChangeTraces(traces, random or Random(), wall)
        self.sight = ClusterSight(config, node, self.watches)
        self.operators = Operators(node, self, wall)
        self.orders = Orders(node, self.watches, self._ordered)
        self._state = topics.publish_state(PLANNERS, encode)
        self._topics = topics
        topics.subscribe_state(LOAD, decoder(WorkerLoad), self.sight.loaded, self.sight.load_gone)
        topics.subscribe_state(DEMAND, decoder(DemandReport), self._demanded)
        topics.subscribe_state(
            PLANNERS, decoder(PlannerState), self._told_by, self.sight.planner_gone
        )

    # ------------------------------------------------------------------ life

    def open(self) -> None:
        """The node has joined: begins to look and to decide."""
        self._node.publish_card(replace(self._card, topics=self._topics.names), {})
        self.tell()
        if self.config.mode == "off":
            _log.info("the planner is off: --planner=advise shows plans, act carries them out")
            return
        spawn = self._node.tasks.spawn
        self._tasks = [
            spawn(watch.run(self.config.tick), f"actuator {watch.name}") for watch in self.watches
        ]
        self._tasks.append(spawn(self._run(), "planner"))

    def drain(self) -> None:
        """Decides no more; other planners take over its models. Changes that are under way go
        on."""
        self._draining = True
        self._core = self._output = None  # others decide: what it has begun is not known to go on
        self.measures.stopped()
        if self._node.card is not None:
            self._node.publish_card(replace(self._node.card, draining=True), {})

    def undo_drain(self) -> None:
        """Decides again."""
        self._draining = False
        if self._node.card is not None:
            self._node.publish_card(replace(self._node.card, draining=False), {})

    async def close(self) -> None:
        """Ends all work here; nothing in the cluster changes by it. Tasks, the decision log and
        each actuator have `_CLOSE` for it; what has not ended then is told and left. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_CLOSE)
            for task in late:
                _log.warning("%s has not ended within %.0f s", task.get_name(), _CLOSE)
        self._tasks = []
        await _in_time("the end of the decision log", self._write_rest())
        for watch in self.watches:
            await _in_time(f"the end of actuator {watch.name}", watch.actuator.close())

    def unready_reason(self) -> str | None:
        """For probes; a planner that is blind is ready all the same, and says so elsewhere."""
        if self._draining:
            return "draining: other planners decide"
        return None if self._node.lives else "joining the cluster"

    # ------------------------------------------------------------------ ticks

    async def _run(self) -> None:
        await self._settle()
        while True:
            try:
                if not self._draining:
                    await self.tick()
            except Exception as error:
                # A defect in a decision must not end all decisions; what is under way goes on.
                _log.exception("a tick of the planner")
                self._note({"planner_failed": f"{type(error).__name__} in a decision: see the log"})
            pause = until_next(self._node.now(), self.config.tick)
            self._due = self._node.now() + pause
            await asyncio.sleep(pause)

    async def _settle(self) -> None:
        """Waits until something is known, so that the first decision is none in ignorance."""
        await self._wait_for(_first_look(one) for one in self.watches)

    async def _catch_up(self) -> None:
        """Looks again if the process stood still: what has happened meanwhile is not known yet, and
        the time that has passed would count against workers that serve by now."""
        late = self._node.now() - self._due
        if late > _PATIENCE + _STILL:
            _log.warning("stood still for %.0f s: looks again before it decides", late)
            await self._wait_for(one.look() for one in self.watches)

    async def _wait_for(self, looks: Iterable[Coroutine[None, None, None]]) -> None:
        """Waits for looks at the actuators, and as long as cards and reports take to arrive."""
        looking = [self._node.tasks.spawn(one, "look at an actuator") for one in looks]
        await asyncio.sleep(_SETTLE)
        if looking:
            await asyncio.wait(looking)

    async def tick(self) -> None:
        """Looks, decides, and sends the orders."""
        self.sight.reports |= await self._reports(self.sight.changing())
        await self._catch_up()
        now, wall = self._node.now(), self._wall()
        seen = self.sight.look(now, wall, self.operators.wishes, self.orders.taken_refusals())
        core = self._core_of_this_life()
        while self._enabled:
            core.enable(self._enabled.pop())
        words = f"the present decision has taken more than {_LONG:.0f} s: no other one is made"
        with self._told_after(_LONG, "planner_failed", words):
            output = await self._offload(lambda: core.tick(now, seen))
        self.measures.ticked(self._node.now() - now)
        if self._draining or core is not self._core or self._core_epoch != self._node.epoch:
            return  # another planner decides by now, or did while this one was taken for dead
        self._output = output
        self._fixed = fixed_workers(self.config.pools, seen.workers)
        self.operators.note(output.plans)
        self.traces.note(now, output.plans, output.ended)
        self.orders.carry_out(output.orders)
        for line in output.log:
            self._log.add(line)
        self._write_log()
        self._note(self._all_degraded(output))
        self.measures.note(now, seen, output)

    @contextmanager
    def _told_after(self, seconds: Seconds, name: str, words: str) -> Iterator[None]:
        """A thread cannot be ended, but that it takes too long is told, until the next result."""
        timer = self._node.timers.call_later(seconds, partial(self._note, {name: words}))
        try:
            yield
        finally:
            timer.cancel()

    def _ordered(self, order: Order, refusal: Refusal | None) -> None:
        self.measures.ordered(order, refusal)
        self.traces.ordered(self._node.now(), order, refusal)

    def _core_of_this_life(self) -> PlannerCore:
        """A core whose term is the present life of the node: one that was declared dead begins
        anew, after those that have decided meanwhile."""
        if self._core is None or self._core_epoch != self._node.epoch:
            self._core_epoch = self._node.epoch
            self._core = PlannerCore(
                self.config,
                me=self._node.id,
                term=self._node.epoch,
                judge=self._judge,
                forecaster=self._forecaster,
            )
        return self._core

    async def _reports(self, nodes: Sequence[NodeId]) -> dict[NodeId, NodeReport]:
        """Workers that drain or change their mode say how far they are."""
        if not nodes:
            return {}
        answers = await ask_all(self._node, nodes, REPORT, StatusQuery(), timeout=_PATIENCE)
        return {node: one for node, one in answers.items() if not isinstance(one, PdserveError)}

    # ------------------------------------------------------------------ news

    def _demanded(self, member: Member, report: DemandReport) -> None:
        self.sight.demanded(self._node.now(), member, report)

    def _told_by(self, member: Member, state: PlannerState) -> None:
        """Another planner's mode and wishes."""
        self.sight.planner_told(member, state)
        if self.operators.wishes.hear(self._wall(), state.wishes):
            self.tell()

    def tell(self) -> None:
        """Publishes the mode, and the operators' wishes."""
        self._state.set(PlannerState(mode=self.config.mode, wishes=self.operators.wishes.all))

    def enable(self, kind: str) -> None:
        """An operator has mended a kind that was disabled. The next tick knows: the present one may
        be deciding in its thread."""
        self._enabled.add(kind)

    # ------------------------------------------------------------------ what it tells

    def report(self) -> PlannerReport:
        """Its own account, for status."""
        plans = () if self._output is None else self._output.plans
        wall = self._wall()
        return PlannerReport(
            mode=self.config.mode,
            owner=bool(plans),
            plans=plans,
            instances=tuple(one for watch in self.watches for one in watch.instances),
            paused=self.operators.wishes.paused(wall),
            pins=self.operators.wishes.pins(wall),
            log=tuple(self._log.lines)[-_LINES:],
            fixed=self._fixed,
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """The newest lines of the decision log."""
        return tuple(self._log.lines)

    @property
    def kinds(self) -> frozenset[str] | None:
        """Names of the kinds that may be started; None: some actuator does not answer, so there may
        be others."""
        if any(watch.down for watch in self.watches):
            return None
        return frozenset(kind.name for watch in self.watches for kind in watch.kinds)

    def _write_log(self) -> None:
        """Has the decision log's file written in a thread, one at a time: a disk may take long."""
        if self._log.unwritten and (self._writing is None or self._writing.done()):
            self._writing = self._node.tasks.spawn(self._written(), "decision log")

    async def _written(self) -> None:
        words = f"the file has not been written for {_SLOW_DISK:.0f} s: its disk does not answer"
        with self._told_after(_SLOW_DISK, "planner_log", words):
            trouble = await in_a_thread(self._log.write)
        self._note({"planner_log": trouble})

    async def _write_rest(self) -> None:
        """Writes what the file lacks at the end."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        if self._log.unwritten:
            await self._written()

    def _all_degraded(self, output: PlannerOutput) -> dict[str, str]:
        """All that is wrong now, by name; an empty text ends a degradation."""
        core = dict.fromkeys(_BY_CORE, "") | dict(output.degraded)
        down = "; ".join(f"{one.name}: {one.down}" for one in self.watches if one.down)
        core["planner_actuator_down"] = (
            f"{down}; levers without it go on, and starts wait" if down else ""
        )
        limits = [
            f"{plan.model}: {plan.unreachable:.1%} of the requests have prompts that take longer "
            "than the TTFT objective on an idle worker; relax the objective, or limit prompts"
            for plan in output.plans
            if plan.unreachable > _FEW
        ]
        core["planner_unreachable"] = "; ".join(limits)
        return core

    def _note(self, reasons: Mapping[str, str]) -> None:
        """Begins, changes and ends degradations."""
        for name, reason in reasons.items():
            if self._degraded.get(name, "") == reason:
                continue
            self._degraded[name] = reason
            self._degradations.clear(name)
            if reason:
                self._degradations.add(name, reason)


async def _in_time(what: str, work: Coroutine[None, None, None]) -> None:
    """Does work at the end within `_CLOSE`; a failure of it does not keep the rest from ending."""
    try:
        async with asyncio.timeout(_CLOSE):
            await work
    except TimeoutError:
        _log.warning("%s did not come within %.0f s", what, _CLOSE)
    except Exception:
        _log.exception("%s", what)


async def _first_look(watch: ActuatorWatch) -> None:
    await watch.looked.wait()


_BY_CORE: Final = ("planner_blind", "planner_floor", "planner_kind_failing", "planner_failed")
_LINES: Final = 20
"""Lines of the decision log in a report."""
_FEW: Final = 0.01
"""Share of requests out of reach that is not worth a degradation."""
