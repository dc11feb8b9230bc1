"""An admin client at the door of a server whose nodes are on a network in memory."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError, DialFailed
from pdserve.launch.cluster import admin_client, admin_door, admin_socket
from pdserve.launch.cluster.addresses import ClusterConfig
from pdserve.launch.cluster.admin_client import AdminClient, choose_socket
from pdserve.launch.cluster.admin_door import PREFIX, AdminDoor, DoorAnswer, DoorQuery, framed
from pdserve.launch.cluster.node_factory import NodeFactory
from pdserve.messages.status import DrainOrder, DrainState, NodeReport
from pdserve.runtime.rpc_methods import DRAIN
from pdserve.runtime.status import StatusService
from tests.support.actors import answering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.runtime.node import Node


def _drain(order: DrainOrder, call: object) -> DrainState:
    return DrainState(left=int(order.stay))


class Served:
    """Two nodes in memory and their door."""

    def __init__(self, path: Path, environ: dict[str, str]) -> None:
        self.factory = NodeFactory(ClusterConfig(), private=True, environ=environ)
        self.nodes = [self.factory.node(role, first=role == "router") for role in ("router", "x")]
        for node in self.nodes:
            StatusService(node, lambda: NodeReport(reason="as a test"), lambda: 5.0)
            node.host(answering(DRAIN, _drain))
        self.door: AdminDoor = self.factory.admin_door(path, self.nodes[1])

    async def start(self) -> None:
        await self.nodes[0].start()
        await self.nodes[1].start(beside=(self.nodes[0].address,))
        await self.door.open()

    async def end(self) -> None:
        await self.door.close()
        for node in self.nodes:
            await node.close()

    @property
    def second(self) -> Node:
        return self.nodes[1]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    one = Served(tmp_path / "door", {"HOME": str(tmp_path)})
    await one.start()
    yield one
    await one.end()


def client(served: Served) -> AdminClient:
    return AdminClient(ClusterConfig(admin_socket=str(served.door.path)), {})


async def emptied(door: AdminDoor) -> None:
    async with asyncio.timeout(10.0):
        while door.visitors:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_every_node_is_reached_by_its_own_address(served: Served) -> None:
    visitor = client(served)
    status = await visitor.status()
    assert status.asked == served.second.id
    assert {m.node for m in status.members} == {node.id for node in served.nodes}
    for member in status.members:
        assert member.report is not None
        assert member.report.reason == "as a test"
        state = await visitor.drain(member.address, member.node, stay=True)
        assert state.left == 1
    await visitor.close()
    await emptied(served.door)


async def test_a_node_that_is_not_there_is_said(served: Served) -> None:
    visitor = client(served)
    with pytest.raises(DialFailed, match="nothing listens at gone:7700"):
        await visitor.drain("gone:7700", served.second.id, stay=False)
    with pytest.raises(DialFailed, match="is not of the form HOST:PORT"):
        await visitor.drain("nonsense", served.second.id, stay=False)
    await visitor.close()


async def test_a_closed_door_leaves_no_socket_and_ends_its_visits(served: Served) -> None:
    visitor = client(served)
    await visitor.status()
    assert served.door.visitors == 1
    await served.door.close()
    assert not served.door.path.exists()
    await emptied(served.door)
    with pytest.raises(DialFailed, match="no server listens at"):
        await asyncio.wait_for(visitor.status(), 10.0)
    await visitor.close()


async def test_a_client_follows_a_server_that_was_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_socket, "_FALLBACK", str(tmp_path))
    environ = {"HOME": str(tmp_path)}
    folder = admin_socket.default_path(1, {}).parent
    first = Served(folder / "8000-1.sock", environ)
    await first.start()
    visitor = AdminClient(ClusterConfig(), environ)
    assert (await visitor.status()).asked == first.second.id
    await first.end()
    with pytest.raises(DialFailed):
        await visitor.status()
    again = Served(folder / "8000-2.sock", environ)
    await again.start()
    assert (await visitor.status()).asked == again.second.id
    await visitor.close()
    await again.end()


async def test_too_many_visitors_are_turned_away(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_door, "_VISITORS", 1)
    first, second = client(served), client(served)
    await first.status()
    with pytest.raises(DialFailed, match="too many visitors at once"):
        await second.status()
    await first.close()
    await emptied(served.door)
    assert (await second.status()).asked == served.second.id
    await second.close()


async def test_another_users_process_is_turned_away(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    visitor = client(served)
    if os.getuid() != 0:  # root may look at everybody's server
        with pytest.raises(DialFailed, match="belongs to another user"):
            await visitor.status()
    assert served.door.admit(object(), 4712) == "this server belongs to another user"  # type: ignore[arg-type]
    assert not served.door.visitors
    await visitor.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process of another user")
async def test_the_kernel_says_whose_process_a_visitor_is() -> None:
    """Folder and socket have been opened to everybody, by mistake."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        served = Served(Path(folder) / "door", {"HOME": folder})
        await served.start()
        served.door.path.chmod(0o666)
        code = (
            "import os, socket, sys\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "one = socket.socket(socket.AF_UNIX)\n"
            f"one.connect({str(served.door.path)!r})\n"
            "sys.stdout.write(one.recv(1000).decode('latin-1'))\n"
        )
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code), stdout=asyncio.subprocess.PIPE
        )
        told, _ = await asyncio.wait_for(child.communicate(), 20.0)
        assert b"this server belongs to another user" in told
        assert not served.door.visitors
        await served.end()


async def spoken(door: AdminDoor, said: bytes) -> bytes:
    """All that the door answers."""
    reader, writer = await asyncio.open_unix_connection(str(door.path))
    writer.write(said)
    async with asyncio.timeout(10.0):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        PREFIX.pack(3) + b"abc",
        PREFIX.pack(60000),
        PREFIX.pack(8) + b'{"to":4}',
        framed(DoorQuery()) + b"more",
    ],
)
async def test_what_is_no_query_is_refused(served: Served, said: bytes) -> None:
    assert b"no query for a node" in await spoken(served.door, said)
    await emptied(served.door)


async def test_a_defect_at_the_door_keeps_no_visitor(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> bytes:
        raise ValueError("a defect")

    monkeypatch.setattr(served.door, "_key", fails)
    assert b"ValueError in the server" in await spoken(served.door, framed(DoorQuery()))
    await emptied(served.door)


async def test_who_says_nothing_is_let_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_door, "_PATIENCE", 0.05)
    assert b"no node was named in time" in await spoken(served.door, b"")
    await emptied(served.door)


async def test_who_never_reads_is_let_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The visitor's half is flooded; then the node goes."""
    monkeypatch.setattr(admin_door, "_PATIENCE", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.connect(str(served.door.path))
        visitor.sendall(framed(DoorQuery()))
        async with asyncio.timeout(10.0):
            while not served.door.visitors or not _inside(served.door):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (visit,) = served.door._visits
        assert visit.transport is not None
        visit.transport.write(bytes(1 << 22))
        assert visit.node is not None
        visit.node.abort()
        await emptied(served.door)


def _inside(door: AdminDoor) -> bool:
    return all(visit.node is not None for visit in door._visits)


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH\r\n", framed(DoorAnswer(cluster="a", key="no hexadecimal"))]
)
async def test_what_is_no_door_is_said(tmp_path: Path, said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "s")
    visitor = AdminClient(ClusterConfig(admin_socket=str(tmp_path / "s")), {})
    with pytest.raises(DialFailed, match="is no pdserve"):
        await visitor.status()
    await visitor.close()
    server.close()


class Machine:
    """Sockets of servers on this machine, and whether a router listens."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(admin_socket, "_FALLBACK", str(tmp_path))
        self.router = False
        monkeypatch.setattr(admin_client, "_listens", lambda port: self.router)
        self.folder = admin_socket.default_path(1, {}).parent
        self.listening: list[socket.socket] = []

    def serve(self, port: int, pid: int = 9) -> Path:
        path = self.folder / f"{port}-{pid}.sock"
        self.listening.append(admin_socket.listen(path))
        return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    one = Machine(tmp_path, monkeypatch)
    yield one
    for listening in one.listening:
        listening.close()


def chosen(port: int | None = None, **fields: Any) -> Path | None:
    return choose_socket(ClusterConfig(**fields), {}, port=port)


def test_the_only_server_is_taken(machine: Machine) -> None:
    assert chosen() is None
    path = machine.serve(8000)
    assert chosen() == path
    assert chosen(join=("127.0.0.1:7700",)) is None
    assert chosen(admin_socket="none") is None
    assert str(chosen(admin_socket="/a/b")) == "/a/b"


def test_of_several_servers_one_must_be_named(machine: Machine) -> None:
    first, second = machine.serve(8000), machine.serve(8001)
    with pytest.raises(ConfigError) as caught:
        chosen()
    assert str(caught.value).splitlines() == [
        "several servers run on this machine; say which with one of:",
        f"  --port 8000    (pid 9, {first})",
        f"  --port 8001    (pid 9, {second})",
    ]
    assert (chosen(8000), chosen(8001)) == (first, second)
    with pytest.raises(ConfigError, match="there are servers on 8000, 8001"):
        chosen(8002)


def test_a_cluster_on_the_same_machine_is_an_alternative(machine: Machine) -> None:
    machine.router = True
    assert chosen() is None
    path = machine.serve(8000)
    with pytest.raises(ConfigError, match=r"--join 127\.0\.0\.1:7700 "):
        chosen()
    assert chosen(8000) == path


def test_two_servers_of_one_port_are_told_apart_by_their_paths(machine: Machine) -> None:
    """As with two network namespaces."""
    machine.serve(8000, 1), machine.serve(8000, 2)
    with pytest.raises(ConfigError, match=r"--admin-socket \S+8000-1.sock or --admin-socket"):
        chosen(8000)


def test_no_server_is_said_with_the_remedy(machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"none of this user's .* --url http://127.0.0.1:8000"):
        chosen(8000)
