"""The fake API server in this process, and actuators for it; also the lab of the suite."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pdserve.planner.actuators import read_actuator
from pdserve.planner.actuators.kubernetes import Deployments
from pdserve.planner.actuators.settings import Home
from tests.planner.actuators.kubernetes.fake_server import NAME, NAMESPACE, FakeServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path


class Place:
    """The server, and actuators for it."""

    kind = "gpu"
    up = "booting"
    deadline = 2.0
    patience = 5.0
    pause = 0.01
    cannot: Mapping[str, str] = {}

    def __init__(self, server: FakeServer, table: dict[str, Any]) -> None:
        self.server, self._table = server, table
        self.made: list[Deployments] = []
        self.actuator = self.make()

    def make(self, *, acts: bool = True, **more: Any) -> Deployments:
        """Makes an actuator; `more` are settings."""
        _, config = read_actuator(self._table | more, "f")
        actuator = Deployments(config, Home("prod", acts=acts), deadline=self.deadline)
        self.made.append(actuator)
        return actuator

    # ------------------------------------------------------------------ the suite's lab

    async def reopen(self) -> Deployments:
        return self.make()

    async def processes(self, change: str) -> int:
        found = [one for one in await self.actuator.list() if one.change == change]
        pods = [self.server.pods.get(one.ref) for one in found]
        return sum(pod is not None and pod["status"]["phase"] == "Running" for pod in pods)

    async def die(self, change: str) -> None:
        """With its node: a process alone is started again in its pod."""
        (found,) = [one for one in await self.actuator.list() if one.change == change]
        self.server.delete(found.ref)

    async def never_ready(self) -> None:
        self.server.runs = False

    async def start_fails(self) -> None:
        self.server.waits = "CrashLoopBackOff"

    async def deny(self) -> None:
        self.server.refuse = (403, 'deployments.apps "web" is forbidden')

    async def silence(self) -> None:
        self.server.silent.set()


@asynccontextmanager
async def kubernetes_place(folder: Path, slots: int) -> AsyncIterator[Place]:
    """A server with one Deployment for one kind; afterwards nothing is left of it."""
    server = FakeServer()
    runner = web.AppRunner(server.app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (folder / "token").write_text("secret\n")
    table = {
        "type": "kubernetes",
        "namespace": NAMESPACE,
        "api": f"http://127.0.0.1:{runner.addresses[0][1]}",
        "token_file": str(folder / "token"),
        "ca_file": "",
        "kinds": {Place.kind: {"deployment": NAME, "slots": slots}},
    }
    place = Place(server, table)
    try:
        yield place
    finally:
        for one in place.made:
            await one.close()
        await runner.cleanup()
