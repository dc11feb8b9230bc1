"""Lists the models that the cluster serves, and their workers, from the members' cards.

A prefill worker alone serves no model: its offer must match the decode workers' model, whenever it
started, and its context must be no shorter. Two workers that offer one name must mean the same
model: same compatibility hash, tokenizer and chat template. If not, the worker that started first
holds the name, on every node alike, and the others are in conflict and serve nothing. Pure
functions of the members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import NodeId
    from pdserve.messages.node import ModelSummary
    from pdserve.runtime.registry import Member

__all__ = ["CatalogEntry", "ModelCatalog", "build_catalog", "difference"]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model name and the workers that serve it."""

    offer: ModelSummary
    """The offer of the worker that has served it longest, with the features that all its workers
    and prefill workers share: a request may go to any of them.
    """
    holder: NodeId
    """The worker that made `offer`; others may name other parts or aliases."""
    workers: tuple[NodeId, ...]
    """Its workers, sorted; draining ones included."""


@dataclass(frozen=True, slots=True)
class ModelCatalog:
    """All models that the cluster serves."""

    names: dict[str, CatalogEntry]
    """Models and aliases; an alias shares its model's offer."""
    conflicts: dict[NodeId, str]
    """Workers that offer another model under a taken name, with the reason. None of their offers is
    served, because the name would be ambiguous.
    """


def build_catalog(members: Iterable[Member]) -> ModelCatalog:
    """Builds the catalog; the order of `members` does not matter."""
    cards = [
        (member.card.started, member.node, member.card)
        for member in members
        if member.card is not None and member.card.models
    ]
    held: dict[str, tuple[ModelSummary, NodeId]] = {}
    workers: dict[str, list[NodeId]] = {}
    features: dict[str, tuple[str, ...]] = {}
    conflicts: dict[NodeId, str] = {}
    # Prefill workers last: one that means another model must not shut out those who serve.
    for _, node, card in sorted(cards, key=lambda one: (one[2].mode == "prefill", *one[:2])):
        offers = card.models
        why = _conflict(held, offers, prefills=card.mode == "prefill")
        if why:
            conflicts[node] = why
            continue
        for offer in offers:
            for name in _names(offer):
                held.setdefault(name, (offer, node))
                had = features.get(name, offer.features)
                features[name] = tuple(one for one in had if one in offer.features)
                if card.mode != "prefill":
                    workers.setdefault(name, []).append(node)
    names = {
        name: CatalogEntry(
            replace(held[name][0], features=features[name]), held[name][1], tuple(sorted({*nodes}))
        )
        for name, nodes in workers.items()
    }
    return ModelCatalog(names, conflicts)


def _names(offer: ModelSummary) -> tuple[str, ...]:
    """The names of an offer, each once, the model's own first."""
    return tuple(dict.fromkeys((offer.name, *offer.aliases)))


def _conflict(
    held: dict[str, tuple[ModelSummary, NodeId]],
    offers: tuple[ModelSummary, ...],
    *,
    prefills: bool,
) -> str:
    """Why a worker's offer conflicts with those before it; empty: it does not."""
    for offer in offers:
        for name in _names(offer):
            why = difference(held[name][0], offer) if name in held else ""
            longer = name in held and offer.max_model_len > held[name][0].max_model_len
            if why == "context length" and prefills and longer:
                continue  # it prefills whatever those who serve take
            if why:
                return f"its {name!r} has another {why} than the one served before it"
    return ""


def difference(held: ModelSummary, offer: ModelSummary) -> str:
    """How two offers of one name differ; empty: in nothing that matters."""
    for field, words in (
        ("name", "model"),
        ("compat_hash", "compatibility hash (weights, dtype or KV layout)"),
        ("tokenizer", "tokenizer"),
        ("tokenizer_config", "tokenizer configuration"),
        ("chat_template", "chat template"),
        ("max_model_len", "context length"),
    ):
        if getattr(held, field) != getattr(offer, field):
            return words
    return ""
