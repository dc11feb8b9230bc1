"""Keeps which change has which pod of a Deployment, and says what to do next. Pure.

A Deployment has a number of pods and no name for a start. So the changes stand in an annotation of
the Deployment, and the number of pods is that of the changes which are to run. Pods that somebody
else asked for are taken in under their own names, so that none of them is ended unasked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from pdserve.ids import NodeId
from pdserve.messages.planner import Instance
from pdserve.planner.actuators.base import KEEP_ENDED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "CHEAP",
    "ChangeRecord",
    "DeploymentRecord",
    "PodState",
    "Todo",
    "pod_instance",
    "reconcile",
    "record_of",
]

CHEAP: Final = -(2**31)
"""Cost of a pod that is to end: the least there is. Others have 0, or what their template says."""
_LOST: Final = "its pod was deleted"

Changes = dict[str, "ChangeRecord"]


class ChangeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change of a Deployment."""

    pod: str = ""
    """The pod that it was given; a worker's node has the same name."""
    stop: bool = False
    """True: it is to end."""
    ended: float = 0.0
    """When it had ended, in Unix seconds; 0: it has not."""
    reason: str = ""
    """Why it has failed."""
    before: str = ""
    """When the pod's worker had ended before the change got the pod: that end does not count."""

    @property
    def wanted(self) -> bool:
        """True if it is to have a pod."""
        return not self.stop and not self.ended


class DeploymentRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the planners know of a Deployment; it stands in its annotation."""

    changes: dict[str, ChangeRecord] = {}
    size: int = 0
    """Pods that are accounted for; what the Deployment has beyond, somebody else wants."""
    others: int = 0
    """Pods that somebody else wants and that have no node yet."""


class PodState(NamedTuple):
    """A pod, as far as it matters here."""

    name: str
    phase: str
    ready: bool
    scheduled: bool
    leaving: bool
    """True: its end was ordered."""
    waiting: str = ""
    """Why its container or its place waits."""
    created: str = ""
    cost: int = 0
    """Its `pod-deletion-cost`."""
    drained: str = ""
    """When its worker has last ended with status 0; Kubernetes starts it again in the same pod."""

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """The order in which a ReplicaSet ends pods, before it looks at their cost: those without a
        node, then those that do not run, then those that are not ready."""
        return (self.scheduled, self.phase == "Running", self.ready)

    @property
    def active(self) -> bool:
        """True if a ReplicaSet counts it. One that was evicted stays listed, and has a
        successor."""
        return not self.leaving and self.phase not in ("Failed", "Succeeded")

    @property
    def broken(self) -> bool:
        """True if it does not come to run by waiting."""
        return self.phase == "Failed" or self.waiting.startswith("CrashLoopBackOff")


class Todo(NamedTuple):
    """What brings a Deployment to where its changes want it."""

    record: DeploymentRecord
    replicas: int
    cheap: tuple[str, ...]
    """Pods that are to be ended before others, and whose cost does not say so yet."""


def record_of(text: str) -> DeploymentRecord:
    """Reads the annotation. Errors: `msgspec.DecodeError`."""
    return msgspec.json.decode(text or "{}", type=DeploymentRecord)


def reconcile(
    record: DeploymentRecord, pods: Sequence[PodState], replicas: int, now: float
) -> Todo:
    """Gives pods to changes, notes which have ended, and sizes the Deployment.

    A pod without a node is nobody's: no process of it has run, and a ReplicaSet ends it first.
    """
    placed = {pod.name: pod for pod in pods if pod.active and pod.scheduled}
    changes = _with_ends(record.changes, {pod.name: pod for pod in pods}, now)
    taken = {one.pod for one in changes.values()}
    # A cheap pod is never given again: it is the first to go.
    free = [pod for pod in placed.values() if pod.name not in taken and pod.cost > CHEAP]
    free.sort(key=_birth)
    others = record.others + max(0, replicas - record.size)
    for pod in free[:others]:
        changes[pod.name] = ChangeRecord(pod=pod.name, before=pod.drained)
    _give(changes, free[others:])
    others = max(0, others - len(free))
    wanted = [one for one in changes.values() if one.wanted]
    names = {one.pod for one in wanted if one.pod}
    kept = [placed[name] for name in sorted(names) if name in placed]
    ends = [pod for name, pod in sorted(placed.items()) if name not in names]
    size = _size(kept, ends, others + len(wanted) - len(names))
    # Until the number has fallen, the pods that are too many are the planners' own.
    known = DeploymentRecord(changes=changes, size=max(size, replicas), others=others)
    return Todo(known, size, tuple(pod.name for pod in ends if pod.cost > CHEAP))


def _size(kept: Sequence[PodState], ends: Sequence[PodState], to_come: int) -> int:
    """Pods that the Deployment is to have now.

    The number falls below that of the pods with a node only while those that are to end are the
    first that a ReplicaSet would end: else it would take a worker that serves, or one that is about
    to. Pods that are still to come follow then: with them the number might not fall at all.
    """
    if not ends:
        return len(kept) + to_come
    if _ends_first(ends, kept):
        return len(kept)
    return len(kept) + len(ends) + to_come


def _birth(pod: PodState) -> tuple[str, str]:
    return (pod.created, pod.name)


def _give(changes: Changes, free: Sequence[PodState]) -> None:
    """Gives the oldest pods to the oldest changes that have none."""
    waiting = [change for change, one in changes.items() if one.wanted and not one.pod]
    for change, pod in zip(waiting, free, strict=False):
        changes[change] = replace(changes[change], pod=pod.name, before=pod.drained)


def _with_ends(
    changes: Mapping[str, ChangeRecord], pods: Mapping[str, PodState], now: float
) -> Changes:
    known = {change: _followed(one, pods.get(one.pod), now) for change, one in changes.items()}
    return {
        change: one
        for change, one in known.items()
        if not one.ended or now - one.ended < KEEP_ENDED
    }


def _followed(one: ChangeRecord, pod: PodState | None, now: float) -> ChangeRecord:
    """A change after what was seen of its pod."""
    if one.ended:
        return one
    if pod is None:
        gone = one.stop or one.pod
        return replace(one, ended=now, reason=one.reason if one.stop else _LOST) if gone else one
    drained = pod.drained not in ("", one.before) or pod.phase == "Succeeded"
    if pod.broken or pod.phase == "Succeeded":
        orderly = one.stop or drained
        reason = one.reason if orderly else pod.waiting or pod.phase
        return replace(one, ended=now, reason=reason)
    if one.stop:
        return one
    if pod.leaving:
        return replace(one, stop=True, reason=_LOST)
    return replace(one, stop=True) if drained else one


def _ends_first(ends: Sequence[PodState], kept: Sequence[PodState]) -> bool:
    """True if a ReplicaSet ends all of `ends` before any of `kept`: by rank, and among equals by a
    cost that it has had time to read."""
    if not ends or not kept:
        return True
    last, first = max(one.rank for one in ends), min(one.rank for one in kept)
    return last < first or (last == first and all(one.cost <= CHEAP for one in ends))


def pod_instance(
    change: str, kind: str, one: ChangeRecord, pod: PodState | None, waits: str = ""
) -> Instance:
    """What the port tells of a change. Args: `waits` says why pods have no node."""
    if one.ended:
        state = "failed" if one.reason else "ended"
    elif one.stop:
        state = "ending"
    else:
        state = "booting" if pod is not None and pod.phase == "Running" else "pending"
    return Instance(
        change=change,
        kind=kind,
        actuator="kubernetes",
        ref=one.pod,
        state=state,
        reason=one.reason or (pod.waiting if pod is not None else "" if one.pod else waits),
        node=NodeId(one.pod) if one.pod else None,
    )
