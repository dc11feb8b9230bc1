"""Builds a node's view of the cluster as one record: members, models, reports.

Pure. It reads the registry's members and the reports that arrived; `status` collects them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.messages.card import CLOSE_PREFIX, EXACT_PREFIX, NEARLY
from pdserve.messages.node import NodeCard
from pdserve.messages.status import ClusterStatus, MemberStatus, ModelStatus
from pdserve.runtime.model_catalog import build_catalog

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.status import MemberReachability, NodeReport
    from pdserve.runtime.registry import Member

__all__ = ["build_cluster_view"]

_STARTING = "starting: it has joined and has not described itself yet"
ROLES = ("router", "frontend", "worker", "planner", "agent")
"""The order in which members are listed; other roles follow."""


def build_cluster_view(
    *,
    cluster: str,
    me: Member,
    members: Iterable[Member],
    answers: Mapping[NodeId, NodeReport | str],
    now: Seconds,
) -> ClusterStatus:
    """Builds the view of node `me`.

    Args: `members` are the others; `answers` holds each member's report, or why there is none;
    `now` is wall-clock time.
    """
    nodes = (me, *members)
    served = build_catalog(nodes)
    listed = [_member(member, answers.get(member.node, "not asked")) for member in nodes]
    models = [
        ModelStatus(
            name=name,
            aliases=one.offer.aliases,
            engine=one.offer.engine,
            dtype=one.offer.dtype,
            max_model_len=one.offer.max_model_len,
            workers=one.workers,
            tokens=_tokens(one.offer.features),
            adapters=tuple(lora.id for lora in one.offer.loras),
        )
        for name, one in sorted(served.names.items())
        if name == one.offer.name
    ]
    return ClusterStatus(
        cluster=cluster,
        asked=me.node,
        now=now,
        members=tuple(sorted(listed, key=_order)),
        models=tuple(models),
        conflicts=served.conflicts,
    )


def _member(member: Member, answer: NodeReport | str) -> MemberStatus:
    card = member.card or NodeCard(reason=_STARTING)
    return MemberStatus(
        node=member.node,
        role=member.role,
        epoch=member.epoch,
        address=member.address,
        state=state_of(member),
        version=card.version,
        host=card.host,
        pid=card.pid,
        started=card.started,
        models=tuple(offer.name for offer in card.models),
        draining=card.draining,
        reason=card.reason,
        http=card.http,
        metrics=card.metrics,
        group=card.group,
        degraded=card.degraded,
        silence=answer if isinstance(answer, str) else "",
        report=None if isinstance(answer, str) else answer,
        tokens=tuple(_tokens(offer.features) for offer in card.models),
    )


def _tokens(features: Iterable[str]) -> str:
    """What a model's features promise for its tokens, or those that all its workers have."""
    if NEARLY in features:
        return "near ties may differ; a migrated stream draws other tokens"
    for prefix in (EXACT_PREFIX, CLOSE_PREFIX):
        for one in features:
            if one.startswith(prefix):
                return f"{prefix.removesuffix(':')} ({one.removeprefix(prefix)})"
    return "near ties may differ"


def state_of(member: Member) -> MemberReachability:
    """A member's state; this node's own lost link outranks others' suspicion."""
    if not member.reachable:
        return "unreachable"
    return "suspect" if member.suspect else "alive"


def _order(member: MemberStatus) -> tuple[int, str, NodeId]:
    known = member.role in ROLES
    return (ROLES.index(member.role) if known else len(ROLES), member.role, member.node)
