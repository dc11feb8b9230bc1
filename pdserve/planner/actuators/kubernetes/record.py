"""Keeps which change has which pod of a Deployment, and says what to do next. Pure.

A Deployment has a number of pods and no name for a start. So the changes stand in an annotation of
the Deployment, and the number of pods is that of the changes which are to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from pdserve.ids import NodeId
from pdserve.messages.planner import Instance
from pdserve.planner.actuators.base import KEEP_ENDED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ChangeRecord", "PodState", "Todo", "changes_of", "pod_instance", "reconcile"]

_LOST: Final = "its pod was deleted"


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

    @property
    def wanted(self) -> bool:
        """True if it is to have a pod."""
        return not self.stop and not self.ended


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

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """The order in which a ReplicaSet ends pods, before it looks at their cost: those without a
        node, then those that do not run, then those that are not ready."""
        return (self.scheduled, self.phase == "Running", self.ready)

    @property
    def broken(self) -> bool:
        """True if it does not come to run by waiting."""
        return self.phase == "Failed" or self.waiting.startswith("CrashLoopBackOff")


class Todo(NamedTuple):
    """What brings a Deployment to where its changes want it."""

    changes: dict[str, ChangeRecord]
    replicas: int
    cheap: tuple[str, ...]
    """Pods that are to be ended before others."""


def changes_of(text: str) -> dict[str, ChangeRecord]:
    """Reads the annotation. Errors: `msgspec.DecodeError`."""
    return msgspec.json.decode(text or "{}", type=dict[str, ChangeRecord])


def reconcile(
    changes: Mapping[str, ChangeRecord],
    pods: Sequence[PodState],
    replicas: int,
    now: float,
) -> Todo:
    """Gives pods to changes, notes which have ended, and sizes the Deployment.

    The number of pods falls only while those that are to end are the first that a ReplicaSet would
    end: else it would take a worker that serves, or one that is about to.
    """
    there = {pod.name: pod for pod in pods if not pod.leaving}
    new = _with_ends(changes, {pod.name: pod for pod in pods}, now)
    taken = {one.pod for one in new.values()}
    free = sorted((pod.created, pod.name) for pod in there.values() if pod.name not in taken)
    for change, one in new.items():
        if one.wanted and not one.pod and free:
            new[change] = msgspec.structs.replace(one, pod=free.pop(0)[1])
    kept = {one.pod for one in new.values() if one.wanted and one.pod}
    cheap = [pod for name, pod in sorted(there.items()) if name not in kept]
    want = sum(one.wanted for one in new.values())
    if want < replicas and not _ends_first(cheap, [there[name] for name in kept]):
        want = replicas
    return Todo(new, want, tuple(pod.name for pod in cheap))


def _with_ends(
    changes: Mapping[str, ChangeRecord], pods: Mapping[str, PodState], now: float
) -> dict[str, ChangeRecord]:
    new = {}
    for change, one in changes.items():
        if one.ended:
            if now - one.ended < KEEP_ENDED:
                new[change] = one
            continue
        pod = pods.get(one.pod)
        if pod is None and (one.stop or one.pod):
            one = msgspec.structs.replace(one, ended=now, reason=one.reason if one.stop else _LOST)
        elif pod is not None and pod.leaving and not one.stop:
            one = msgspec.structs.replace(one, stop=True, reason=_LOST)
        elif pod is not None and pod.broken:
            reason = pod.waiting or pod.phase
            one = msgspec.structs.replace(one, ended=now, reason="" if one.stop else reason)
        new[change] = one
    return new


def _ends_first(cheap: Sequence[PodState], kept: Sequence[PodState]) -> bool:
    """True if a ReplicaSet ends all of `cheap`, whose cost is lower, before any of `kept`."""
    return not cheap or not kept or max(one.rank for one in cheap) <= min(one.rank for one in kept)


def pod_instance(change: str, kind: str, one: ChangeRecord, pod: PodState | None) -> Instance:
    """What the port tells of a change."""
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
        reason=one.reason or (pod.waiting if pod is not None else ""),
        node=NodeId(one.pod) if one.pod else None,
    )
