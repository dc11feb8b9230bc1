"""Carries control calls between the KV transports of two engines, over authenticated node links.

    from peers   TRANSFER ─▶ engine.transfer_call
    to peers     the engine's call ─▶ TRANSFER, only to the node life that was meant
    lives        attach at each life of this node, peer_gone at the end of each peer's life
    stats        path statistics become metrics, and a degradation while a worse backend is used

KV itself takes the transfer paths, not this one. Owned by the worker's agent; its tasks and timers
are the node's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pdserve.errors import Draining, Overloaded, PdserveError, TransferRefused
from pdserve.ids import NodeLife
from pdserve.messages.handoff import TransportReply
from pdserve.runtime.paced_timer import PacedTimer
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.registry import MemberAppeared, MemberChanged, MemberGone
from pdserve.runtime.rpc_methods import TRANSFER

if TYPE_CHECKING:
    from pdserve.engine.port import Answered, Engine
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.engine import PathState
    from pdserve.messages.handoff import TransportCall
    from pdserve.messages.node import NodeCard
    from pdserve.net.base import IncomingCall
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Metrics
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent

__all__ = ["DEGRADED", "FAILED_LOADS", "MAX_PENDING_CALLS", "TransferRpc"]

_log = logging.getLogger(__name__)

MAX_PENDING_CALLS: Final = 256
"""Most calls to peers in progress; one more fails as `Overloaded`."""
DEGRADED: Final = "kv_transfer"
"""Name of the degradation in the process's list."""
FAILED_LOADS: Final = "kv_loads"
"""Name of the degradation while KV that arrived could not be used."""
_FAILED_FOR: Final[Seconds] = 600.0
"""Seconds that a failed load counts as a degradation: failures come with single prompts."""
_REMEMBERED: Final = 1024
_LOOK: Final[Seconds] = 0.1
"""Seconds between two looks at the node's life and at the paths while KV may move."""
_IDLE_LOOK: Final[Seconds] = 1.0
"""The same while none moves. The node's life raises no events."""


class TransferRpc:
    """Control calls of one worker. Create it before the engine starts."""

    def __init__(
        self,
        node: Node,
        engine: Engine,
        metrics: Metrics,
        degradations: Degradations | None = None,
    ) -> None:
        """`degradations`: the process's list of degradations, if it has one."""
        self._node = node
        self._degradations = degradations
        self._engine = engine
        self._metrics = metrics
        self._attached: Epoch = 0
        self._asking = 0
        self._gone: dict[NodeLife, None] = {}
        """The latest node lives that are over: a peer that was suspended may not know that its life
        has ended, and its link may still be up.
        """
        self._seen: dict[tuple[str, int, str], PathState] = {}
        self._degraded: dict[tuple[str, str], str] = {}
        """(peer, backend in use) -> the reason why no better backend is used."""
        self._failed_loads = 0
        self._failed_at: Seconds | None = None
        """When a load failed last; None: none has, or not for long."""
        engine.on_transfer(self._ask)
        node.host(self)
        node.on_member(self._on_member)
        self._changed = False
        """The last look has seen a path change."""
        self._pace = PacedTimer(node.timers, _LOOK, self._look, idle=_IDLE_LOOK)
        self._pace.start()

    # ------------------------------------------------------------------ lives

    def wake(self) -> None:
        """Notes that paths or statistics may have changed: they are looked at soon. It is quick."""
        self._pace.wake()

    def _look(self) -> bool:
        """Polls the node's life, which raises no events, and the paths. Returns True if those have
        changed or work goes on."""
        self._changed = False
        self._attach()
        self._count()
        self._tell_failed_loads()
        stats = self._engine.stats()
        return self._changed or bool(stats.running or stats.remote or stats.sending)

    def _attach(self) -> None:
        epoch = self._node.epoch
        if epoch != self._attached:
            self._attached = epoch
            self._engine.attach(self._node.id, epoch)

    def _on_member(self, event: MemberEvent) -> None:
        self._attach()
        life = NodeLife(event.member.node, event.member.epoch)
        if isinstance(event, MemberGone):
            self._gone[life] = None
            if len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]
            self._engine.peer_gone(*life)
        elif isinstance(event, MemberAppeared):
            self._gone.pop(life, None)
        elif _lost_its_engine(event):
            # The same life of the node, another of its engine: what the old one had is gone.
            self._engine.peer_gone(*life, returns=True)

    # ------------------------------------------------------------------ both ways

    @answers(TRANSFER)
    def _answer(self, message: TransportCall, call: IncomingCall) -> None:
        self._pace.wake()
        self._attach()
        if message.epoch != self._node.epoch:
            raise TransferRefused(
                f"it is meant for epoch {message.epoch} of {self._node.id}, which has ended"
            )

        def reply(answer: TransportReply | PdserveError) -> None:
            if isinstance(answer, TransportReply):
                call.reply(answer)
            else:
                call.fail(answer)

        peer = call.life
        if peer in self._gone:
            raise TransferRefused(f"life {peer.epoch} of {peer.node} was declared dead here")
        self._engine.transfer_call(*peer, message, reply)

    def _ask(
        self,
        node: NodeId,
        epoch: Epoch,
        message: TransportCall,
        timeout: Seconds,
        answered: Answered,
    ) -> None:
        """Implements `engine.port.AskPeer`."""
        self._pace.wake()
        self._attach()
        if self._asking >= MAX_PENDING_CALLS:
            answered(Overloaded(f"{MAX_PENDING_CALLS} calls to transports are in progress"))
            return
        self._asking += 1
        work = self._asked(node, epoch, message, timeout, answered)
        try:
            task = self._node.tasks.spawn(work, f"transfer with {node}")
        except Draining as error:
            self._asking -= 1
            answered(error)
        else:
            task.add_done_callback(self._ended)

    def _ended(self, task: object) -> None:
        self._asking -= 1

    async def _asked(
        self,
        node: NodeId,
        epoch: Epoch,
        message: TransportCall,
        timeout: Seconds,
        answered: Answered,
    ) -> None:
        """Performs one call. Cancellation: the node is shutting down, and the engine with it."""
        try:
            answer = await self._node.ref(node, epoch).ask(TRANSFER, message, timeout=timeout)
        except PdserveError as error:
            answered(error)
        else:
            answered(answer)

    # ------------------------------------------------------------------ numbers

    def _count(self) -> None:
        states = self._engine.paths()
        if not states and not self._seen:
            return
        seen, self._seen = self._seen, {(s.node, s.epoch, s.backend): s for s in states}
        for key, state in self._seen.items():
            before = seen.get(key)
            if before is not state:
                self._changed = True
                self._add(state, before)
        self._tell_degraded()

    def _add(self, now: PathState, before: PathState | None) -> None:
        metrics, backend = self._metrics, now.backend
        growth = [
            (metrics.transfer_bytes.labels("sent", backend), "sent_bytes"),
            (metrics.transfer_bytes.labels("received", backend), "received_bytes"),
            (metrics.transfer_seconds.labels(backend), "sent_seconds"),
            (metrics.transfer_failures.labels(backend), "failures"),
        ]
        for counter, name in growth:
            value, old = getattr(now, name), 0 if before is None else getattr(before, name)
            counter.inc(value - old if value >= old else value)  # less: another core counts

    def _tell_degraded(self) -> None:
        """Reports a worse backend than a pair could have, or none, as a metric and a degradation of
        the process while it lasts; the status report shows the reason beside the path.
        """
        found = {(s.node, s.backend): s.degraded for s in self._seen.values() if s.degraded}
        new = [key for key in found if key not in self._degraded]
        for node, backend in new:
            why = found[node, backend]
            _log.warning("degraded: KV with %s goes over %s: %s", node, backend, why)
        if len(found) != len(self._degraded):
            self._metrics.transfer_paths_degraded.value = len(found)
        self._degraded, before = found, self._degraded
        if self._degradations is None or bool(found) == bool(before):
            return
        if found:
            (node, backend), why = next(iter(found.items()))
            self._degradations.add(
                DEGRADED, f"KV with {node} goes over {backend}: {why}; `pdserve status` shows all"
            )
        else:
            self._degradations.clear(DEGRADED)

    def _tell_failed_loads(self) -> None:
        """Reports prompts whose KV arrived and could not be loaded, so that they were computed
        again, as a degradation of the process."""
        now, count = self._node.now(), self._engine.stats().failed_loads
        failed, self._failed_loads = count > self._failed_loads, count
        if failed:
            self._failed_at = now
        if self._degradations is None or self._failed_at is None:
            return
        if failed:
            self._degradations.add(
                FAILED_LOADS,
                "KV of prompts arrived and could not be loaded; the prompts were computed again: "
                "see the engine's log and pdserve_kv_load_failures_total",
            )
        elif now - self._failed_at > _FAILED_FOR:
            self._failed_at = None
            self._degradations.clear(FAILED_LOADS)


def _lost_its_engine(event: MemberChanged) -> bool:
    before, now = event.before.card, event.member.card
    return before is not None and now is not None and _moves(before) and not _moves(now)


def _moves(card: NodeCard) -> bool:
    return bool(card.transfers or card.fetches)
