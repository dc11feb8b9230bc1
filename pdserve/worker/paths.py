"""How an engine's transports reach those of other workers: over the node's authenticated links.

    from peers   TRANSFER ─▶ engine.transfer_call
    to peers     engine's question ─▶ TRANSFER, to exactly the life that it meant
    lives        attach at each life of ours, peer_gone at the end of each of theirs
    numbers      what the paths say becomes metrics, and a degradation when a poorer one is used

Nothing else goes this way: KV itself takes the paths. Owned by the worker's member; its tasks and
timers are the node's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pdserve.errors import Draining, LinkLost, Overloaded, PdserveError, TransferRefused
from pdserve.messages.handoff import TransferAnswer
from pdserve.runtime.methods import TRANSFER
from pdserve.runtime.registry import Appeared, Changed, Gone

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from pdserve.engine.api import Answered, AskPeer
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.engine import PathState
    from pdserve.messages.handoff import TransferAsk
    from pdserve.net.base import Call
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Metrics
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent

    class Service(Protocol):
        """What it needs of a `WorkerService`."""

        metrics: Metrics

        def attach(self, node: NodeId, epoch: Epoch) -> None: ...

        def peer_gone(self, node: NodeId, epoch: Epoch) -> None: ...

        def transfer_call(
            self, node: NodeId, epoch: Epoch, ask: TransferAsk, reply: Answered
        ) -> None: ...

        def on_transfer(self, ask: AskPeer) -> None: ...

        def paths(self) -> Sequence[PathState]: ...


__all__ = ["DEGRADED", "MAX_ASKING", "TransferPaths"]

_log = logging.getLogger(__name__)

MAX_ASKING: Final = 256
"""Questions to peers under way; one more fails as `Overloaded`."""
DEGRADED: Final = "kv_transfer"
"""As the process names it."""
_REMEMBERED: Final = 1024
_LOOK: Final[Seconds] = 0.1
"""Between two looks at the node's life and at the paths."""


class TransferPaths:
    """See above. Make it before the engine starts."""

    def __init__(
        self, node: Node, service: Service, degradations: Degradations | None = None
    ) -> None:
        """`degradations`: those of the process, where it has some."""
        self._node = node
        self._degradations = degradations
        self._service = service
        self._metrics = service.metrics
        self._attached: Epoch = 0
        self._asking = 0
        self._gone: dict[tuple[NodeId, Epoch], None] = {}
        """Lives that are over, the latest of them: one that stood still may not know it yet, and
        its link may be up."""
        self._seen: dict[tuple[str, int, str], PathState] = {}
        self._degraded: dict[tuple[str, str], str] = {}
        """(peer, back end that is used) -> why it is not a better one."""
        service.on_transfer(self._ask)
        node.serve(TRANSFER, self._answer)
        node.on_member(self._on_member)
        self._look()

    # ------------------------------------------------------------------ lives

    def _look(self) -> None:
        """A node's lives have no events of their own."""
        self._node.timers.call_later(_LOOK, self._look)
        self._attach()
        self._count()

    def _attach(self) -> None:
        epoch = self._node.epoch
        if epoch != self._attached:
            self._attached = epoch
            self._service.attach(self._node.id, epoch)

    def _on_member(self, event: MemberEvent) -> None:
        self._attach()
        life = (event.member.node, event.member.epoch)
        if isinstance(event, Gone):
            self._gone[life] = None
            if len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]
            self._service.peer_gone(*life)
        elif isinstance(event, Appeared):
            self._gone.pop(life, None)
        elif _lost_its_engine(event):
            # The same life of the node, another of its engine: what the old one had is gone.
            self._service.peer_gone(*life)

    # ------------------------------------------------------------------ both ways

    def _answer(self, question: TransferAsk, call: Call) -> None:
        self._attach()
        if question.epoch != self._node.epoch:
            raise TransferRefused(
                f"it is meant for life {question.epoch} of {self._node.id}, which is over"
            )

        def reply(answer: TransferAnswer | PdserveError) -> None:
            if isinstance(answer, TransferAnswer):
                call.reply(answer)
            else:
                call.fail(answer)

        peer = call.link.peer
        if (peer.node, peer.epoch) in self._gone:
            raise TransferRefused(f"life {peer.epoch} of {peer.node} was held for dead here")
        self._service.transfer_call(peer.node, peer.epoch, question, reply)

    def _ask(
        self,
        node: NodeId,
        epoch: Epoch,
        question: TransferAsk,
        timeout: Seconds,
        answered: Answered,
    ) -> None:
        """See `engine.api.AskPeer`."""
        self._attach()
        if self._asking >= MAX_ASKING:
            answered(Overloaded(f"{MAX_ASKING} questions to transports are under way"))
            return
        self._asking += 1
        work = self._asked(node, epoch, question, timeout, answered)
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
        question: TransferAsk,
        timeout: Seconds,
        answered: Answered,
    ) -> None:
        """Cancellation: the node is going away, and the engine with it."""
        until = self._node.now() + timeout
        try:
            link = await self._node.link(node, timeout=timeout)
            if link.peer.epoch != epoch:
                raise LinkLost(f"life {epoch} of {node} is over", sent=False)
            left = max(0.001, until - self._node.now())
            answer = await link.request(TRANSFER, question, timeout=left)
        except PdserveError as error:
            answered(error)
        else:
            answered(answer)

    # ------------------------------------------------------------------ numbers

    def paths(self) -> Sequence[PathState]:
        """All paths there are, as last told."""
        return self._service.paths()

    def _count(self) -> None:
        states = self._service.paths()
        if not states and not self._seen:
            return
        seen, self._seen = self._seen, {(s.node, s.epoch, s.backend): s for s in states}
        for key, state in self._seen.items():
            before = seen.get(key)
            if before is not state:
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
        """A poorer back end than a pair could have, or none, is a metric and a degradation of the
        process as long as it lasts; the report shows the reason beside the path."""
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


def _lost_its_engine(event: Changed) -> bool:
    before, now = event.before.card, event.member.card
    return before is not None and now is not None and bool(before.transfers) and not now.transfers
