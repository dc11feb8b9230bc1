"""Which models the cluster serves, and who serves each, as the cards of its members say.

A prefill worker serves nobody by itself: it counts only in that its model must be the others',
however long it has run, and that its context is no shorter.
Two workers that offer one name must mean the same model: same compatibility hash, same tokenizer,
same template. Where they do not, the one that started first holds the name, on every node alike,
and the others serve nothing and are named as being in conflict. Plain functions of the members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import NodeId
    from pdserve.messages.node import ModelOffer
    from pdserve.runtime.registry import Member

__all__ = ["Catalogue", "Served", "catalogue", "difference"]


@dataclass(frozen=True, slots=True)
class Served:
    """One name, and everybody who serves it."""

    offer: ModelOffer
    """Of the worker that has served it longest, with the features that all have who serve it or
    prefill for it: a request may come to any of them."""
    holder: NodeId
    """That worker: whoever else serves the name may name other parts, or have other aliases."""
    workers: tuple[NodeId, ...]
    """Sorted; those that drain included."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything that is served."""

    names: dict[str, Served]
    """Models and aliases; the offer of an alias is another name's too."""
    conflicts: dict[NodeId, str]
    """Workers that offer another model under a taken name, with the reason in words. Nothing that
    they offer is served: nobody could tell which of two models a name means."""


def catalogue(members: Iterable[Member]) -> Catalogue:
    """See above; the order of `members` does not matter."""
    cards = [
        (member.card.started, member.node, member.card)
        for member in members
        if member.card is not None and member.card.models
    ]
    held: dict[str, tuple[ModelOffer, NodeId]] = {}
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
        name: Served(
            replace(held[name][0], features=features[name]), held[name][1], tuple(sorted({*nodes}))
        )
        for name, nodes in workers.items()
    }
    return Catalogue(names, conflicts)


def _names(offer: ModelOffer) -> tuple[str, ...]:
    """Each once, the model's own first."""
    return tuple(dict.fromkeys((offer.name, *offer.aliases)))


def _conflict(
    held: dict[str, tuple[ModelOffer, NodeId]], offers: tuple[ModelOffer, ...], *, prefills: bool
) -> str:
    """Why a worker cannot serve what it offers beside those before it; empty: it can."""
    for offer in offers:
        for name in _names(offer):
            why = difference(held[name][0], offer) if name in held else ""
            longer = name in held and offer.max_model_len > held[name][0].max_model_len
            if why == "context length" and prefills and longer:
                continue  # it prefills whatever those who serve take
            if why:
                return f"its {name!r} has another {why} than the one served before it"
    return ""


def difference(held: ModelOffer, offer: ModelOffer) -> str:
    """In what two offers of one name differ; empty: in nothing that matters."""
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
