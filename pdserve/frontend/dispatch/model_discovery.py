"""Builds the list of models to serve from the cards that workers announce.

A card is a small offer plus large parts, which are fetched once by content hash. A model whose last
worker is gone is remembered for a while: a request for it then fails with "no worker" instead of
"no such model". So is a LoRA adapter that no worker has any more. Owned by `cluster_client`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import DeadlineExceeded, LinkLost, PdserveError
from pdserve.messages.node import model_card
from pdserve.runtime.model_catalog import build_catalog, difference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.lora import LoraSummary
    from pdserve.messages.node import ModelSummary
    from pdserve.runtime.model_catalog import CatalogEntry, ModelCatalog
    from pdserve.runtime.node import Node

__all__ = ["ModelDiscovery"]

_log = logging.getLogger(__name__)

_PART_TIMEOUT: Final[Seconds] = 5.0
"""Seconds before another worker is asked for the part; the bytes that came so far are kept."""
_PART_TRIES: Final = 6
_RETRY: Final[Seconds] = 1.0
"""Seconds before a failed fetch is repeated."""
_MOST_REMEMBERED: Final = 256
"""Most models without workers that are remembered, and most adapters of a model."""


@dataclass(slots=True)
class _Known:
    """One model whose card is complete."""

    offer: ModelSummary
    card: ModelCard
    last_seen: Seconds
    adapters: dict[str, tuple[LoraSummary, Seconds]] = field(default_factory=dict)
    """Adapters by name, each with the time at which a worker had it last."""

    def update(self, offer: ModelSummary, now: Seconds, remember: Seconds) -> None:
        """Takes over the features that all its workers share, and the adapters that any of them
        has. It takes effect at once, since nothing has to be fetched."""
        self.last_seen = now
        features, loras = offer.features, self._known_adapters(offer, now - remember)
        if (self.offer.features, self.offer.loras) != (features, loras):
            self.offer = replace(self.offer, features=features, loras=loras)
            self.card = replace(self.card, features=features, loras=loras)

    def _known_adapters(self, offer: ModelSummary, since: Seconds) -> tuple[LoraSummary, ...]:
        """The adapters of the model's workers, and those that a worker had after `since`."""
        for lora in offer.loras:
            self.adapters[lora.name] = (lora, self.last_seen)
        newest = sorted(self.adapters.items(), key=lambda item: -item[1][1])[:_MOST_REMEMBERED]
        self.adapters = {name: one for name, one in newest if one[1] >= since}
        return tuple(self.adapters[name][0] for name in sorted(self.adapters))


class ModelDiscovery:
    """The models of the cluster. Used on the event loop's thread."""

    def __init__(
        self,
        node: Node,
        remember: Seconds,
        on_conflicts: Callable[[Mapping[NodeId, str]], None],
        on_change: Callable[[], None],
    ) -> None:
        """`remember`: seconds for which a model without workers stays known. `on_conflicts` gets
        the workers that offer a different model under a name in use; `on_change` is called when a
        model's card is complete."""
        self._node = node
        self._remember = remember
        self._on_conflicts = on_conflicts
        self._on_change = on_change
        self._catalogue: ModelCatalog = build_catalog(())
        self._known: dict[str, _Known] = {}
        """Known models by their own names."""
        self._fetching: set[str] = set()
        """Models whose card is being fetched, or waits for another try."""
        self._complained: set[str] = set()
        """Models whose failed fetch has been logged."""
        self._cards: dict[str, ModelCard] = {}
        self._workers: dict[str, tuple[NodeId, ...]] = {}

    def cards(self) -> Mapping[str, ModelCard]:
        """Cards by every name that clients may use."""
        return self._cards

    def workers(self, name: str) -> tuple[NodeId, ...]:
        """Workers that serve this name now, by their cards; empty while the complete card is
        another model's."""
        return self._workers.get(name, ())

    @property
    def any_worker(self) -> bool:
        """True if a worker serves a model whose card is complete."""
        return bool(self._workers)

    def refresh(self) -> None:
        """Updates the models after a change of membership, or after some time."""
        self._catalogue = build_catalog(self._node.registry)
        self._on_conflicts(self._catalogue.conflicts)
        self._meet(self._node.now())
        self._name()

    def _meet(self, now: Seconds) -> None:
        """Adds every served model, and drops those without workers after a while."""
        names = self._catalogue.names
        served = {one.offer.name for one in names.values()}
        for name in sorted(served):
            known = self._known.get(name)
            if known is not None:
                known.update(names[name].offer, now, self._remember)
            if known is None or not _same(known.offer, names[name].offer):
                self._fetch(names[name])
        gone = sorted(self._known.keys() - served, key=lambda name: self._known[name].last_seen)
        for place, name in enumerate(gone, start=1):
            old = now - self._known[name].last_seen > self._remember
            if old or len(gone) - place >= _MOST_REMEMBERED:
                del self._known[name]
        self._complained &= served

    def _name(self) -> None:
        """Assigns names to models; served models win over remembered ones."""
        self._cards, self._workers = {}, {}
        for name, served in self._catalogue.names.items():
            known = self._known.get(served.offer.name)
            if known is None:
                continue
            self._cards[name] = known.card
            if not difference(known.offer, served.offer):
                self._workers[name] = served.workers
        for known in self._known.values():
            adapters = (lora.name for lora in known.offer.loras)
            for name in (known.offer.name, *known.offer.aliases, *adapters):
                if name not in self._catalogue.names:
                    self._cards.setdefault(name, known.card)

    # ------------------------------------------------------------------ fetching

    def _fetch(self, served: CatalogEntry) -> None:
        name = served.offer.name
        if name not in self._fetching:
            self._fetching.add(name)
            _ = self._node.tasks.spawn(self._complete(served), f"card of {name}")

    async def _complete(self, served: CatalogEntry) -> None:
        """Fetches the missing parts of a card, then checks again, because membership may have
        changed."""
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
        """Fetches one part from a worker whose card names it, or from another that may have it."""
        others = [node for node in served.workers if node != served.holder]
        owners = [served.holder, *others]
        error: PdserveError | None = None
        for turn in range(_PART_TRIES):
            owner = owners[turn % len(owners)]
            try:
                return await self._node.part(owner, hash, timeout=_PART_TIMEOUT)
            except DeadlineExceeded as late:
                error = late
            except LinkLost as lost:
                # No node that was asked has the part.
                error = lost
                if turn + 1 >= len(owners):
                    break
        assert error is not None
        raise error


def _same(a: ModelSummary, b: ModelSummary) -> bool:
    """True if a card made for one offer also fits the other: all fields but those that are updated
    without a new card, and the creation time, are equal."""
    fields = (f for f in a.__struct_fields__ if f not in ("created", "loras"))
    return all(getattr(a, f) == getattr(b, f) for f in fields)
