"""Builds the list of models to serve from the cards that workers announce.

A card is a small offer plus large parts, which are fetched once by content hash. A model whose last
worker is gone is remembered for a while: a request for it then fails with "no worker" instead of
"no such model". Owned by `cluster_client`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import DeadlineExceeded, LinkLost, PdserveError
from pdserve.messages.node import model_card
from pdserve.runtime.model_catalog import build_catalog, difference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.node import ModelSummary
    from pdserve.runtime.model_catalog import CatalogEntry, ModelCatalog
    from pdserve.runtime.node import Node

__all__ = ["ModelDiscovery"]

_log = logging.getLogger(__name__)

_PART_TIMEOUT: Final[Seconds] = 5.0
"""Then another worker is asked; what has come of the part until then is kept."""
_PART_TRIES: Final = 6
_RETRY: Final[Seconds] = 1.0
"""After a fetch that failed."""
_MOST_REMEMBERED: Final = 256
"""Models without workers."""


@dataclass(slots=True)
class _Known:
    """One model whose card is complete."""

    offer: ModelSummary
    card: ModelCard
    last_seen: Seconds

    def limit(self, features: tuple[str, ...]) -> None:
        """At once, for there is nothing to fetch: a worker that lacks one may have come."""
        if self.offer.features != features:
            self.offer = replace(self.offer, features=features)
            self.card = replace(self.card, features=features)


class ModelDiscovery:
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
        self._catalogue: ModelCatalog = build_catalog(())
        self._known: dict[str, _Known] = {}
        """By the model's own name."""
        self._fetching: set[str] = set()
        """Models whose card is being fetched, or waits for another try."""
        self._complained: set[str] = set()
        """Models whose fetch has failed, once each in the log."""
        self._cards: dict[str, ModelCard] = {}
        self._workers: dict[str, tuple[NodeId, ...]] = {}

    def cards(self) -> Mapping[str, ModelCard]:
        """Every name that may be asked for."""
        return self._cards

    def workers(self, name: str) -> tuple[NodeId, ...]:
        """Who serves a name now, as its card says; nobody while the card is another model's."""
        return self._workers.get(name, ())

    @property
    def any_worker(self) -> bool:
        """Somebody serves something whose card is complete."""
        return bool(self._workers)

    def refresh(self) -> None:
        """Members have changed, or time has passed."""
        self._catalogue = build_catalog(self._node.registry)
        self._on_conflicts(self._catalogue.conflicts)
        self._meet(self._node.now())
        self._name()

    def _meet(self, now: Seconds) -> None:
        """Know every model that is served, and for a while those that were."""
        names = self._catalogue.names
        served = {one.offer.name for one in names.values()}
        for name in sorted(served):
            known = self._known.get(name)
            if known is not None:
                known.last_seen = now
                known.limit(names[name].offer.features)
            if known is None or not _same(known.offer, names[name].offer):
                self._fetch(names[name])
        gone = sorted(self._known.keys() - served, key=lambda name: self._known[name].last_seen)
        for place, name in enumerate(gone, start=1):
            old = now - self._known[name].last_seen > self._remember
            if old or len(gone) - place >= _MOST_REMEMBERED:
                del self._known[name]
        self._complained &= served

    def _name(self) -> None:
        """What each name stands for: what is served comes before what is remembered."""
        self._cards, self._workers = {}, {}
        for name, served in self._catalogue.names.items():
            known = self._known.get(served.offer.name)
            if known is None:
                continue
            self._cards[name] = known.card
            if not difference(known.offer, served.offer):
                self._workers[name] = served.workers
        for known in self._known.values():
            for name in (known.offer.name, *known.offer.aliases):
                if name not in self._catalogue.names:
                    self._cards.setdefault(name, known.card)

    # ------------------------------------------------------------------ fetching

    def _fetch(self, served: CatalogEntry) -> None:
        name = served.offer.name
        if name not in self._fetching:
            self._fetching.add(name)
            _ = self._node.tasks.spawn(self._complete(served), f"card of {name}")

    async def _complete(self, served: CatalogEntry) -> None:
        """Get the parts, then look again: the world may have changed meanwhile."""
        offer = served.offer
        try:
            parts = {hash: await self._part(hash, served) for hash in offer.parts}
            card = model_card(offer, parts)
        except (PdserveError, UnicodeDecodeError) as error:
            if offer.name not in self._complained:
                self._complained.add(offer.name)
                _log.warning("the card of %s is not complete: %s", offer.name, error)
            self._node.timers.call_later(_RETRY, lambda: self._again(offer.name))
            return
        self._known[offer.name] = _Known(offer, card, self._node.now())
        count = len(served.workers)
        _log.info("model %s is offered by %d worker%s", offer.name, count, "s" * (count != 1))
        self._again(offer.name)
        self._on_change()

    def _again(self, name: str) -> None:
        self._fetching.discard(name)
        self.refresh()

    async def _part(self, hash: bytes, served: CatalogEntry) -> bytes:
        """From the worker whose card names it, or others that may have it too."""
        others = [node for node in served.workers if node != served.holder]
        owners = [served.holder, *others]
        error: PdserveError | None = None
        for turn in range(_PART_TRIES):
            owner = owners[turn % len(owners)]
            try:
                return await self._node.part(owner, hash, timeout=_PART_TIMEOUT)
            except DeadlineExceeded as late:
                error = late
            except LinkLost as lost:  # nobody who was asked has it
                error = lost
                if turn + 1 >= len(owners):
                    break
        assert error is not None
        raise error


def _same(a: ModelSummary, b: ModelSummary) -> bool:
    """Whether a card made for one offer serves the other: all but the time of its making."""
    return all(getattr(a, f) == getattr(b, f) for f in a.__struct_fields__ if f != "created")
