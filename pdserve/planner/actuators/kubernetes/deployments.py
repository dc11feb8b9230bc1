"""Starts and stops workers as pods of Deployments, one Deployment per kind.

It changes the number of pods, and keeps the changes in an annotation. Every write names the version
that was read, so of two planners one has to read again. It does not know when a worker has joined.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.errors import ActuatorDenied, ActuatorExhausted
from pdserve.planner.actuators.base import DEADLINE, check_order, within
from pdserve.planner.actuators.kubernetes.api import ApiServer, selector_of
from pdserve.planner.actuators.kubernetes.record import (
    ChangeRecord,
    changes_of,
    pod_instance,
    reconcile,
)
from pdserve.planner.actuators.settings import find_kind, kinds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Instance, Kind
    from pdserve.planner.actuators.kubernetes.config import KubernetesConfig
    from pdserve.planner.actuators.settings import Home

__all__ = ["Deployments"]

_CHEAP: Final = -1000
"""Cost of a pod that is to end; others have 0."""

Changes = dict[str, ChangeRecord]


class Deployments:
    """The actuator `kubernetes`."""

    name = "kubernetes"

    def __init__(
        self, config: KubernetesConfig, home: Home, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Args: `clock` tells Unix seconds."""
        self._config, self._clock = config, clock
        self._note = f"pdserve.io/{home.cluster}-changes"
        self._api = ApiServer(config)
        self._lock = asyncio.Lock()

    async def kinds(self) -> Sequence[Kind]:
        """The kinds of the settings; the server is not asked."""
        return kinds_of(self.name, self._config.kinds)

    async def start(self, kind: str, mode: str, change: str) -> Instance:
        """Adds the change to the Deployment, and a pod for it."""
        check_order(mode, change)
        settings = find_kind(self._config.kinds, kind)
        if mode != settings.mode:
            raise ActuatorDenied(
                f"workers of deployment {settings.deployment} start in mode {settings.mode}, not "
                f"{mode}: add a kind with a deployment of that mode"
            )

        def add(changes: Changes) -> None:
            wanted = sum(one.wanted for one in changes.values())
            if change not in changes and settings.slots and wanted >= settings.slots:
                raise ActuatorExhausted(f"{settings.slots} pods of kind {kind} are wanted already")
            changes.setdefault(change, ChangeRecord())

        async with within(DEADLINE, "start a pod"), self._lock:
            instances = await self._bring(kind, add)
            return next(one for one in instances if one.change == change)

    async def stop(self, change: str, grace: Seconds) -> None:
        """Has the pod of a change ended. Its own grace period holds, not `grace`: a Deployment
        has one for all its pods."""

        def end(changes: Changes) -> None:
            if change in changes:
                changes[change] = msgspec.structs.replace(changes[change], stop=True)

        async with within(DEADLINE, "stop a pod"), self._lock:
            for kind in self._config.kinds:
                await self._bring(kind, end)

    async def list(self) -> Sequence[Instance]:
        """Reads every Deployment, and finishes what is still to be done."""
        async with within(DEADLINE, "read the deployments"), self._lock:
            several = [await self._bring(kind, lambda changes: None) for kind in self._config.kinds]
            return [one for some in several for one in some]

    async def _bring(self, kind: str, edit: Callable[[Changes], None]) -> Sequence[Instance]:
        """Reads a Deployment, changes its record, and sizes it to fit.

        First the record, then the size: what dies in between is finished by the next call.
        """
        name = self._config.kinds[kind].deployment
        deployment = await self._api.deployment(name)
        pods = await self._api.pods(selector_of(deployment))
        replicas = deployment["spec"].get("replicas", 1)
        changes = self._changes(name, deployment)
        before = dict(changes)
        edit(changes)
        todo = reconcile(changes, pods, replicas, self._clock())
        version = deployment["metadata"]["resourceVersion"]
        if todo.changes != before:
            text = msgspec.json.encode(todo.changes).decode()
            written = await self._api.annotate(name, version, {self._note: text})
            version = written["metadata"]["resourceVersion"]
        if todo.replicas < replicas:
            for pod in todo.cheap:
                await self._api.price(pod, _CHEAP)
        if todo.replicas != replicas:
            await self._api.scale(name, version, todo.replicas)
        there = {pod.name: pod for pod in pods}
        return [
            pod_instance(change, kind, one, there.get(one.pod))
            for change, one in todo.changes.items()
        ]

    def _changes(self, name: str, deployment: Any) -> Changes:
        text = (deployment["metadata"].get("annotations") or {}).get(self._note, "")
        try:
            return changes_of(text)
        except msgspec.DecodeError as error:
            raise ActuatorDenied(
                f"deployment {name}: annotation {self._note} cannot be read ({error}): remove it, "
                "and the planner begins anew"
            ) from None

    async def close(self) -> None:
        """Closes connections; pods go on."""
        await self._api.close()
