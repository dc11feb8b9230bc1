"""Speaks to the API server of Kubernetes: four requests, under a deadline.

It knows paths and media types, and nothing of changes.
"""

from __future__ import annotations

import asyncio
import contextlib
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

__all__ = ["ApiServer", "Conflict", "pod_state", "selector_of"]

_MERGE: Final = "application/merge-patch+json"
_MOST: Final = 16 << 20
"""Bytes of an answer that are read: pods of a Deployment are some kilobytes each."""
_COST: Final = "controller.kubernetes.io/pod-deletion-cost"


class Conflict(ActuatorTransient):
    """Somebody has changed the object since it was read."""


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

        Errors: `Conflict` if it is not.
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
        """Says how dear a pod is: a ReplicaSet ends the cheapest of equals first. One that has gone
        meanwhile is left alone."""
        body = {"metadata": {"annotations": {_COST: str(cost)}}}
        with contextlib.suppress(_Absent):
            await self._ask("PATCH", self._path("v1", "pods", pod), body)

    def _path(self, group: str, things: str, name: str = "") -> str:
        root = "api" if group == "v1" else "apis"
        end = f"/{name}" if name else ""
        return f"/{root}/{group}/namespaces/{self._config.namespace}/{things}{end}"

    async def _ask(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None
    ) -> Any:
        """Errors: those of the port, in the server's words."""
        session = await self._open()
        headers = await self._headers(body is not None)
        try:
            async with session.request(
                method,
                self._config.api + path,
                params=query,
                data=None if body is None else msgspec.json.encode(body),
                headers=headers,
            ) as answer:
                data = await _all_of(answer, path)
                if answer.status >= 400:
                    raise _failure(answer.status, method, path, data)
                return msgspec.json.decode(data)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise ActuatorTransient(f"{self._config.api}: {error}") from None

    async def _headers(self, patch: bool) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._config.token_file:
            token = await asyncio.to_thread(_token, self._config.token_file)
            headers["Authorization"] = f"Bearer {token}"
        return headers | ({"Content-Type": _MERGE} if patch else {})

    async def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            context: ssl.SSLContext | bool = True
            if self._config.api.startswith("https://"):
                context = await asyncio.to_thread(_trust, self._config.ca_file)
            connector = aiohttp.TCPConnector(ssl=context, limit=4)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def close(self) -> None:
        """Closes its connections. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class _Absent(ActuatorDenied):
    """There is no such object."""


def _token(file: str) -> str:
    """Errors: `ActuatorDenied`."""
    try:
        return Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ActuatorDenied(f"token_file {file}: {error}") from None


def _trust(file: str) -> ssl.SSLContext:
    """Errors: `ActuatorDenied`."""
    try:
        return ssl.create_default_context(cafile=file or None)
    except OSError as error:
        raise ActuatorDenied(f"ca_file {file}: {error}") from None


async def _all_of(answer: aiohttp.ClientResponse, path: str) -> bytes:
    """The body of an answer. A long one comes in pieces."""
    data = bytearray()
    async for piece in answer.content.iter_any():
        data += piece
        if len(data) > _MOST:
            raise ActuatorTransient(f"{path}: an answer of more than {_MOST >> 20} MiB")
    return bytes(data)


def _failure(status: int, method: str, path: str, data: bytes) -> ActuatorError:
    """Sorts a refusal; its words are those of the answer's `Status`."""
    try:
        words = str(msgspec.json.decode(data)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        words = data[:200].decode(errors="replace")
    words = f"{method} {path}: {status}: {' '.join(words.split())[:500]}"
    if status == 409:
        return Conflict(words)
    if status == 404:
        return _Absent(words)
    if status == 403 and "quota" in words:
        return ActuatorExhausted(words)
    if status in (408, 429) or status >= 500:
        return ActuatorTransient(words)
    return ActuatorDenied(words)


_OPERATORS: Final = {
    "In": "{key} in ({values})",
    "NotIn": "{key} notin ({values})",
    "Exists": "{key}",
    "DoesNotExist": "!{key}",
}


def selector_of(deployment: Any) -> str:
    """The labels of a Deployment's pods, as a query. Errors: `ActuatorDenied` for a condition that
    is not known: without it other pods would be taken for its own."""
    selector = deployment["spec"]["selector"]
    terms = [f"{name}={value}" for name, value in (selector.get("matchLabels") or {}).items()]
    for one in selector.get("matchExpressions") or ():
        if one["operator"] not in _OPERATORS:
            raise ActuatorDenied(f"its selector has an unknown operator {one['operator']!r}")
        values = ",".join(one.get("values") or ())
        terms.append(_OPERATORS[one["operator"]].format(key=one["key"], values=values))
    return ",".join(sorted(terms))


def pod_state(pod: Any) -> PodState:
    """Reads what matters of a pod."""
    meta, status = pod["metadata"], pod.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    containers = status.get("containerStatuses") or ()
    cost = (meta.get("annotations") or {}).get(_COST, "")
    return PodState(
        name=meta["name"],
        phase=status.get("phase", "Unknown"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        scheduled=bool((pod.get("spec") or {}).get("nodeName")),
        leaving=bool(meta.get("deletionTimestamp")),
        waiting=_waiting(conditions.get("PodScheduled", {}), containers),
        created=meta.get("creationTimestamp") or "",
        cost=int(cost) if cost.lstrip("-").isdecimal() else 0,
        drained=max((_drained(one) for one in containers), default=""),
    )


def _waiting(place: Any, containers: Any) -> str:
    """Why a pod waits for a node, or its containers wait."""
    waits = [one["state"]["waiting"] for one in containers if _part(one, "state", "waiting")]
    if place.get("status") == "False":
        waits = [place, *waits]
    words = [f"{one.get('reason', '')}: {one.get('message', '')}".strip(": ") for one in waits]
    return "; ".join(words)[:500]


def _drained(container: Any) -> str:
    """When a container has last ended with status 0; empty: it has not."""
    ends = [_part(container, name, "terminated") for name in ("state", "lastState")]
    return max(
        (one.get("finishedAt") or "ended" for one in ends if one.get("exitCode") == 0), default=""
    )


def _part(container: Any, state: str, name: str) -> Any:
    return (container.get(state) or {}).get(name) or {}
