"""Which models the cluster serves, and who serves each, as the cards of its members say.

Two workers that offer one name must mean the same model: same compatibility hash, same tokenizer,
same template. Where they do not, the one that started first holds the name, on every node alike,
and the others are named as being in conflict. Plain functions of the members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import NodeId
    from pdserve.messages.node import ModelOffer
    from pdserve.runtime.registry import Member

__all__ = ["Catalogue", "Served", "catalogue"]


@dataclass(frozen=True, slots=True)
class Served:
    """One name, and everybody who serves it."""

    offer: ModelOffer
    """Of the worker that has served it longest."""
    workers: tuple[NodeId, ...]
    """Sorted; those that drain included."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything that is served."""

    names: dict[str, Served]
    """Models and aliases."""
    conflicts: dict[NodeId, str]
    """Workers whose offer is another model than the name's, with the reason in words."""


def catalogue(members: Iterable[Member]) -> Catalogue:
    """See above; the order of `members` does not matter."""
    offers = [
        (member.card.started, member.node, offer)
        for member in members
        if member.card is not None
        for offer in member.card.models
    ]
    first: dict[str, ModelOffer] = {}
    workers: dict[str, list[NodeId]] = {}
    conflicts: dict[NodeId, str] = {}
    for _, node, offer in sorted(offers, key=lambda one: one[:2]):
        for name in (offer.name, *offer.aliases):
            held = first.setdefault(name, offer)
            why = _difference(held, offer)
            if why:
                conflicts[node] = f"its {name!r} has another {why} than the one served before it"
            else:
                workers.setdefault(name, []).append(node)
    served = {name: Served(first[name], tuple(sorted(nodes))) for name, nodes in workers.items()}
    return Catalogue(served, conflicts)


def _difference(held: ModelOffer, offer: ModelOffer) -> str:
    """In what two offers of one name differ; empty: in nothing that matters."""
    for field, words in (
        ("name", "model"),
        ("compat_hash", "compatibility hash (weights, dtype or KV layout)"),
        ("tokenizer", "tokenizer"),
        ("chat_template", "chat template"),
        ("max_model_len", "context length"),
    ):
        if getattr(held, field) != getattr(offer, field):
            return words
    return ""
