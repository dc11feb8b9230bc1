"""A node's view of the cluster as one record: members, models, who answered. Pure.

It reads the registry's members and the reports that came in; asking for them is `status`' business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.messages.node import NodeCard
from pdserve.messages.status import ClusterStatus, MemberStatus, ModelStatus
from pdserve.runtime.models import catalogue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.status import Report, State
    from pdserve.runtime.registry import Member

__all__ = ["overview"]

ROLES = ("router", "frontend", "worker")
"""In this order members are listed; those of other roles follow."""


def overview(
    *,
    cluster: str,
    me: Member,
    members: Iterable[Member],
    answers: Mapping[NodeId, Report | str],
    now: Seconds,
) -> ClusterStatus:
    """The view of `me`. Args: `members` are the others, `answers` what each said, or why it did
    not; `now` is wall-clock time."""
    everybody = (me, *members)
    served = catalogue(everybody)
    listed = [_member(member, answers.get(member.node, "not asked")) for member in everybody]
    models = [
        ModelStatus(
            name=name,
            aliases=one.offer.aliases,
            engine=one.offer.engine,
            dtype=one.offer.dtype,
            max_model_len=one.offer.max_model_len,
            workers=one.workers,
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


def _member(member: Member, answer: Report | str) -> MemberStatus:
    card = member.card or NodeCard()
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
    )


def state_of(member: Member) -> State:
    """An own lost link says more than others' suspicion."""
    if not member.reachable:
        return "unreachable"
    return "suspect" if member.suspect else "alive"


def _order(member: MemberStatus) -> tuple[int, str, NodeId]:
    known = member.role in ROLES
    return (ROLES.index(member.role) if known else len(ROLES), member.role, member.node)
