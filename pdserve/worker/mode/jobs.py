"""What a worker does in each mode, and whether others would do it if this one stopped.

    requests   takes requests
    decode     has prompts computed by prefill workers
    prompts    computes prompts for decode workers

`both` is a live mode only: it takes requests, as `aggregated` does, and prompts beside them. Pure:
the caller passes what it knows of the other workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pdserve.ids import NodeId
    from pdserve.messages.engine import PathState
    from pdserve.messages.node import NodeCard
    from pdserve.runtime.registry import Member

__all__ = ["LIVE_MODES", "LiveMode", "card_mode", "jobs_of", "undone_without", "unreachable_decode"]

LiveMode = Literal["aggregated", "prefill", "decode", "both"]
LIVE_MODES: Final[tuple[LiveMode, ...]] = ("aggregated", "prefill", "decode", "both")
CardMode = Literal["aggregated", "prefill", "decode"]
Job = Literal["requests", "decode", "prompts"]

_JOBS: Final[Mapping[str, frozenset[Job]]] = {
    "aggregated": frozenset(("requests",)),
    "prefill": frozenset(("prompts",)),
    "decode": frozenset(("requests", "decode")),
    "both": frozenset(("requests", "prompts")),
}
_WORDS: Final[Mapping[Job, str]] = {
    "requests": "takes requests",
    "decode": "has its prompts computed by prefill workers",
    "prompts": "computes prompts for decode workers",
}


def jobs_of(mode: str) -> frozenset[Job]:
    """What a worker of this mode does; nothing for an unknown mode."""
    return _JOBS.get(mode, frozenset())


def card_mode(mode: LiveMode) -> CardMode:
    """The mode on the card, which earlier releases read; they take `both` for `aggregated`."""
    return "aggregated" if mode == "both" else mode


def undone_without(
    me: NodeId,
    mode: LiveMode,
    target: LiveMode | Literal[""],
    models: Collection[str],
    others: Iterable[Member],
    *,
    sure: bool = False,
) -> str:
    """Returns the job that no worker would do if `me` changed from `mode` to `target`, in words;
    empty if other workers do all its jobs. An empty `target`: it stops. If two workers leave at the
    same time, the one with the greater name counts as staying (see `ModeSwitch`). With `sure`, no
    worker that leaves counts. Without decode workers nobody needs prompts to be computed, and
    without prefill workers nobody needs a worker to compute them for."""
    lost = jobs_of(mode) - jobs_of(target)
    workers = [one for one in others if one.node != me]
    for model in sorted(models):
        idle: set[Job] = set()
        if target != "decode" and not _any_in("decode", workers, model):
            idle.add("prompts")
        if target != "prefill" and not _any_in("prefill", workers, model):
            idle.add("decode")
        for job in sorted(lost - idle):
            if not any(_does(one, job, model, me, sure=sure) for one in workers):
                return f"no other ready worker of model {model!r} {_WORDS[job]}"
    return ""


def _any_in(mode: CardMode, workers: Iterable[Member], model: str) -> bool:
    """True if there is a worker of the model in this mode, in whatever state."""
    cards = (one.card for one in workers if one.card is not None and one.card.mode == mode)
    return any(offer.name == model for card in cards for offer in card.models)


def _does(member: Member, job: Job, model: str, me: NodeId, *, sure: bool) -> bool:
    card = member.card
    if card is None or card.draining or member.suspect or not member.reachable:
        return False
    if job not in _card_jobs(card) or all(one.name != model for one in card.models):
        return False
    if card.leaving and (card.reason or job != "requests"):  # without a reason it takes requests
        return not sure and member.node > me
    return not card.reason


def _card_jobs(card: NodeCard) -> frozenset[Job]:
    prompts: frozenset[Job] = frozenset(("prompts",)) if card.prompt_share else frozenset()
    return jobs_of(card.mode) | prompts


def unreachable_decode(
    model: str, transfers: Collection[str], paths: Iterable[PathState], others: Iterable[Member]
) -> str:
    """Why KV could reach no decode worker of the model; empty: it can, or there is none."""
    cut_off = {path.node for path in paths if path.backend == "none" and path.down}
    cards = [
        (one.node, one.card)
        for one in others
        if one.card is not None
        and one.card.mode == "decode"
        and any(offer.name == model for offer in one.card.models)
    ]
    if not cards or any({*card.transfers} & {*transfers} and n not in cut_off for n, card in cards):
        return ""
    return f"no KV can reach {', '.join(sorted(node for node, _ in cards))}"
