"""Nodes as a process makes them: over real sockets on this machine, or in memory."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.launch.cluster import node_factory
from pdserve.launch.cluster.addresses import ClusterConfig
from pdserve.launch.cluster.node_factory import NodeFactory
from pdserve.worker.config import WorkerConfig
from tests.net.certificates import certificate, folder

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.runtime.node import Node


def membership(tmp_path: Path, *, private: bool = False, **fields: Any) -> NodeFactory:
    fields = {"listen": "127.0.0.1:0", **fields}
    environ = {"HOME": str(tmp_path)}
    return NodeFactory(ClusterConfig(**fields), private=private, environ=environ)


async def met(*nodes: Node) -> None:
    async with asyncio.timeout(20.0):
        while any(len(node.registry) < len(nodes) - 1 for node in nodes):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_nodes_of_two_processes_meet_over_sockets(tmp_path: Path) -> None:
    first = membership(tmp_path, node_name="r1").node("router")
    await first.start()
    second = membership(tmp_path, join=(first.address,)).node("worker")
    try:
        await second.start()
        await met(first, second)
        assert first.id == "r1"
        assert second.id.startswith("worker-")
        assert [m.node for m in first.registry.by_role("worker")] == [second.id]
        key = tmp_path / ".config/pdserve/cluster.key"
        assert key.stat().st_mode & 0o777 == 0o600
    finally:
        await second.close()
        await first.close()


def test_the_card_says_which_change_started_the_process(tmp_path: Path) -> None:
    assert membership(tmp_path, change="7f.2").card("worker").change == "7f.2"
    assert membership(tmp_path).card("worker").change == ""


async def test_nodes_of_one_process_share_neither_name_nor_address(tmp_path: Path) -> None:
    made = membership(tmp_path, node_name="mine")
    nodes = [made.node(role, first=role == "router") for role in ("router", "worker", "frontend")]
    assert len({node.id for node in nodes}) == 3
    try:
        await nodes[0].start()
        for node in nodes[1:]:
            await node.start(beside=(nodes[0].address,))
        await met(*nodes)
        assert len({node.address for node in nodes}) == 3
    finally:
        for node in nodes:
            await node.close()


async def test_private_nodes_meet_in_memory(tmp_path: Path) -> None:
    made = membership(tmp_path, private=True, tls_cert=tmp_path / "none", node_name="mine")
    nodes = [made.node(role, first=role == "router") for role in ("router", "worker")]
    try:
        await nodes[0].start()
        await nodes[1].start(beside=(nodes[0].address,))
        await met(*nodes)
    finally:
        for node in nodes:
            await node.close()
    assert made.keys is None
    assert not (tmp_path / ".config").exists()


async def test_certificates_encrypt_what_nodes_say(tmp_path: Path) -> None:
    cert, key = certificate("node", "ca")
    tls: dict[str, Any] = {"tls_cert": cert, "tls_key": key, "tls_ca": folder() / "ca.pem"}
    first = membership(tmp_path, **tls).node("router")
    await first.start()
    second = membership(tmp_path, join=(first.address,), **tls).node("worker")
    try:
        await second.start()
        await met(first, second)
    finally:
        await second.close()
        await first.close()


async def test_certificates_are_read_again(tmp_path: Path) -> None:
    for which, to in zip(certificate("one", "ca"), ("crt", "key"), strict=True):
        shutil.copyfile(which, tmp_path / to)
    made = membership(tmp_path, tls_cert=tmp_path / "crt", tls_key=tmp_path / "key")
    assert not made.reload_certificates()
    for which, to in zip(certificate("two", "ca"), ("crt", "key"), strict=True):
        shutil.copyfile(which, tmp_path / to)
    assert made.reload_certificates()
    assert not membership(tmp_path).reload_certificates(), "there are none"


async def test_nodes_hear_of_other_cluster_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key(path, "11" * 32)
    made = membership(tmp_path, cluster_key_file=path)
    node = made.node("router")
    await node.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            heard: list[bool] = []
            patch.setattr(node.endpoint, "keys_changed", lambda: heard.append(True))
            assert made.keys is not None
            write_key(path, "22" * 32)
            assert made.keys.reload()
        assert heard == [True]
    finally:
        await node.close()


def write_key(path: Path, key: str) -> None:
    path.write_text(key)
    path.chmod(0o600)


async def test_beyond_this_machine_a_key_must_be_given(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"listen": "", "join": ("192.0.2.7:7700",)},
        {"advertise": "192.0.2.7"},
        {"listen": "192.0.2.7:0"},
    ]
    for fields in cases:
        with pytest.raises(ConfigError, match="--cluster-key-file"):
            membership(tmp_path, **{"advertise": "192.0.2.8", **fields}).node("worker")


def test_a_card_says_who_it_is(tmp_path: Path) -> None:
    card = membership(tmp_path).card("router")
    assert (card.role, card.models, card.draining) == ("router", (), False)
    assert card.version
    assert card.host
    assert card.pid
    assert card.started


@pytest.mark.parametrize(
    ("told", "host", "advertise"),
    [
        ({"listen": "0.0.0.0:7700", "join": ("seed:7700",)}, "0.0.0.0", "10.1.0.5"),
        ({"listen": "[::]:7700", "join": ("six:7700",)}, "::", "fd00::5"),
        ({"listen": "0.0.0.0:0", "advertise": "pub:9"}, "0.0.0.0", "pub"),
        ({"listen": "[::]:0", "advertise": "[fd00::7]:9"}, "::", "fd00::7"),
        ({"listen": "[::1]:0"}, "::1", ""),
        ({"listen": "10.9.9.9:7700"}, "10.9.9.9", ""),
    ],
)
async def test_bulk_connections_are_dialled_where_the_node_is(
    tmp_path: Path, monkeypatch, told: dict[str, Any], host: str, advertise: str
) -> None:
    monkeypatch.setattr(node_factory, "route_from", {"seed": "10.1.0.5", "six": "fd00::5"}.get)
    key = tmp_path / "key"
    key.write_text("11" * 32 + "\n")
    key.chmod(0o600)
    made = membership(tmp_path, cluster_key_file=key, **told)
    node = made.node("worker")
    spec = made.transfer(node, WorkerConfig(mode="decode"))
    assert spec is not None
    assert (spec.host, spec.advertise, spec.tls) == (host, advertise, None)


async def test_bulk_connections_are_encrypted_where_links_are(tmp_path: Path) -> None:
    cert, key = certificate("w", "ca")
    made = membership(tmp_path, tls_cert=cert, tls_key=key, tls_ca=folder() / "ca.pem")
    spec = made.transfer(made.node("worker"), WorkerConfig(mode="prefill"))
    assert spec is not None
    assert spec.tls == (str(cert), str(key), str(folder() / "ca.pem"))


async def test_who_is_never_alone_can_move_what_runs_there(tmp_path: Path) -> None:
    made = membership(tmp_path)
    spec = made.transfer(made.node("worker"), WorkerConfig())
    assert spec is not None
    assert spec.optional
    made = membership(tmp_path, private=True)
    assert made.transfer(made.node("worker"), WorkerConfig()) is None
