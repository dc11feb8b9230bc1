"""Who may take part, over real processes: keys, their files, names of clusters, certificates; and
strangers at the cluster port, from whom nobody has anything to fear."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import socket
import stat
import time
from typing import TYPE_CHECKING

import pytest

from pdserve.launch import exit_codes
from pdserve.wire.header import HEADER, FrameKind
from tests.chaos.cluster import Cluster
from tests.chaos.load import Stream, ask, wait_served
from tests.chaos.proxy import Proxy
from tests.e2e.server import PATIENCE
from tests.net.certificates import certificate, folder
from tests.wire.test_codec import BOMBS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chaos.cluster import Node

pytestmark = pytest.mark.timeout(300)

STRANGERS = 1000
GROWTH = 24 << 20
"""Bytes that a node may grow under attack, its allocator's habits included; what a thousand
connections of a careless server would take is several times that."""


def key_file(path: Path, *keys: str) -> Path:
    """A key file as it should be."""
    path.write_text("".join(f"{key}\n" for key in keys))
    path.chmod(0o600)
    return path


def refused(node: Node, status: int, pattern: str) -> None:
    """A node ends with that status, and says why in a line of its own without a traceback."""
    node.expected, node.expected_errors = status, True
    node.wait_said(pattern)
    assert node.process.wait(PATIENCE) == status


def nobody_joined(cluster: Cluster, *names: str) -> None:
    for node in cluster.nodes:
        for name in names:
            assert not node.said(f"{name} joined"), node.lines


def flows(stream: Stream) -> None:
    """The stream goes on."""
    stream.wait_tokens(3)
    assert stream.running


# ---------------------------------------------------------------------- who may join


def test_who_has_another_key_or_cluster_is_told_so_and_stays_out(cluster, tmp_path):
    router, _, frontend = cluster.serving(rate=20)
    stream = Stream(frontend, tokens=1900)
    flows(stream)
    stranger = key_file(tmp_path / "stranger.key", secrets.token_hex(32))
    wrong_key = cluster.worker("--cluster-key-file", str(stranger), name="stranger")
    wrong_name = cluster.worker("--cluster", "another", name="elsewhere")
    refused(wrong_key, exit_codes.CANNOT_JOIN, f"cannot join through {cluster.address}: .*key")
    refused(wrong_name, exit_codes.CANNOT_JOIN, f"cannot join through {cluster.address}: .*cluster")
    flows(stream)
    nobody_joined(cluster, "stranger", "elsewhere")
    router.wait_said("refused a connection from 127.0.0.1")
    stream.hang_up()


@pytest.mark.long
def test_of_two_with_one_name_the_later_stays(cluster):
    router, (earlier,), frontend = cluster.serving(rate=20)
    later = cluster.worker(name=earlier.name)
    refused(earlier, exit_codes.CANNOT_JOIN, "another process takes part as worker-1")
    wait_served(frontend)
    assert later.process.poll() is None
    assert later.count("pdserve_generation_tokens_total") > 0
    assert router.said("worker-1 joined")


def test_keys_that_are_missing_or_too_open_are_named(cluster, tmp_path):
    beyond = cluster.start("router", "beyond", "--listen", "0.0.0.0:0", "--advertise", "192.0.2.7")
    away = cluster.start("worker", "away", "--engine", "instant", "--join", "192.0.2.7:7700")
    for node in (beyond, away):
        refused(node, exit_codes.USAGE, "beyond this machine: .*--cluster-key-file")
    opened = key_file(tmp_path / "open.key", secrets.token_hex(32))
    opened.chmod(0o640)
    node = cluster.start(
        "router", "open", "--listen", cluster.address, "--cluster-key-file", str(opened)
    )
    refused(node, exit_codes.USAGE, "mode 0640: others can get at the key; do `chmod 600")
    short = key_file(tmp_path / "short.key", "abcd")
    node = cluster.start(
        "router", "short", "--listen", cluster.address, "--cluster-key-file", str(short)
    )
    refused(node, exit_codes.USAGE, "has 2 bytes, not 32")


def test_the_users_own_key_is_made_once_and_kept_closed(cluster):
    nodes = [cluster.router(), cluster.frontend(), cluster.frontend()]  # all at once
    for node in nodes:
        node.wait_said(f"{node.name} at 127.0.0.1")
    path = cluster.home / "config" / "pdserve" / "cluster.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["cluster.key"]
    nodes[1].wait_said("frontend-2 joined")
    nodes[2].wait_said("frontend-1 joined")


# ---------------------------------------------------------------------- certificates


def tls_flags(name: str, authority: str = "ca", trusts: str = "ca") -> tuple[str, ...]:
    cert, key = certificate(name, authority)
    trust = str(folder() / f"{trusts}.pem")
    return ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", trust)


@pytest.mark.long
def test_nodes_with_certificates_serve_and_let_nobody_else_in(tmp_path):
    with Cluster(tmp_path, *tls_flags("node")) as cluster:
        _, _, frontend = cluster.serving(rate=20)
        wait_served(frontend)
        stream = Stream(frontend, tokens=1900)
        flows(stream)
        other = cluster.worker(*tls_flags("other", "other-ca", "other-ca"), name="stranger")
        other.wait_said("no seed accepted this node .*TLS.*it runs alone")
        cluster.flags = ()
        plain = cluster.worker(name="plain")
        plain.wait_said("no seed accepted this node .*it runs alone")
        nobody_joined(cluster, "stranger", "plain")
        flows(stream)
        assert ask(frontend).status == 200
        stream.hang_up()


# ---------------------------------------------------------------------- another key


@pytest.mark.long
def test_a_key_is_replaced_while_all_serve(cluster, tmp_path):
    old, new = secrets.token_hex(32), secrets.token_hex(32)
    keys = key_file(tmp_path / "shared.key", old)
    cluster.flags = ("--cluster-key-file", str(keys))
    nodes = router, (worker,), frontend = cluster.serving(rate=20)
    running = [router, worker, frontend]
    stream = Stream(frontend, tokens=1900)
    flows(stream)
    assert len(nodes) == 3
    for number, step in enumerate(((old, new), (new, old), (new,)), 1):
        key_file(keys, *step)
        for node in running:
            began = time.time()
            os.kill(node.process.pid, signal.SIGHUP)
            node.wait_said("SIGHUP: cluster keys read again", since=began - 0.01)
            flows(stream)
        joined = cluster.frontend(name=f"newcomer-{number}")
        wait_served(joined)  # it dialled the others, and they it
        running.append(joined)
    before = key_file(tmp_path / "before.key", old)
    cluster.flags = ("--cluster-key-file", str(before))
    refused(cluster.worker(name="stranger"), exit_codes.CANNOT_JOIN, "cannot join .*key")
    flows(stream)
    broken = key_file(keys, "no key at all")
    assert broken.exists()
    os.kill(router.process.pid, signal.SIGHUP)
    router.wait_said("SIGHUP: the old cluster keys stay in force")
    router.expected_errors = True
    flows(stream)
    stream.hang_up()


# ---------------------------------------------------------------------- strangers at the port


@pytest.fixture
def many_files():
    """Room for a thousand sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * STRANGERS:
        pytest.skip(f"only {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * STRANGERS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def say(address: str, *words: bytes) -> bytes:
    """Send, and read until the other side hangs up."""
    host, _, port = address.rpartition(":")
    answer = b""
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection((host, int(port)), 60) as one,
    ):
        for word in words:
            one.sendall(word)
        while data := one.recv(65536):
            answer += data
    return answer


def frame(kind: int, body: bytes) -> bytes:
    return HEADER.pack(len(body), kind, 0, 0, 0, 0) + body


NONSENSE = [
    b"\xff" * 16,
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00" + bytes(600),
    bytes(1 << 16),
    HEADER.pack(0xFFFF_FFFF, FrameKind.HELLO, 0, 0, 0, 0),
    HEADER.pack(1025, FrameKind.HELLO, 0, 0, 0, 0),
    *(frame(kind, b"\x90") for kind in sorted(set(FrameKind) - {FrameKind.HELLO})),
    *(frame(FrameKind.HELLO, bomb[:1024]) for bomb in BOMBS.values()),
]


def test_a_crowd_at_the_cluster_port_disturbs_nobody(cluster, many_files):
    """Half-open connections, nonsense, and an honest dialler's words, said again."""
    with Proxy() as proxy:
        proxy.target = cluster.address
        router = cluster.router()
        worker = cluster.worker("--join", proxy.address, rate=20)  # the last flag wins
        frontend = cluster.frontend()
        cluster.wait_ready()
        wait_served(frontend)
        stream = Stream(frontend, tokens=1900)
        flows(stream)
        recorded = bytes(proxy.heard)
        assert len(recorded) > 200
        before = {node: node.rss() for node in (router, worker, frontend)}
        ports = [cluster.address, address_of(worker), address_of(frontend)]
        with contextlib.ExitStack() as crowd:
            for i in range(STRANGERS):
                crowd.enter_context(stranger(ports[0] if i % 10 < 8 else ports[1 + i % 2], i))
            flows(stream)
            for round_ in range(5):
                for port in ports:
                    for words in NONSENSE:
                        assert len(say(port, words)) < 120
                    answer = say(port, recorded)
                    assert answer[4] == FrameKind.CHALLENGE
                    assert len(answer) < 400, round_
                flows(stream)
            assert ask(frontend).status == 200
        after = {node: node.rss() for node in before}
        grown = {node.name: after[node] - before[node] for node in before}
        assert max(grown.values()) < GROWTH, grown
        newcomer = cluster.frontend(name="newcomer")  # whoever has the key still gets in
        wait_served(newcomer)
        flows(stream)
    known = {node.name for node in cluster.nodes}
    for node in cluster.nodes:
        joined = {
            record["message"].split()[1]
            for record in node.records()
            if " joined, life " in record["message"]
        }
        assert joined <= known
        assert not node.said(" died, life")
    stream.hang_up()


def address_of(node: Node) -> str:
    """Where others reach it."""
    return node.wait_for_line(rf"{node.name} at ([\d.]+:\d+)")[1]


def stranger(address: str, number: int) -> socket.socket:
    """A connection that has said nothing, or half of something."""
    host, _, port = address.rpartition(":")
    one = socket.create_connection((host, int(port)), 60)
    with contextlib.suppress(OSError):
        one.sendall(frame(FrameKind.HELLO, bytes(100))[: number % 60])
    return one
