"""The actuator and a fake API server, whose requests and answers fit the published schemas."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from pdserve.errors import ActuatorDenied, ActuatorExhausted, ActuatorTransient, ConfigError
from pdserve.planner.actuators import read_actuator
from pdserve.planner.actuators.kubernetes import Deployments
from pdserve.planner.actuators.settings import Home

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text("utf-8"))["schemas"]
PLAIN: dict[str, Any] = {"string": str, "integer": int, "boolean": bool, "number": (int, float)}


def check(value: Any, schema: Any, *, partial: bool = False) -> None:
    """Asserts that a value fits; `partial`: a merge patch has only some fields."""
    if isinstance(schema, list):
        assert isinstance(value, list)
        for one in value:
            check(one, schema[0])
    elif isinstance(schema, dict):
        for one in value.values():
            check(one, schema["*"])
    elif schema in PLAIN:
        assert isinstance(value, PLAIN[schema]), (value, schema)
    elif schema in SCHEMAS:
        fields = SCHEMAS[schema]["properties"]
        assert set(value) <= set(fields), f"{schema} has no {set(value) - set(fields)}"
        assert partial or set(SCHEMAS[schema]["required"]) <= set(value)
        for name, one in value.items():
            check(one, fields[name], partial=partial)


class FakeServer:
    """One Deployment with its ReplicaSet, as the documentation says that they behave."""

    def __init__(self) -> None:
        self.version, self.replicas, self.count = 1, 0, 0
        self.notes: dict[str, str] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.conflict = False
        self.refuse: tuple[int, str] | None = None
        self.seen: list[str] = []

    def app(self) -> web.Application:
        app = web.Application()
        root = "/apis/apps/v1/namespaces/ns/deployments/web"
        app.router.add_get(root, self.read)
        app.router.add_patch(root, self.annotate)
        app.router.add_patch(f"{root}/scale", self.scale)
        app.router.add_get("/api/v1/namespaces/ns/pods", self.list_pods)
        app.router.add_patch("/api/v1/namespaces/ns/pods/{pod}", self.price)
        return app

    def answer(self, body: dict[str, Any], schema: str) -> web.Response:
        check(body, schema)
        return web.json_response(body)

    def status(self, code: int, message: str) -> web.Response:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        check(body | {"message": message}, "V1Status")
        return web.json_response(body | {"message": message}, status=code)

    def meta(self) -> dict[str, Any]:
        notes = {"annotations": self.notes} if self.notes else {}
        return {"name": "web", "resourceVersion": str(self.version)} | notes

    async def read(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        if self.refuse:
            return self.status(*self.refuse)
        return self.answer(self.deployment(), "V1Deployment")

    def deployment(self) -> dict[str, Any]:
        spec = {"replicas": self.replicas, "selector": {"matchLabels": {"app": "web"}}}
        return {"metadata": self.meta(), "spec": spec | {"template": {}}}

    async def patch(self, request: web.Request, schema: str) -> Any:
        assert request.content_type == "application/merge-patch+json"
        body = await request.json()
        check(body, schema, partial=True)
        self.seen.append(f"{schema} {json.dumps(body)}")
        if self.conflict:
            self.conflict, self.version = False, self.version + 1
        wants = body["metadata"].get("resourceVersion")
        return None if wants not in (None, str(self.version)) else body

    async def annotate(self, request: web.Request) -> web.Response:
        if (body := await self.patch(request, "V1Deployment")) is None:
            return self.status(409, "the object has been modified")
        self.notes |= body["metadata"]["annotations"]
        self.version += 1
        return self.answer(self.deployment(), "V1Deployment")

    async def scale(self, request: web.Request) -> web.Response:
        if (body := await self.patch(request, "V1Scale")) is None:
            return self.status(409, "the object has been modified")
        self.replicas, self.version = body["spec"]["replicas"], self.version + 1
        self.settle()
        spec, status = {"replicas": self.replicas}, {"replicas": len(self.pods)}
        return self.answer({"metadata": self.meta(), "spec": spec, "status": status}, "V1Scale")

    def settle(self) -> None:
        """What a ReplicaSet does."""
        while len(self.pods) < self.replicas:
            self.count += 1
            self.pods[f"web-{self.count}"] = {
                "metadata": {"name": f"web-{self.count}", "annotations": {}},
                "status": {"phase": "Pending", "conditions": []},
            }
        while len(self.pods) > self.replicas:
            del self.pods[min(self.pods, key=self.rank)]

    def rank(self, name: str) -> tuple[bool, bool, int]:
        pod = self.pods[name]
        cost = pod["metadata"]["annotations"].get("controller.kubernetes.io/pod-deletion-cost", 0)
        status = pod["status"]
        return (status["phase"] == "Running", bool(status["conditions"]), int(cost))

    def run(self, name: str) -> None:
        ready = {"type": "Ready", "status": "True"}
        self.pods[name]["status"] = {"phase": "Running", "conditions": [ready]}

    async def list_pods(self, request: web.Request) -> web.Response:
        assert request.query["labelSelector"] == "app=web"
        return self.answer({"items": list(self.pods.values()), "metadata": {}}, "V1PodList")

    async def price(self, request: web.Request) -> web.Response:
        body = await self.patch(request, "V1Pod")
        pod = self.pods[request.match_info["pod"]]
        pod["metadata"]["annotations"] |= body["metadata"]["annotations"]
        return self.answer(pod, "V1Pod")


class Place:
    """The server, and actuators for it."""

    def __init__(self, server: FakeServer, table: dict[str, Any]) -> None:
        self.server, self._table = server, table
        self.made: list[Deployments] = []

    def make(self) -> Deployments:
        kind, config = read_actuator(self._table, "f")
        actuator = kind.make(config, Home("prod"))
        assert isinstance(actuator, Deployments)
        self.made.append(actuator)
        return actuator


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    server = FakeServer()
    runner = web.AppRunner(server.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (tmp_path / "token").write_text("secret\n")
    table = {
        "type": "kubernetes",
        "namespace": "ns",
        "api": f"http://127.0.0.1:{runner.addresses[0][1]}",
        "token_file": str(tmp_path / "token"),
        "ca_file": "",
        "kinds": {"gpu": {"deployment": "web", "slots": 3}},
    }
    place = Place(server, table)
    yield place
    for one in place.made:
        await one.close()
    await runner.cleanup()


async def states(actuator: Deployments) -> dict[str, str]:
    return {one.change: one.state for one in await actuator.list()}


async def test_a_pod_per_change_and_every_planner_finds_it(place: Place) -> None:
    pods, server = place.make(), place.server
    await asyncio.gather(*(pods.start("gpu", "aggregated", "a") for _ in range(3)))
    assert (server.replicas, list(server.pods)) == (1, ["web-1"])
    assert await states(pods) == {"a": "pending"}
    server.run("web-1")
    (found,) = await place.make().list()
    assert (found.change, found.state, found.node, found.ref) == ("a", "booting", "web-1", "web-1")
    await place.make().start("gpu", "aggregated", "a")
    assert server.replicas == 1


async def test_the_stopped_pod_is_the_one_that_goes(place: Place) -> None:
    pods, server = place.make(), place.server
    for change in ("a", "b", "c"):
        await pods.start("gpu", "aggregated", change)
        await pods.list()
        server.run(f"web-{server.count}")
    with pytest.raises(ActuatorExhausted, match="3 pods of kind gpu are wanted already"):
        await pods.start("gpu", "aggregated", "d")
    await pods.stop("b", 30.0)
    await pods.stop("b", 30.0)
    await pods.stop("never", 30.0)
    assert sorted(server.pods) == ["web-1", "web-3"]
    assert await states(pods) == {"a": "booting", "b": "ended", "c": "booting"}
    assert (await pods.start("gpu", "aggregated", "b")).state == "ended"


async def test_of_two_writers_one_reads_again(place: Place) -> None:
    pods, server = place.make(), place.server
    server.conflict = True
    with pytest.raises(ActuatorTransient, match="409: the object has been modified"):
        await pods.start("gpu", "aggregated", "a")
    assert server.replicas == 0
    await pods.start("gpu", "aggregated", "a")
    assert server.replicas == 1


async def test_a_planner_that_died_between_both_writes(place: Place) -> None:
    place.server.notes["pdserve.io/prod-changes"] = '{"a": {}}'
    assert await states(place.make()) == {"a": "pending"}
    assert place.server.replicas == 1


@pytest.mark.parametrize(
    ("status", "words", "error"),
    [
        (403, 'deployments "web" is forbidden', ActuatorDenied),
        (403, "exceeded quota: gpus", ActuatorExhausted),
        (404, 'deployments "web" not found', ActuatorDenied),
        (429, "too many requests", ActuatorTransient),
        (503, "apiserver is shutting down", ActuatorTransient),
    ],
)
async def test_refusals_are_in_the_servers_words(
    place: Place, status: int, words: str, error: type[Exception]
) -> None:
    place.server.refuse = (status, words)
    with pytest.raises(error, match=f"{status}: {words}"):
        await place.make().list()


async def test_modes_and_notes_that_do_not_fit(place: Place) -> None:
    with pytest.raises(ActuatorDenied, match="start in mode aggregated, not decode: add a kind"):
        await place.make().start("gpu", "decode", "a")
    place.server.notes["pdserve.io/prod-changes"] = "{"
    with pytest.raises(ActuatorDenied, match="cannot be read"):
        await place.make().list()


async def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    table = {"type": "kubernetes", "api": "http://127.0.0.1:1", "token_file": "", "ca_file": ""}
    kind, config = read_actuator(table | {"kinds": {"g": {"deployment": "d"}}}, "f")
    pods = kind.make(config, Home("c"))
    with pytest.raises(ActuatorTransient, match=r"127\.0\.0\.1:1"):
        await pods.list()
    await pods.close()
    lost = str(tmp_path / "none")
    kind, config = read_actuator(
        table | {"token_file": lost, "kinds": {"g": {"deployment": "d"}}}, "f"
    )
    pods = kind.make(config, Home("c"))
    with pytest.raises(ActuatorDenied, match="No such file"):
        await pods.list()
    await pods.close()


def test_kinds_need_deployments_of_their_own() -> None:
    table = {"type": "kubernetes", "kinds": {"a": {"deployment": "d"}, "b": {"deployment": "d"}}}
    with pytest.raises(ConfigError, match="two kinds have the same deployment"):
        read_actuator(table, "f")
    with pytest.raises(ConfigError, match="missing required field `deployment`"):
        read_actuator({"type": "kubernetes", "kinds": {"a": {}}}, "f")
