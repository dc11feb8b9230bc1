"""Proof of life of the members we watch, directly and through others.

    stage     event                 next      doing
    IDLE      due                   WAITING   ping
    WAITING   due, misses left      WAITING   ping again
    WAITING   due                   RELAYED   ask helpers to ping
    RELAYED   due, all reported     IDLE      verdict: it cannot be heard
    any       ack, helper's yes     IDLE      heard
    any       our own standstill    IDLE      start over: the silence was ours

An ack counts if it names a nonce of the current round, however late: the nonce proves that it was
sent after the ping. Suspecting, and all that follows, is the machine's. Pings for others end by an
appointment of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from pdserve.gossip.messages import Answer, Ping, PingFor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.gossip.context import Context
    from pdserve.gossip.messages import Rumour
    from pdserve.ids import Epoch, NodeId, Seconds

__all__ = ["Prober", "Stage"]

_RELAY_SHARE: Final = 0.8
"""Of its time, after which a helper reports a failure."""


class Stage(Enum):
    IDLE = 0
    WAITING = 1
    RELAYED = 2


@dataclass(slots=True)
class _Probe:
    heard: Seconds
    stage: Stage = Stage.IDLE
    missed: int = 0
    nonces: list[int] = field(default_factory=list)
    asked: dict[NodeId, None] = field(default_factory=dict)
    """Helpers that have not reported."""


@dataclass(frozen=True, slots=True)
class _Relay:
    asker: NodeId
    nonce: int
    target: NodeId


class Prober:
    """The probes of one node's targets, and its pings for others."""

    def __init__(
        self,
        context: Context,
        about: Callable[[NodeId], tuple[Rumour, ...]],
        helpers: Callable[[NodeId], Sequence[NodeId]],
        epoch: Callable[[NodeId], Epoch],
    ) -> None:
        """`about`: what a member should hear with its ping. `helpers`: who may reach it.
        `epoch`: its current life."""
        self._context = context
        self._about = about
        self._helpers = helpers
        self._epoch = epoch
        self._probes: dict[NodeId, _Probe] = {}
        self._relays: dict[int, _Relay] = {}

    @property
    def targets(self) -> Sequence[NodeId]:
        return tuple(self._probes)

    def watch(self, targets: Sequence[NodeId]) -> None:
        """Watch these and no others; new ones at a random phase."""
        wanted = set(targets)
        for node in [node for node in self._probes if node not in wanted]:
            del self._probes[node]
            self._context.agenda.cancel(("ping", node))
        for node in targets:
            if node not in self._probes:
                self._probes[node] = _Probe(heard=self._context.now)
                interval = self._context.config.ping_interval
                self._context.after("ping", node, self._context.random.uniform(0, interval))

    def stage(self, node: NodeId) -> Stage:
        """Raises `KeyError` if it is not watched."""
        return self._probes[node].stage

    def due(self, node: NodeId) -> bool:
        """Its appointment has come. True: the verdict."""
        probe = self._probes[node]
        if probe.stage is Stage.RELAYED:
            return self._conclude(node, probe)
        if probe.stage is Stage.WAITING:
            probe.missed += 1
            if probe.missed >= self._context.config.misses:
                return self._ask(node, probe)
        self._ping(node, probe)
        return False

    def heard(self, node: NodeId) -> None:
        """Whatever else it is, the way to it is open."""
        if node in self._probes:
            self._probes[node].heard = self._context.now

    def ack(self, node: NodeId, nonce: int) -> None:
        """An answer to a ping of ours, or to one for somebody else."""
        relay = self._relays.get(nonce)
        if relay is not None and relay.target == node:
            self._report(nonce, alive=True)
        probe = self._probes.get(node)
        if probe is not None and nonce in probe.nonces:
            self._alive(node, probe)

    def answer(self, helper: NodeId, nonce: int, alive: bool) -> NodeId | None:
        """A helper's report; returns the member if that was the last one and makes the verdict."""
        for node, probe in self._probes.items():
            if probe.stage is Stage.RELAYED and nonce in probe.nonces and helper in probe.asked:
                if alive:
                    self._alive(node, probe)
                    return None
                del probe.asked[helper]
                return node if not probe.asked and self._conclude(node, probe) else None
        return None

    def ping_for(self, asker: NodeId, request: PingFor) -> None:
        """Ping somebody for a peer, or report at once that we cannot."""
        reachable = self._context.links.get(request.node) == request.epoch
        if not reachable or len(self._relays) >= self._context.config.relays_limit:
            self._context.send(asker, Answer(request.nonce, alive=False))
            return
        nonce = self._context.nonce()
        self._relays[nonce] = _Relay(asker, request.nonce, request.node)
        self._context.send(request.node, Ping(nonce, self._about(request.node)))
        self._context.after("relay", nonce, _RELAY_SHARE * self._context.config.relay_timeout)

    def relay_due(self, nonce: int) -> None:
        """A ping for somebody else was not answered."""
        self._report(nonce, alive=False)

    def start_over(self) -> None:
        """We stood still: what we did not hear proves nothing."""
        for node, probe in self._probes.items():
            probe.stage = Stage.IDLE
            self._context.after("ping", node, 0.0)

    def isolated(self) -> bool:
        """We hear so few of our targets that the fault may well be here."""
        context = self._context
        since = context.now - context.health.stretch(context.config.fresh)
        heard = sum(probe.heard >= since for probe in self._probes.values())
        return len(self._probes) > 1 and 2 * heard < len(self._probes)

    def _ping(self, node: NodeId, probe: _Probe) -> None:
        if probe.stage is Stage.IDLE:
            probe.stage = Stage.WAITING
            probe.missed = 0
            probe.nonces.clear()
        nonce = self._context.nonce()
        probe.nonces.append(nonce)
        self._context.send(node, Ping(nonce, self._about(node)))
        timeout = self._context.config.ping_timeout
        self._context.after("ping", node, self._context.health.stretch(timeout))

    def _ask(self, node: NodeId, probe: _Probe) -> bool:
        context = self._context
        helpers = self._helpers(node)[: context.config.relays]
        nonce = context.nonce()
        probe.nonces.append(nonce)
        probe.asked = dict.fromkeys(helpers)
        probe.stage = Stage.RELAYED
        for helper in helpers:
            context.send(helper, PingFor(nonce, node, self._epoch(node)))
        if not helpers:
            return self._conclude(node, probe)
        context.after("ping", node, context.health.stretch(context.config.relay_timeout))
        return False

    def _alive(self, node: NodeId, probe: _Probe) -> None:
        probe.heard = self._context.now
        self._context.health.better()
        self._rest(node, probe)

    def _conclude(self, node: NodeId, probe: _Probe) -> bool:
        if probe.asked:
            # A well helper reports even a failure; silence casts doubt on our own ears.
            self._context.health.worse()
        self._rest(node, probe)
        return True

    def _rest(self, node: NodeId, probe: _Probe) -> None:
        probe.stage = Stage.IDLE
        probe.asked = {}
        interval = self._context.config.ping_interval
        self._context.after("ping", node, self._context.health.stretch(interval))

    def _report(self, nonce: int, *, alive: bool) -> None:
        relay = self._relays.pop(nonce)
        self._context.agenda.cancel(("relay", nonce))
        self._context.send(relay.asker, Answer(relay.nonce, alive))
