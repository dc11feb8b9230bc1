"""Speaks to the API server of Kubernetes: four requests, under a deadline.

It knows paths and media types, and nothing of changes.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from pdserve.errors import ActuatorDenied, ActuatorError, ActuatorExhausted, ActuatorTransient
from pdserve.planner.actuators.kubernetes.record import PodState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.planner.actuators.kubernetes.config import KubernetesConfig

__all__ = ["ApiServer", "pod_state", "selector_of"]

_MERGE: Final = "application/merge-patch+json"
_MOST: Final = 16 << 20
"""Bytes of an answer that are read: pods of a Deployment are some kilobytes each."""


class ApiServer:
    """The requests of the actuator."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def deployment(self, name: str) -> Any:
        """Reads a Deployment."""
        return await self._ask("GET", self._path("apps/v1", "deployments", name))

    async def annotate(self, name: str, version: str, annotations: Mapping[str, str]) -> Any:
        """Changes annotations of a Deployment if it is still at `version`.

        Errors: `ActuatorTransient` if somebody has.
        """
        body = {"metadata": {"resourceVersion": version, "annotations": annotations}}
        return await self._ask("PATCH", self._path("apps/v1", "deployments", name), body)

    async def scale(self, name: str, version: str, replicas: int) -> None:
        """Sets the number of pods. Errors: as those of `annotate`."""
        path = self._path("apps/v1", "deployments", f"{name}/scale")
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        await self._ask("PATCH", path, body)

    async def pods(self, selector: str) -> list[PodState]:
        """Lists the pods that have these labels."""
        answer = await self._ask("GET", self._path("v1", "pods"), query={"labelSelector": selector})
        return [pod_state(pod) for pod in answer.get("items") or ()]

    async def price(self, pod: str, cost: int) -> None:
        """Says how dear a pod is: a ReplicaSet ends the cheapest of equals first."""
        note = {"controller.kubernetes.io/pod-deletion-cost": str(cost)}
        body = {"metadata": {"annotations": note}}
        await self._ask("PATCH", self._path("v1", "pods", pod), body)

    def _path(self, group: str, things: str, name: str = "") -> str:
        root = "api" if group == "v1" else "apis"
        end = f"/{name}" if name else ""
        return f"/{root}/{group}/namespaces/{self._config.namespace}/{things}{end}"

    async def _ask(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None
    ) -> Any:
        """Errors: those of the port, in the server's words."""
        try:
            async with (await self._open()).request(
                method,
                self._config.api + path,
                params=query,
                data=None if body is None else msgspec.json.encode(body),
                headers=await asyncio.to_thread(self._headers, body is not None),
            ) as answer:
                data = await answer.content.read(_MOST + 1)
                if len(data) > _MOST:
                    raise ActuatorTransient(f"{path}: an answer of more than {_MOST >> 20} MiB")
                if answer.status >= 400:
                    raise _failure(answer.status, method, path, data)
                return msgspec.json.decode(data)
        except (aiohttp.ClientError, msgspec.DecodeError) as error:
            raise ActuatorTransient(f"{self._config.api}: {error}") from None
        except OSError as error:
            raise ActuatorDenied(
                f"{error.filename or self._config.api}: {error.strerror}"
            ) from None

    def _headers(self, patch: bool) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._config.token_file:
            token = Path(self._config.token_file).read_text(encoding="ascii").strip()
            headers["Authorization"] = f"Bearer {token}"
        return headers | ({"Content-Type": _MERGE} if patch else {})

    async def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            context: ssl.SSLContext | bool = True
            if self._config.api.startswith("https://"):
                ca = self._config.ca_file or None
                context = await asyncio.to_thread(ssl.create_default_context, cafile=ca)
            connector = aiohttp.TCPConnector(ssl=context, limit=4)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def close(self) -> None:
        """Closes its connections. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _failure(status: int, method: str, path: str, data: bytes) -> ActuatorError:
    """Sorts a refusal; its words are those of the answer's `Status`."""
    try:
        words = str(msgspec.json.decode(data)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        words = data[:200].decode(errors="replace")
    words = f"{method} {path}: {status}: {' '.join(words.split())[:500]}"
    if status == 403 and "quota" in words:
        return ActuatorExhausted(words)
    if status in (408, 409, 429) or status >= 500:
        return ActuatorTransient(words)
    return ActuatorDenied(words)


def selector_of(deployment: Any) -> str:
    """The labels of a Deployment's pods, as a query."""
    labels = deployment["spec"]["selector"].get("matchLabels") or {}
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


def pod_state(pod: Any) -> PodState:
    """Reads what matters of a pod."""
    meta, status = pod["metadata"], pod.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    waits = [
        one["state"]["waiting"]
        for one in status.get("containerStatuses") or ()
        if (one.get("state") or {}).get("waiting")
    ]
    place = conditions.get("PodScheduled", {})
    if place.get("status") == "False":
        waits = [place, *waits]
    words = [f"{one.get('reason', '')}: {one.get('message', '')}".strip(": ") for one in waits]
    return PodState(
        name=meta["name"],
        phase=status.get("phase", "Unknown"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        scheduled=place.get("status", "True") == "True",
        leaving=bool(meta.get("deletionTimestamp")),
        waiting="; ".join(words)[:500],
        created=meta.get("creationTimestamp") or "",
    )
