"""The models a frontend may offer: cards put together from what workers announce.

A card is a small offer and large parts that are fetched once, by content. A model whose last worker
is gone is remembered for a while: asking for it is then "no worker", not "no such model". Owned by
`cluster`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.errors import PdserveError
from pdserve.messages.node import model_card
from pdserve.runtime.models import catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.node import ModelOffer
    from pdserve.runtime.models import Catalogue
    from pdserve.runtime.node import Node

__all__ = ["Offers"]

_log = logging.getLogger(__name__)

_PART_TIMEOUT: Final[Seconds] = 30.0
_RETRY: Final[Seconds] = 1.0
"""After a fetch that failed while its worker lives on."""
_MOST_REMEMBERED: Final = 256


@dataclass(slots=True)
class _Known:
    """One model whose card is complete."""

    offer: ModelOffer
    card: ModelCard
    last_seen: Seconds


class Offers:
    """See above. Everything happens on the loop's thread."""

    def __init__(
        self,
        node: Node,
        remember: Seconds,
        on_conflicts: Callable[[Mapping[NodeId, str]], None],
        on_change: Callable[[], None],
    ) -> None:
        """`remember`: how long a model without workers stays known. `on_conflicts` hears which
        workers offer another model under a name that is taken, `on_change` that a model's card is
        complete."""
        self._node = node
        self._remember = remember
        self._on_conflicts = on_conflicts
        self._on_change = on_change
        self._catalogue: Catalogue = catalogue(())
        self._known: dict[str, _Known] = {}
        """By the model's own name."""
        self._fetching: set[str] = set()
        self._cards: dict[str, ModelCard] = {}

    def cards(self) -> Mapping[str, ModelCard]:
        """Every name that may be asked for."""
        return self._cards

    def workers(self, name: str) -> tuple[NodeId, ...]:
        """Who serves a name now."""
        served = self._catalogue.names.get(name)
        return () if served is None else served.workers

    @property
    def any_worker(self) -> bool:
        """Somebody serves something whose card is complete."""
        return any(name in self._cards for name in self._catalogue.names)

    def refresh(self) -> None:
        """Members have changed, or time has passed."""
        self._catalogue = catalogue(self._node.registry)
        self._on_conflicts(self._catalogue.conflicts)
        now = self._node.now()
        for served in self._catalogue.names.values():
            known = self._known.get(served.offer.name)
            if known is not None and _same(known.offer, served.offer):
                known.last_seen = now
            else:
                self._fetch(served.offer, served.workers)
        self._forget(now)
        self._cards = {
            name: known.card
            for known in self._known.values()
            for name in (known.offer.name, *known.offer.aliases)
        }

    def _forget(self, now: Seconds) -> None:
        old = [n for n, k in self._known.items() if now - k.last_seen > self._remember]
        for name in old:
            del self._known[name]
        while len(self._known) > _MOST_REMEMBERED:
            del self._known[min(self._known, key=lambda name: self._known[name].last_seen)]

    # ------------------------------------------------------------------ fetching

    def _fetch(self, offer: ModelOffer, workers: tuple[NodeId, ...]) -> None:
        if offer.name not in self._fetching:
            self._fetching.add(offer.name)
            _ = self._node.tasks.spawn(self._complete(offer, workers), f"card of {offer.name}")

    async def _complete(self, offer: ModelOffer, workers: tuple[NodeId, ...]) -> None:
        """Get the parts, then look again: the world may have changed meanwhile."""
        try:
            parts = {hash: await self._part(hash, workers) for hash in offer.parts}
            self._known[offer.name] = _Known(offer, model_card(offer, parts), self._node.now())
            _log.info("model %s is offered by %d workers", offer.name, len(workers))
        except PdserveError as error:
            _log.warning("the card of %s is not complete: %s", offer.name, error)
            self._node.timers.call_later(_RETRY, self.refresh)
            return
        finally:
            self._fetching.discard(offer.name)
        self.refresh()
        self._on_change()

    async def _part(self, hash: bytes, workers: tuple[NodeId, ...]) -> bytes:
        """From the first worker that has it; gossip asks others by itself."""
        return await self._node.part(workers[0], hash, timeout=_PART_TIMEOUT)


def _same(a: ModelOffer, b: ModelOffer) -> bool:
    """Whether a card made for one offer serves the other: all but the time of its making."""
    return all(getattr(a, f) == getattr(b, f) for f in a.__struct_fields__ if f != "created")
