"""Starts and stops workers as pods of Deployments, one Deployment per kind.

It changes the number of pods, and keeps the changes in an annotation. Every write names the version
that was read; whoever loses reads again. A planner that only advises writes nothing. It does not
know when a worker has joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from pdserve.errors import ActuatorDenied, ActuatorError, ActuatorExhausted
from pdserve.planner.actuators.base import DEADLINE, check_order, within
from pdserve.planner.actuators.kubernetes.api import ApiServer, Conflict, selector_of
from pdserve.planner.actuators.kubernetes.record import (
    CHEAP,
    ChangeRecord,
    DeploymentRecord,
    pod_instance,
    reconcile,
    record_of,
)
from pdserve.planner.actuators.settings import find_kind, kinds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Instance, Kind
    from pdserve.planner.actuators.kubernetes.config import KubernetesConfig
    from pdserve.planner.actuators.settings import Home

__all__ = ["Deployments"]

_TRIES: Final = 5
"""Readings of a Deployment in one call: its status changes while its pods come and go."""
_PAUSE: Final[Seconds] = 0.05
"""Before the second reading, and doubled each time: another planner ends what it is at."""

Changes = dict[str, ChangeRecord]


class Deployments:
    """The actuator `kubernetes`."""

    name = "kubernetes"

    def __init__(
        self,
        config: KubernetesConfig,
        home: Home,
        *,
        deadline: Seconds = DEADLINE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args: `deadline` is the longest that a call takes; `clock` tells Unix seconds."""
        self._config, self._deadline, self._clock = config, deadline, clock
        self._note = f"pdserve.io/{home.cluster}-changes"
        self._acts = home.acts
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

        async with within(self._deadline, "start a pod"), self._lock:
            instances = await self._bring(kind, add)
            return next(one for one in instances if one.change == change)

    async def stop(self, change: str, grace: Seconds) -> None:
        """Has the pod of a change ended, at the next `list`: until then its cost is known to its
        ReplicaSet. The pod's own grace period holds, not `grace`: a Deployment has one for all its
        pods."""

        def end(changes: Changes) -> None:
            if change in changes:
                changes[change] = replace(changes[change], stop=True)

        async with within(self._deadline, "stop a pod"), self._lock:
            failed: ActuatorError | None = None
            for kind in self._config.kinds:
                try:
                    found = await self._bring(kind, end)
                except ActuatorError as error:
                    failed = error
                else:
                    if any(one.change == change for one in found):
                        return
            if failed is not None:
                raise failed

    async def list(self) -> Sequence[Instance]:
        """Reads every Deployment, and finishes what is still to be done."""
        async with within(self._deadline, "read the deployments"), self._lock:
            several = [await self._bring(kind, lambda changes: None) for kind in self._config.kinds]
            return [one for some in several for one in some]

    async def _bring(self, kind: str, edit: Callable[[Changes], None]) -> Sequence[Instance]:
        """Changes the record of a Deployment, and sizes it to fit. Errors: `ActuatorTransient` if
        others change it again and again meanwhile."""
        for attempt in range(_TRIES - 1):
            with contextlib.suppress(Conflict):
                return await self._bring_once(kind, edit)
            await asyncio.sleep(_PAUSE * 2**attempt)
        return await self._bring_once(kind, edit)

    async def _bring_once(self, kind: str, edit: Callable[[Changes], None]) -> Sequence[Instance]:
        """First the record, then the size: what dies in between is finished by the next call."""
        name = self._config.kinds[kind].deployment
        deployment = await self._api.deployment(name)
        pods = await self._api.pods(selector_of(deployment))
        before = self._record(name, deployment)
        changes = dict(before.changes)
        edit(changes)
        replicas = deployment["spec"].get("replicas", 1)
        todo = reconcile(replace(before, changes=changes), pods, replicas, self._clock())
        if self._acts:
            version = deployment["metadata"]["resourceVersion"]
            if todo.record != before:
                version = await self._write(name, version, todo.record)
            for pod in todo.cheap:
                await self._api.price(pod, CHEAP)
            if todo.replicas != replicas:
                await self._api.scale(name, version, todo.replicas)
        there = {pod.name: pod for pod in pods}
        waits = next((pod.waiting for pod in pods if not pod.scheduled and pod.waiting), "")
        return [
            pod_instance(change, kind, one, there.get(one.pod), waits)
            for change, one in todo.record.changes.items()
        ]

    async def _write(self, name: str, version: str, record: DeploymentRecord) -> str:
        """Returns the version after it."""
        text = msgspec.json.encode(record).decode()
        written = await self._api.annotate(name, version, {self._note: text})
        return str(written["metadata"]["resourceVersion"])

    def _record(self, name: str, deployment: Any) -> DeploymentRecord:
        text = (deployment["metadata"].get("annotations") or {}).get(self._note, "")
        try:
            return record_of(text)
        except msgspec.DecodeError as error:
            raise ActuatorDenied(
                f"deployment {name}: annotation {self._note} cannot be read ({error}): remove it, "
                "and its pods are taken in under their own names"
            ) from None

    async def close(self) -> None:
        """Closes connections; pods go on."""
        await self._api.close()
