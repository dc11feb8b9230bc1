"""A fake API server with one Deployment, its ReplicaSet and its nodes.

Paths, methods and media types are those of `schemas.json`, and each request and answer is checked
with its schemas. How a ReplicaSet and a node behave is taken from the documentation of Kubernetes:
no real cluster has run here.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PUBLISHED = json.loads(Path(__file__).with_name("schemas.json").read_text("utf-8"))
SCHEMAS, OPERATIONS = PUBLISHED["schemas"], PUBLISHED["operations"]
PLAIN: dict[str, Any] = {"string": str, "integer": int, "boolean": bool, "number": (int, float)}
COST = "controller.kubernetes.io/pod-deletion-cost"
NAMESPACE, NAME = "ns", "web"


def check(value: Any, schema: Any, *, partial: bool = False) -> None:
    """Asserts that a value fits; `partial`: a merge patch has only some fields."""
    if isinstance(schema, list):
        assert isinstance(value, list)
        for one in value:
            check(one, schema[0], partial=partial)
    elif isinstance(schema, dict):
        for one in value.values():
            check(one, schema["*"], partial=partial)
    elif schema in PLAIN:
        assert isinstance(value, PLAIN[schema]), (value, schema)
    else:
        fields = SCHEMAS[schema]["properties"]
        assert set(value) <= set(fields), f"{schema} has no {set(value) - set(fields)}"
        missing = set(SCHEMAS[schema]["required"]) - set(value)
        assert partial or not missing, f"{schema} needs {missing}"
        for name, one in value.items():
            check(one, fields[name], partial=partial)


class FakeServer:
    """The server, and hands to make its pods run, end and vanish."""

    def __init__(self) -> None:
        self.version, self.replicas, self.count = 1, 0, 0
        self.notes: dict[str, str] = {}
        self.selector: dict[str, Any] = {"matchLabels": {"app": NAME}}
        self.pods: dict[str, dict[str, Any]] = {}
        self.conflicts = 0
        """So many of the next writes come after somebody else's."""
        self.refuse: tuple[int, str] | None = None
        self.silent = asyncio.Event()
        self.lose = ""
        """The operation whose answers are lost: it is carried out, and the connection breaks."""
        self.query = f"app={NAME}"
        """The labels that pods must be asked for by."""
        self.runs = False
        """True: new pods get a node and run at once."""
        self.waits = ""
        """Why containers of new pods wait for ever; empty: they do not."""
        self.seen: list[tuple[str, Any]] = []
        """Operations that changed something, with their bodies."""
        self._costs: dict[str, int] = {}
        """What the ReplicaSet knows of costs: those of a moment ago."""

    def app(self) -> web.Application:
        app = web.Application()
        handlers = {
            "read_namespaced_deployment": self.read,
            "patch_namespaced_deployment": self.annotate,
            "patch_namespaced_deployment_scale": self.scale,
            "list_namespaced_pod": self.list_pods,
            "patch_namespaced_pod": self.price,
        }
        assert set(handlers) == set(OPERATIONS)
        for name, handler in handlers.items():
            operation = OPERATIONS[name]
            route = self._checked(name, handler)
            app.router.add_route(operation["method"], operation["path"], route)
        return app

    def _checked(
        self, name: str, handler: Callable[[web.Request, Any], Awaitable[Any]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """What every operation has: who asks, the form of the body, and that of the answer."""
        operation = OPERATIONS[name]

        async def answer(request: web.Request) -> web.StreamResponse:
            assert request.headers["Authorization"] == "Bearer secret"
            assert set(request.query) <= set(operation["query"])
            if self.silent.is_set():
                await asyncio.sleep(3600)
            body = None
            if operation["content"]:
                assert request.content_type in operation["content"]
                assert request.content_type == "application/merge-patch+json"
                body = await request.json()
                check(body, operation["answer"], partial=True)
                self.seen.append((name, body))
            found = await handler(request, body)
            if isinstance(found, web.Response):
                return found
            check(found, operation["answer"])
            if name == self.lose:
                assert request.transport is not None
                request.transport.close()
            return await in_pieces(request, found)

        return answer

    # ------------------------------------------------------------------ operations

    async def read(self, request: web.Request, body: Any) -> Any:
        self._costs = {name: cost_of(pod) for name, pod in self.pods.items()}
        place = (request.match_info["namespace"], request.match_info["name"])
        if place != (NAMESPACE, NAME):
            return status(404, f'deployments.apps "{place[1]}" not found')
        return status(*self.refuse) if self.refuse else self.deployment()

    def deployment(self) -> dict[str, Any]:
        worker = {"metadata": {}, "spec": {"containers": [{"name": "worker"}]}}
        return {
            "metadata": self.meta(),
            "spec": {"replicas": self.replicas, "selector": self.selector, "template": worker},
        }

    def meta(self) -> dict[str, Any]:
        notes = {"annotations": self.notes} if self.notes else {}
        return {"name": NAME, "resourceVersion": str(self.version)} | notes

    def stale(self, body: Any) -> bool:
        if self.conflicts:
            self.conflicts, self.version = self.conflicts - 1, self.version + 1
        return body["metadata"].get("resourceVersion") not in (None, str(self.version))

    async def annotate(self, request: web.Request, body: Any) -> Any:
        if self.stale(body):
            return status(409, "the object has been modified")
        self.notes |= body["metadata"]["annotations"]
        self.version += 1
        return self.deployment()

    async def scale(self, request: web.Request, body: Any) -> Any:
        if self.stale(body):
            return status(409, "the object has been modified")
        self.resize(body["spec"]["replicas"])
        held = {"replicas": len(self.active())}
        return {"metadata": self.meta(), "spec": {"replicas": self.replicas}, "status": held}

    async def list_pods(self, request: web.Request, body: Any) -> Any:
        assert request.query["labelSelector"] == self.query
        return {"items": list(self.pods.values()), "metadata": {}}

    async def price(self, request: web.Request, body: Any) -> Any:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return status(404, f'pods "{request.match_info["name"]}" not found')
        pod["metadata"]["annotations"] |= body["metadata"]["annotations"]
        return pod

    # ------------------------------------------------------------------ the ReplicaSet

    def resize(self, replicas: int) -> None:
        """Anybody sets the number of pods."""
        self.replicas, self.version = replicas, self.version + 1
        self.settle()

    def active(self) -> list[str]:
        return [
            name
            for name, pod in self.pods.items()
            if pod["status"]["phase"] not in ("Failed", "Succeeded")
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def settle(self) -> None:
        """What a ReplicaSet does."""
        while len(self.active()) < self.replicas:
            self._create()
        while len(names := self.active()) > self.replicas:
            del self.pods[min(names, key=self._rank)]

    def _create(self) -> None:
        self.count += 1
        name = f"{NAME}-{self.count}"
        meta = {"name": name, "annotations": {}, "creationTimestamp": f"2026-01-01T{self.count:06}"}
        spec = {"containers": [{"name": "worker"}]}
        self.pods[name] = {"metadata": meta, "spec": spec, "status": {"phase": "Pending"}}
        if self.waits:
            self.place(name)
            self._container(name, {"waiting": {"reason": self.waits, "message": "back-off 10s"}})
        elif self.runs:
            self.run(name)

    def _rank(self, name: str) -> tuple[bool, bool, bool, int, int]:
        """The first goes first: without a node, not running, not ready, cheap, young."""
        pod = self.pods[name]
        placed, state = "nodeName" in pod["spec"], pod["status"]
        ready = {"type": "Ready", "status": "True"} in state.get("conditions", ())
        age = -int(name.removeprefix(f"{NAME}-"))
        return (placed, state["phase"] == "Running", ready, self._costs.get(name, 0), age)

    # ------------------------------------------------------------------ nodes

    def place(self, name: str) -> None:
        """It gets a node."""
        self.pods[name]["spec"]["nodeName"] = "n1"

    def run(self, name: str, *, ready: bool = True) -> None:
        """Its container runs."""
        self.place(name)
        known = {"type": "Ready", "status": "True" if ready else "False"}
        self.pods[name]["status"] |= {"phase": "Running", "conditions": [known]}
        self._container(name, {"running": {}})

    def end(self, name: str, code: int, at: str = "2026-01-02T00:00:00Z") -> None:
        """Its process ends, and the node starts it again: the pod stays."""
        over = {"exitCode": code, "finishedAt": at}
        self._container(name, {"running": {}}, {"terminated": over})

    def _container(self, name: str, state: Any, last: Any = None) -> None:
        one = {"name": "worker", "image": "i", "imageID": "i", "ready": True, "restartCount": 0}
        one |= {"state": state} | ({"lastState": last} if last else {})
        self.pods[name]["status"]["containerStatuses"] = [one]

    def evict(self, name: str) -> None:
        """Its node ends it; the pod stays listed, and gets a successor."""
        self.pods[name]["status"] = {"phase": "Failed", "reason": "Evicted"}
        self.settle()

    def delete(self, name: str) -> None:
        """Somebody deletes it, and it is gone at once."""
        del self.pods[name]
        self.settle()


def cost_of(pod: Any) -> int:
    return int(pod["metadata"]["annotations"].get(COST, 0))


def status(code: int, message: str) -> web.Response:
    """The server's word for a refusal."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
    body["message"] = message
    check(body, "V1Status")
    return web.json_response(body, status=code)


async def in_pieces(request: web.Request, body: Any) -> web.StreamResponse:
    """An answer in pieces, as long ones come."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    text = json.dumps(body).encode()
    for half in (text[: len(text) // 2], text[len(text) // 2 :]):
        await response.write(half)
        await asyncio.sleep(0.002)
    await response.write_eof()
    return response
