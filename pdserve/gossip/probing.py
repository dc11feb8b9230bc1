"""Probes the members that this node watches, directly and through helpers.

    stage     event                 next      action
    IDLE      due                   WAITING   ping
    WAITING   due, misses left      WAITING   ping again
    WAITING   due                   RELAYED   ask helpers to ping
    RELAYED   due, all reported     IDLE      verdict: it cannot be heard
    any       ack, helper's yes     IDLE      heard
    any       this process stalled  IDLE      start over: missed acks prove nothing

An ack counts if it names a nonce of the current round, however late: the nonce proves that it was
sent after the ping. `core` handles verdicts. Pings on behalf of peers have timers of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from pdserve.clock import until_next
from pdserve.gossip.messages import IndirectPing, IndirectPingResult, Ping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.gossip.context import GossipContext
    from pdserve.gossip.messages import Rumour
    from pdserve.ids import Epoch, NodeId, Seconds

__all__ = ["ProbeStage", "Prober"]

_RELAY_SHARE: Final = 0.8
"""Share of the relay timeout after which a helper reports a failure."""


class ProbeStage(Enum):
    IDLE = 0
    WAITING = 1
    RELAYED = 2


@dataclass(slots=True)
class _Probe:
    heard: Seconds
    stage: ProbeStage = ProbeStage.IDLE
    missed: int = 0
    nonces: list[int] = field(default_factory=list)
    asked: dict[NodeId, None] = field(default_factory=dict)
    """Helpers that have not reported."""


@dataclass(frozen=True, slots=True)
class _Relay:
    requester: NodeId
    nonce: int
    target: NodeId


class Prober:
    """The probes of one node's targets, and its pings on behalf of peers."""

    def __init__(
        self,
        context: GossipContext,
        about: Callable[[NodeId], tuple[Rumour, ...]],
        helpers: Callable[[NodeId], Sequence[NodeId]],
        epoch: Callable[[NodeId], Epoch],
    ) -> None:
        """Args: `about` gives the rumours for a member's ping, `helpers` the peers that may reach
        it, `epoch` its current life.
        """
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
        """Sets the watched members; new ones start at a random phase."""
        wanted = set(targets)
        for node in [node for node in self._probes if node not in wanted]:
            del self._probes[node]
            self._context.agenda.cancel(("ping", node))
        for node in targets:
            if node not in self._probes:
                self._probes[node] = _Probe(heard=self._context.now)
                interval = self._context.config.ping_interval
                self._context.after("ping", node, self._context.random.uniform(0, interval))

    def stage(self, node: NodeId) -> ProbeStage:
        """The stage of a member's probe. Raises `KeyError` if it is not watched."""
        return self._probes[node].stage

    def due(self, node: NodeId) -> bool:
        """Handles a member's timer. True: the verdict is that it cannot be heard."""
        probe = self._probes[node]
        if probe.stage is ProbeStage.RELAYED:
            return self._conclude(node, probe)
        if probe.stage is ProbeStage.WAITING:
            probe.missed += 1
            if probe.missed >= self._context.config.misses:
                return self._ask(node, probe)
        self._ping(node, probe)
        return False

    def heard(self, node: NodeId) -> None:
        """Notes a sign that the network to a member works."""
        if node in self._probes:
            self._probes[node].heard = self._context.now

    def ack(self, node: NodeId, nonce: int) -> None:
        """Handles an ack of an own ping, or of one on a peer's behalf."""
        relay = self._relays.get(nonce)
        if relay is not None and relay.target == node:
            self._report(nonce, alive=True)
        probe = self._probes.get(node)
        if probe is not None and nonce in probe.nonces:
            self._alive(node, probe)

    def answer(self, helper: NodeId, nonce: int, alive: bool) -> NodeId | None:
        """Handles a helper's report; returns the member if this was the last report and makes the
        verdict.
        """
        for node, probe in self._probes.items():
            if (
                probe.stage is ProbeStage.RELAYED
                and nonce in probe.nonces
                and helper in probe.asked
            ):
                if alive:
                    self._alive(node, probe)
                    return None
                del probe.asked[helper]
                return node if not probe.asked and self._conclude(node, probe) else None
        return None

    def ping_for(self, requester: NodeId, request: IndirectPing) -> None:
        """Pings a member for a peer, or reports at once that it is not possible."""
        reachable = self._context.links.get(request.node) == request.epoch
        if not reachable or len(self._relays) >= self._context.config.relays_limit:
            self._context.send(requester, IndirectPingResult(request.nonce, alive=False))
            return
        nonce = self._context.nonce()
        self._relays[nonce] = _Relay(requester, request.nonce, request.node)
        self._context.send(request.node, Ping(nonce, self._about(request.node)))
        self._context.after("relay", nonce, _RELAY_SHARE * self._context.config.relay_timeout)

    def relay_due(self, nonce: int) -> None:
        """Handles the timeout of a ping on a peer's behalf."""
        self._report(nonce, alive=False)

    def start_over(self) -> None:
        """Restarts all probes, because this process stalled and missed answers prove nothing."""
        for node, probe in self._probes.items():
            probe.stage = ProbeStage.IDLE
            self._context.after("ping", node, 0.0)

    def isolated(self) -> bool:
        """True if so few of its targets answer that this node itself is probably at fault."""
        context = self._context
        since = context.now - context.health.stretch(context.config.fresh)
        heard = sum(probe.heard >= since for probe in self._probes.values())
        return len(self._probes) > 1 and 2 * heard < len(self._probes)

    def _ping(self, node: NodeId, probe: _Probe) -> None:
        if probe.stage is ProbeStage.IDLE:
            probe.stage = ProbeStage.WAITING
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
        probe.stage = ProbeStage.RELAYED
        for helper in helpers:
            context.send(helper, IndirectPing(nonce, node, self._epoch(node)))
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
            # A healthy helper reports even a failure: a missing report may be this node's fault.
            self._context.health.worse()
        self._rest(node, probe)
        return True

    def _rest(self, node: NodeId, probe: _Probe) -> None:
        probe.stage = ProbeStage.IDLE
        probe.asked = {}
        self._context.after("ping", node, self._until_ping())

    def _until_ping(self) -> Seconds:
        """Time until a target's next ping: at most the interval, and the same moment for all
        targets, so that they share a wake-up."""
        interval = self._context.config.ping_interval
        longer = self._context.health.stretch(interval) - interval
        return min(interval, until_next(self._context.now, interval)) + longer

    def _report(self, nonce: int, *, alive: bool) -> None:
        relay = self._relays.pop(nonce)
        self._context.agenda.cancel(("relay", nonce))
        self._context.send(relay.requester, IndirectPingResult(relay.nonce, alive))
