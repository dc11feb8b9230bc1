"""Starts workers through the agents of the cluster's hosts.

It keeps no truth of its own: agents have the records, on their disks. It remembers which agent it
asked for what, so that an order whose answer was lost is not given to a second agent, and what a
silent agent said last. A silent agent's workers may run: they are `unknown`, not ended.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from pdserve.errors import (
    ActuatorDenied,
    ActuatorError,
    ActuatorExhausted,
    ActuatorTransient,
    LinkError,
    NotReady,
    PdserveError,
)
from pdserve.messages.agent import AgentQuery, AgentReport, StartWorker, StopWorker
from pdserve.messages.planner import Kind
from pdserve.planner.actuators.base import DEADLINE, check_order, within
from pdserve.runtime.peers.peer_ref import ask_all
from pdserve.runtime.rpc_methods import AGENT_REPORT, START_WORKER, STOP_WORKER
from pdserve.toml import read_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.planner import Instance
    from pdserve.planner.actuators.settings import Home
    from pdserve.runtime.node import Node

__all__ = ["AgentsActuator", "AgentsConfig", "choose_agent", "make", "merge_kinds", "read_config"]

_log = logging.getLogger(__name__)


class AgentsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[planner.actuator]` of this type. It has no settings: agents have them."""


def read_config(table: object, place: str) -> AgentsConfig:
    """Reads its table. Errors: `ConfigError`."""
    return read_table(table, AgentsConfig, place)


def make(config: AgentsConfig, home: Home) -> AgentsActuator:
    """The actuator over the agents that the planner's node knows."""
    assert home.node is not None
    return AgentsActuator(home.node)


_LOST: Final[Seconds] = 600.0
"""After this time an agent that is gone from the cluster counts as lost with its host, if its
workers are gone, too."""
_ENDED: Final = ("ended", "failed")
_ON_ITS_WAY: Final[Seconds] = 60.0
"""After this time an order that no report shows has not arrived: its slot is free again."""
_MOST_ASKED: Final = 4096
"""Most orders that are remembered; the oldest go first."""


class AgentsActuator:
    """The actuator over all agents that a node knows; a `planner.actuators.base.Actuator`."""

    name: Final = "agents"

    def __init__(self, node: Node, *, deadline: Seconds = DEADLINE) -> None:
        """`deadline`: seconds that a call takes at most."""
        self._node = node
        self._deadline = deadline
        self._last: dict[NodeId, tuple[Seconds, AgentReport]] = {}
        """The newest report of each agent, and when it came."""
        self._asked: dict[str, NodeId] = {}
        """By change: the agent that was asked to start it."""
        self._unseen: dict[str, Seconds] = {}
        """When each order was given that no report has shown yet."""

    async def kinds(self) -> Sequence[Kind]:
        reports = await self._reports()
        # Workers of silent agents are listed, and take no slot of those that answer.
        silent = Counter(one.kind for one in self._missing(reports))
        kinds = merge_kinds(reports)
        return [replace(one, slots=one.slots + silent[one.name]) for one in kinds]

    async def start(self, kind: str, mode: str, change: str) -> Instance:
        check_order(mode, change)
        order = StartWorker(change=change, kind=kind, mode=mode)
        async with within(self._deadline, f"to start {change}"):
            reports = await self._reports()
            refused: dict[NodeId, str] = {}
            while True:
                holder = self._holder(change, reports)
                if holder is None:
                    agent = choose_agent(kind, reports, self._under_way(), refused)
                    self._remember(change, agent)
                else:
                    agent = holder
                found = await self._try(agent, order, again=holder is not None)
                if not isinstance(found, str):
                    self._note(agent, found)
                    return _named(found, agent)
                refused[agent] = found

    async def _try(self, agent: NodeId, order: StartWorker, *, again: bool) -> Instance | str:
        """Asks one agent; returns why it started nothing where another one may be asked. `again`:
        it has the change or was asked for it before, so that only itself can say that it did not
        start."""
        try:
            return await self._node.ref(agent).ask(START_WORKER, order, timeout=self._deadline)
        except ActuatorExhausted as error:
            self._take_back(order.change)
            if again:
                raise
            return error.message
        except ActuatorDenied:
            self._take_back(order.change)
            raise
        except ActuatorError:
            raise
        except PdserveError as error:
            unsent = isinstance(error, LinkError) and not error.sent
            if not again and (unsent or isinstance(error, NotReady)):
                self._take_back(order.change)
                return error.message
            raise ActuatorTransient(f"agent {agent}: {error.message}") from None

    async def stop(self, change: str, grace: Seconds) -> None:
        order = StopWorker(change=change, grace=grace)
        async with within(self._deadline, f"to stop {change}"):
            reports = await self._reports()
            agent = self._holder(change, reports)
            if agent is None:
                self._must_know_all(reports, change)
                return
            try:
                await self._node.ref(agent).ask(STOP_WORKER, order, timeout=self._deadline)
            except PdserveError as error:
                raise ActuatorTransient(f"agent {agent}: {error.message}") from None

    async def list(self) -> Sequence[Instance]:
        reports = await self._reports()
        present = [
            _named(one, agent) for agent, report in reports.items() for one in report.instances
        ]
        return [*present, *self._missing(reports)]

    async def close(self) -> None:
        """Does nothing: the node is the planner's."""

    # ------------------------------------------------------------------ agents

    async def _reports(self) -> dict[NodeId, AgentReport]:
        """Present reports of the agents that answer. Errors: `ActuatorTransient` if there are
        agents and none answers."""
        agents = [member.node for member in self._node.registry.by_role("agent")]
        timeout = self._deadline / 2  # the rest is for an order
        answers = await ask_all(self._node, agents, AGENT_REPORT, AgentQuery(), timeout=timeout)
        found = {agent: one for agent, one in answers.items() if isinstance(one, AgentReport)}
        if agents and not found:
            agent, error = next(iter(answers.items()))
            raise ActuatorTransient(f"none of {len(agents)} agents answers; {agent}: {error}")
        now = self._node.now()
        self._last |= {agent: (now, report) for agent, report in found.items()}
        shown = {one.change for report in found.values() for one in report.instances}
        self._unseen = {
            change: since
            for change, since in self._unseen.items()
            if change not in shown and now - since < _ON_ITS_WAY
        }
        return found

    def _holder(self, change: str, reports: Mapping[NodeId, AgentReport]) -> NodeId | None:
        """The agent that has this change, or was asked for it."""
        for agent, report in reports.items():
            if any(one.change == change for one in report.instances):
                return agent
        for agent, (_, report) in self._last.items():
            if any(one.change == change for one in report.instances):
                return agent
        return self._asked.get(change)

    def _remember(self, change: str, agent: NodeId) -> None:
        self._asked[change] = agent
        self._unseen[change] = self._node.now()
        while len(self._asked) > _MOST_ASKED:
            del self._asked[next(iter(self._asked))]

    def _take_back(self, change: str) -> None:
        """The agent has started nothing for this change."""
        self._asked.pop(change, None)
        self._unseen.pop(change, None)

    def _note(self, agent: NodeId, one: Instance) -> None:
        """Enters an instance into its agent's last report, lest the agent is lost before the
        next."""
        then, report = self._last.get(agent, (self._node.now(), AgentReport()))
        others = tuple(each for each in report.instances if each.change != one.change)
        self._last[agent] = (then, replace(report, instances=(*others, one)))

    def _under_way(self) -> Sequence[NodeId]:
        """The agent of each order that no report has shown yet. One that was shown is counted by
        its agent, also when it has left the report."""
        return [self._asked[change] for change in self._unseen if change in self._asked]

    def _must_know_all(self, reports: Mapping[NodeId, AgentReport], change: str) -> None:
        silent = [m.node for m in self._node.registry.by_role("agent") if m.node not in reports]
        if silent:
            raise ActuatorTransient(
                f"no agent that answers has {change}, and {silent[0]} does not answer"
            )

    def _missing(self, reports: Mapping[NodeId, AgentReport]) -> tuple[Instance, ...]:
        """Instances of agents that do not answer, from what they said last."""
        found: tuple[Instance, ...] = ()
        for agent in tuple(self._last.keys() - reports.keys()):
            then, report = self._last[agent]
            gone = self._node.now() - then
            why = f"agent {agent} has not answered for {gone:.0f} s"
            known = self._node.registry.get(agent) is not None
            live = [one for one in report.instances if one.state not in _ENDED]
            if gone > _LOST and not known:
                live = [one for one in live if self._is_member(one)]
            if not live and not known:
                _log.info("%s: forgotten, for no worker of it is left", why)
                del self._last[agent]
            unknown = (replace(_named(one, agent), state="unknown", reason=why) for one in live)
            found = (*found, *unknown)
        return found

    def _is_member(self, one: Instance) -> bool:
        return one.node is not None and self._node.registry.get(one.node) is not None


def choose_agent(
    kind: str,
    reports: Mapping[NodeId, AgentReport],
    under_way: Sequence[NodeId],
    refused: Mapping[NodeId, str],
) -> NodeId:
    """The agent with most free slots for a kind, the first by name among equals: spread workers
    lose least with a host. Agents where workers of the kind have failed in the last minutes come
    last: a broken host is always the emptiest.

    Args: `under_way` has an agent for each order that its report does not count yet; `refused` says
    why agents have said no. Errors: `ActuatorDenied` if no agent has the kind,
    `ActuatorExhausted` if no slot is free.
    """
    kinds = sorted({one.name for report in reports.values() for one in report.kinds})
    if kind not in kinds:
        there = f"they have {', '.join(kinds)}" if kinds else "there are none"
        raise ActuatorDenied(f"no agent has kind {kind!r}: {there}")
    free = {
        agent: report.free.get(kind, 0) - under_way.count(agent)
        for agent, report in reports.items()
        if agent not in refused
    }
    found = [agent for agent, slots in free.items() if slots > 0]
    agent = min(found, key=lambda one: (_failed(kind, reports[one]), -free[one], one), default=None)
    if agent is None:
        why = "".join(f"; {agent}: {refused[agent]}" for agent in sorted(refused)[:1])
        raise ActuatorExhausted(f"no slot {kind!r} is free on any of {len(reports)} agents{why}")
    return agent


def _failed(kind: str, report: AgentReport) -> int:
    """Number of workers of a kind that have failed there of late."""
    return sum(one.kind == kind and one.state == "failed" for one in report.instances)


def merge_kinds(reports: Mapping[NodeId, AgentReport]) -> list[Kind]:
    """The kinds of all agents, with their slots together."""
    found: dict[str, Kind] = {}
    for report in reports.values():
        for one in report.kinds:
            before = found.get(one.name, Kind(name=one.name, actuator="agents", price=one.price))
            found[one.name] = replace(before, slots=before.slots + one.slots)
    return [found[name] for name in sorted(found)]


def _named(one: Instance, agent: NodeId) -> Instance:
    return replace(one, actuator="agents", ref=f"{agent} {one.ref}".strip())
