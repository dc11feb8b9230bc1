"""What a frontend knows of the cluster: who serves a model, who is in doubt, whose life is over.

Follows the membership of the node and owns the discovery of models. Those that wait for a change of
the cluster wait here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from pdserve.errors import NotReady, NoWorker
from pdserve.frontend.dispatch.model_discovery import ModelDiscovery
from pdserve.ids import NodeLife
from pdserve.runtime.registry import MemberChanged, MemberGone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.errors import PdserveError
    from pdserve.frontend.dispatch.migration.migration_state import LifeStatus
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.observe.degraded import Degradations
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import Member, MemberEvent

__all__ = ["ClusterMembers", "in_doubt"]

_REMEMBERED: Final = 1024
"""Number of ended node lives whose end is remembered."""


class ClusterMembers:
    """The cluster, as one frontend sees it. Used on the event loop's thread."""

    def __init__(self, node: Node, remember_models: Seconds, degradations: Degradations) -> None:
        """`remember_models`: as `remember` of `ModelDiscovery`. Pass each member event to
        `note`."""
        self._node = node
        self._degradations = degradations
        self._models = ModelDiscovery(
            node, remember_models, self._note_conflicts, self.wake_waiting
        )
        self._conflicts = ""
        self._changed: asyncio.Future[None] | None = None
        self._over: dict[NodeLife, str] = {}
        """How the last node lives ended."""
        self._refreshing = False

    def now(self) -> Seconds:
        """The node's time in seconds."""
        return self._node.now()

    # ------------------------------------------------------------------ models

    def cards(self) -> Mapping[str, ModelCard]:
        """Served models by name and alias, as the workers' cards announce them."""
        return self._models.cards()

    def block_size(self, model: str) -> int:
        """Tokens per KV block of the model; 0 if it is not served."""
        card = self._models.cards().get(model)
        return 0 if card is None else card.block_size

    def workers(self, name: str) -> tuple[NodeId, ...]:
        """Workers that serve this model or adapter."""
        return self._models.workers(name)

    def lacking(self, model: str, features: tuple[str, ...]) -> tuple[NodeId, ...]:
        """Workers that serve the model without one of these features: those of an earlier
        release."""
        return tuple(
            member.node
            for member in self._node.registry.by_role("worker")
            for offer in (member.card.models if member.card is not None else ())
            if offer.name == model and not set(features) <= set(offer.features)
        )

    def refusal(self, card: ModelCard, name: str | None = None) -> PdserveError | None:
        """The error for a request whose model or adapter no worker serves: `NotReady` before this
        node has joined, else `NoWorker`."""
        lora = None if name is None else card.lora(name)
        if self.workers(card.name if lora is None else lora.name):
            return None
        if lora is not None and self.workers(card.name):
            why = f"no worker has the adapter {lora.name!r} at the moment"
            return NoWorker(why, retry_after=1.0)
        why = self.why_no_worker()
        if not self._node.joined:
            # Before it has joined, this node does not know which workers the cluster has.
            return NotReady(why, retry_after=1.0)
        return NoWorker(f"no worker serves {card.name!r} at the moment: {why}", retry_after=1.0)

    @property
    def any_worker(self) -> bool:
        """True if a worker serves a model whose card is complete."""
        return self._models.any_worker

    def why_no_worker(self) -> str:
        """Why no worker serves anything, in words."""
        workers = self._node.registry.by_role("worker")
        if not self._node.joined:
            return "starting: joining the cluster"
        if not workers:
            return "there is no worker in the cluster"
        words = [m.card.reason for m in workers if m.card is not None and m.card.reason]
        if not words and all(m.card is not None and m.card.mode == "prefill" for m in workers):
            return (
                "there are only prefill workers, which take no requests by themselves: start one "
                "with --mode=decode"
            )
        return words[0] if words else "starting: workers are loading"

    # ------------------------------------------------------------------ lives

    def get(self, node: NodeId) -> Member | None:
        """A member of the cluster."""
        return self._node.registry.get(node)

    def epoch_of(self, worker: NodeId) -> Epoch | None:
        """The epoch of the worker's present life; None if it is not a member."""
        member = self.get(worker)
        return None if member is None else member.epoch

    def standing(self, life: NodeLife) -> LifeStatus:
        """The status of a worker's life, as this node knows it."""
        node, epoch = life
        member = self.get(node)
        if member is not None and member.epoch == epoch:
            return "doubtful" if in_doubt(member) else "here"
        return "died" if self._over.get(life) == "died" else "gone"

    def shares_kv(self, one: NodeId, other: NodeId) -> bool:
        """True if the two workers have a transfer backend in common."""
        members = map(self.get, (one, other))
        ways = [() if m is None or m.card is None else m.card.transfers for m in members]
        return not set(ways[0]).isdisjoint(ways[1])

    # ------------------------------------------------------------------ changes

    def note(self, event: MemberEvent) -> None:
        """Takes over a change of the membership."""
        member = event.member
        if isinstance(event, MemberGone):
            self._over[NodeLife(member.node, member.epoch)] = event.reason
            if len(self._over) > _REMEMBERED:
                del self._over[next(iter(self._over))]
        same_card = isinstance(event, MemberChanged) and event.before.card is member.card
        if member.role == "worker" and not self._refreshing and not same_card:
            self._refreshing = True
            self._node.timers.call_later(0.0, self._refresh_soon)
        self.wake_waiting()

    async def wait_change(self, *, timeout: Seconds = 1.0, at_least: Seconds = 0.0) -> None:
        """Waits until a member or model has come, changed or gone, at most `timeout` seconds.
        `at_least`: minimum wait in seconds, so that waiting requests do not ask at every change of
        a large cluster."""
        if at_least:
            await asyncio.sleep(at_least)
            timeout -= at_least
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._changed}, timeout=max(0.0, timeout))

    def wake_waiting(self) -> None:
        """Wakes all that wait for a change."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def refresh(self) -> None:
        """Reads the workers' cards anew; forgets what has not been served for long."""
        self._models.refresh()

    def _refresh_soon(self) -> None:
        self._refreshing = False
        self.refresh()

    def _note_conflicts(self, conflicts: Mapping[NodeId, str]) -> None:
        words = "; ".join(f"worker {node}: {why}" for node, why in sorted(conflicts.items()))
        if words == self._conflicts:
            return
        self._conflicts = words
        self._degradations.clear("model_conflict")
        if words:
            self._degradations.add("model_conflict", words)


def in_doubt(member: Member) -> bool:
    """True if the member may be dead, or is not reached from here."""
    return member.suspect or not member.reachable
