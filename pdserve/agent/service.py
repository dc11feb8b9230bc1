"""The agent's actor: answers planners, and watches the host's workers.

It owns one task. `Workers` decides; closing the service leaves every worker running.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from pdserve.agent.workers import SeenWorker
from pdserve.errors import ActuatorExhausted, NotReady
from pdserve.messages.agent import StopTaken
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.rpc_methods import AGENT_REPORT, START_WORKER, STOP_WORKER

if TYPE_CHECKING:
    from pdserve.agent.workers import Workers
    from pdserve.ids import Seconds
    from pdserve.messages.agent import AgentQuery, AgentReport, StartWorker, StopWorker
    from pdserve.messages.planner import Instance
    from pdserve.net.base import IncomingCall
    from pdserve.observe.degraded import Degradations
    from pdserve.runtime.node import Node

__all__ = ["AgentService"]

_log = logging.getLogger(__name__)

_POLL: Final[Seconds] = 0.5
"""How often workers are looked at: a tenth of a planner's tick."""


class AgentService:
    """Serves planners on a node. `begin`, once the node has joined; then `close`."""

    def __init__(self, node: Node, degradations: Degradations) -> None:
        self._node = node
        self._degradations = degradations
        self._workers: Workers | None = None
        self._trouble = ""
        """Why the last look at the workers failed; empty: it did not."""
        self.draining = False
        """True: it starts nothing more. It still answers, and ends workers."""
        node.host(self)

    def begin(self, workers: Workers) -> None:
        """Takes over the workers of an earlier agent, and answers from now on."""
        unreadable = workers.adopt(self._node.now())
        if unreadable:
            self._degradations.add(
                "agent_records",
                f"records of workers cannot be read: {', '.join(unreadable)}; if such a worker "
                "runs, its slot counts as free: end it and remove the file",
            )
        self._workers = workers
        self._look()
        _ = self._node.tasks.spawn(self._watch(), "watch workers")

    @property
    def workers(self) -> Workers:
        """Errors: `NotReady` before `begin`."""
        if self._workers is None:
            raise NotReady("the agent is starting; ask again in a moment", retry_after=1.0)
        return self._workers

    @answers(START_WORKER)
    def _start(self, order: StartWorker, call: IncomingCall) -> Instance:
        if self.draining and not self.workers.knows(order.change):
            self.workers.refuse(order.kind)
            raise ActuatorExhausted("this agent drains and starts nothing more")
        return self.workers.start(order, self._node.now())

    @answers(STOP_WORKER)
    def _stop(self, order: StopWorker, call: IncomingCall) -> StopTaken:
        return StopTaken(known=self.workers.stop(order.change, order.grace, self._node.now()))

    @answers(AGENT_REPORT)
    def _report(self, query: AgentQuery, call: IncomingCall) -> AgentReport:
        self._look()
        return self.report()

    def report(self) -> AgentReport:
        """What it says to planners and in the status. Errors: `NotReady`."""
        return self.workers.report(self._node.now())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL)
            why = ""
            try:
                self._look()
                self.workers.bound_logs()
                if lacking := self.workers.unwritten:
                    why = f"{lacking}; make room, or a later agent knows less of them"
            except OSError as error:
                why = f"{error}; make room or restart"
            except Exception as error:
                # A defect must not leave workers unwatched: what is to be killed has a deadline.
                why = f"{type(error).__name__}, see the agent's log; its workers serve on"
                if why != self._trouble:
                    _log.exception("a look at the workers")
            self._note(why)

    def _note(self, why: str) -> None:
        """Begins, changes or ends the degradation."""
        if why == self._trouble:
            return
        self._trouble = why
        self._degradations.clear("agent_watch")
        if why:
            self._degradations.add("agent_watch", f"workers cannot be looked after: {why}")

    def _look(self) -> None:
        cards = (member for member in self._node.registry if member.card is not None)
        seen = {
            member.card.change: SeenWorker(member.node, member.card.draining)
            for member in cards
            if member.card is not None and member.card.change
        }
        self.workers.poll(self._node.now(), seen)
