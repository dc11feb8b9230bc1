"""Lists the models that the cluster serves, and their workers, from the members' cards.

A prefill worker alone serves no model: its offer must match the decode workers' model, whenever it
started, and its context must be no shorter. Two workers that offer one name must mean the same
model: same compatibility hash, tokenizer and chat template. If not, the worker that started first
holds the name, on every node alike, and the others are in conflict and serve nothing.

A LoRA adapter is a name of its own, served by the offer of its model. Workers of one model may have
different adapters, but a name means the same files on all of them. Pure functions of the members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import NodeId
    from pdserve.messages.lora import LoraSummary
    from pdserve.messages.node import ModelSummary
    from pdserve.runtime.registry import Member

__all__ = ["CatalogEntry", "ModelCatalog", "build_catalog", "difference"]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model name and the workers that serve it."""

    offer: ModelSummary
    """The offer of the worker that has served it longest, with the features that all its workers
    and prefill workers share: a request may go to any of them. It lists the adapters that any of
    the model's workers has.
    """
    holder: NodeId
    """The worker that made `offer`; others may name other parts or aliases."""
    workers: tuple[NodeId, ...]
    """Its workers, sorted; draining ones included."""


@dataclass(frozen=True, slots=True)
class ModelCatalog:
    """All models that the cluster serves."""

    names: dict[str, CatalogEntry]
    """Models, aliases and adapters; the latter two share their model's offer."""
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
    held: dict[str, _Held] = {}
    loras: dict[str, dict[str, LoraSummary]] = {}
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
            serves = card.mode != "prefill"
            if serves:
                for lora in offer.loras:
                    loras.setdefault(offer.name, {}).setdefault(lora.name, lora)
            for name in _names(offer):
                held.setdefault(name, _Held(offer, node))
                had = features.get(name, offer.features)
                features[name] = tuple(one for one in had if one in offer.features)
                if serves:
                    workers.setdefault(name, []).append(node)
    names = {
        name: CatalogEntry(
            _shared(held[name].offer, features[name], loras),
            held[name].node,
            tuple(sorted({*nodes})),
        )
        for name, nodes in workers.items()
    }
    return ModelCatalog(names, conflicts)


class _Held(NamedTuple):
    """What a name means, and who says so."""

    offer: ModelSummary
    node: NodeId


def _shared(
    offer: ModelSummary, features: tuple[str, ...], loras: dict[str, dict[str, LoraSummary]]
) -> ModelSummary:
    """The offer of a model, with what its workers have together."""
    adapters = loras.get(offer.name, {})
    return replace(
        offer, features=features, loras=tuple(adapters[name] for name in sorted(adapters))
    )


def _names(offer: ModelSummary) -> tuple[str, ...]:
    """The names of an offer, each once: the model's own, its aliases, its adapters."""
    adapters = (lora.name for lora in offer.loras)
    return tuple(dict.fromkeys((offer.name, *offer.aliases, *adapters)))


def _conflict(held: dict[str, _Held], offers: tuple[ModelSummary, ...], *, prefills: bool) -> str:
    """Why a worker's offer conflicts with those before it; empty: it does not."""
    for offer in offers:
        for name in _names(offer):
            if name not in held:
                continue
            before = held[name].offer
            why = difference(before, offer)
            longer = offer.max_model_len > before.max_model_len
            if why == "context length" and prefills and longer:
                why = ""  # it prefills whatever those who serve take
            if why == "engine":
                return (
                    f"its {name!r} is computed by the engine {offer.engine}, and the one served "
                    f"before it by {before.engine}: serve it under another name, or by one engine"
                )
            if why:
                return f"its {name!r} has another {why} than the one served before it"
            if _adapter(before, name) != _adapter(offer, name):
                return _adapter_conflict(name, before, offer)
    return ""


def _adapter(offer: ModelSummary, name: str) -> LoraSummary | None:
    """The adapter that this name of an offer stands for; None: the model itself."""
    return next((lora for lora in offer.loras if lora.name == name), None)


def _adapter_conflict(name: str, before: ModelSummary, offer: ModelSummary) -> str:
    """Says how one name is an adapter in two different ways, or an adapter and the model."""
    theirs, ours = _adapter(before, name), _adapter(offer, name)
    if theirs is not None and ours is not None:
        return (
            f"its adapter {name!r} has other files (revision {ours.revision}) than the one served "
            f"before it (revision {theirs.revision})"
        )
    kind, other = ("an adapter", "the model") if theirs is None else ("the model", "an adapter")
    return f"its {name!r} is {kind}, and {other} is served under this name before it"


def difference(held: ModelSummary, offer: ModelSummary) -> str:
    """How two offers of one name differ; empty: in nothing that matters."""
    for field, words in (
        ("name", "model"),
        ("engine", "engine"),
        ("compat_hash", "compatibility hash (weights, dtype or KV layout)"),
        ("tokenizer", "tokenizer"),
        ("tokenizer_config", "tokenizer configuration"),
        ("chat_template", "chat template"),
        ("max_model_len", "context length"),
    ):
        if getattr(held, field) != getattr(offer, field):
            return words
    return ""
