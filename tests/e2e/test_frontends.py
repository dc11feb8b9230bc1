"""Several frontend processes on one port: requests reach all, numbers add up, nothing outlives."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pdserve.launch import exit_codes
from tests.e2e.server import PATIENCE, Server
from tests.support.metrics_page import find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
COMPLETED = 'pdserve_requests_total{outcome="completed"}'


def eventually(holds: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)
    return found


def siblings(server: Server) -> list[int]:
    """The processes that the first one started; those that have just died are left out."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "pdserve.launch.frontend_main" in child.cmdline():
                found.append(child.pid)
    return found


def gone(server: Server, pid: int) -> bool:
    return pid not in siblings(server)


def wait_siblings(server: Server, but: int = 0) -> list[int]:
    """Until every sibling serves; one that is called `but` does not count."""
    pids = eventually(lambda: [pid for pid in siblings(server) if pid != but], "a sibling")
    for pid in pids:
        server.wait_for_line(rf"process {pid} serves on port {server.port}, too")
    return pids


def asked(server: Server) -> int:
    """The process that a request reached."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(PATIENCE)
        client.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        ends = (server.port, client.getsockname()[1])
        (pid,) = (
            one.pid
            for one in psutil.net_connections("tcp")
            if one.laddr and one.raddr and (one.laddr.port, one.raddr.port) == ends
        )
        assert pid is not None
        return pid


def asked_router(server: Server) -> str:
    """The router that chose the worker of a request on a new connection."""
    body = json.dumps(CHAT).encode()
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    with urllib.request.urlopen(url, data=body, timeout=PATIENCE) as answer:
        return str(answer.headers["x-pdserve-router"])


def wait_asked(server: Server, pids: set[int]) -> None:
    """Until requests have reached each of `pids`; the kernel chooses by the client's port."""
    seen: set[int] = set()

    def all_seen() -> bool:
        seen.add(asked(server))
        return seen >= pids

    eventually(all_seen, f"requests at {pids}")
    assert seen == pids


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where these clusters' key is."""
    return str(tmp_path_factory.mktemp("home"))


@contextlib.contextmanager
def pair(model: Path, home: str, *flags: str) -> Iterator[Server]:
    """All roles in one process, and a second frontend."""
    instant = ("--engine", "instant", "--frontends", "2", *flags)
    with Server(model, *instant, XDG_CONFIG_HOME=home) as server:
        server.wait_for_line("ready: ")
        wait_siblings(server)
        yield server


@pytest.fixture(scope="module")
def server(tiny_model: Path, home: str) -> Iterator[Server]:
    """One pair for the tests that leave it whole."""
    with pair(tiny_model, home, "--metrics-port", "0") as server:
        yield server


def test_requests_reach_every_process(server):
    wait_asked(server, {server.process.pid, *siblings(server)})


def test_every_process_tells_the_sum(server):
    for _ in range(16):
        server.post("/v1/chat/completions", CHAT)
    own = int(server.wait_for_line(r"probes at http://\S+:(\d+)")[1])

    def on_probes() -> float:
        return find(server.get("/metrics", own)[1], COMPLETED) or 0.0

    assert on_probes() == 16
    assert [server.metric(COMPLETED) for _ in range(16)] == [16.0] * 16
    assert server.metric("pdserve_engine_ready") == 1
    assert not server.get("/health", own)[1]["degraded"].get("frontend_silent")


def test_a_killed_one_is_started_again_and_serves(server):
    (victim,) = siblings(server)
    os.kill(victim, signal.SIGKILL)
    server.wait_for_line(rf"frontend 2 \(process {victim}\) was killed by SIGKILL")
    (heir,) = wait_siblings(server, but=victim)
    wait_asked(server, {server.process.pid, heir})
    server.post("/v1/chat/completions", CHAT)


def test_one_that_stands_still_is_missing_from_the_sum_and_said_to_be(server):
    (frozen,) = siblings(server)
    own = int(server.wait_for_line(r"probes at http://\S+:(\d+)")[1])
    os.kill(frozen, signal.SIGSTOP)
    try:
        assert server.get("/metrics", own)[0] == 200
        assert "frontend_silent" in server.get("/health", own)[1]["degraded"]
    finally:
        os.kill(frozen, signal.SIGCONT)

    def recovered() -> bool:
        server.get("/metrics", own)
        return "frontend_silent" not in server.get("/health", own)[1]["degraded"]

    eventually(recovered, "an answer of the sibling")


def test_keys_are_read_again_by_all(tiny_model, home, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text('[[key]]\nkey = "sk-alice-0123456789"\ntenant = "alice"\n')
    keys.chmod(0o600)
    with pair(tiny_model, home, "--api-keys-file", str(keys)) as server:
        server.process.send_signal(signal.SIGHUP)
        eventually(
            lambda: sum("API keys read again" in line for line in server.lines) == 2, "both reload"
        )


def test_sigterm_ends_all(tiny_model, home):
    with pair(tiny_model, home) as server:
        children = siblings(server)
        assert server.end() == exit_codes.OK
        assert not any(psutil.pid_exists(pid) for pid in children)
        assert sum(line.endswith("launch.process: closed") for line in server.lines) == 2
        assert not [line for line in server.lines if "Traceback" in line or "killed" in line]


def test_running_requests_of_every_process_finish(tiny_model, home):
    paced = ("--engine-option", "tokens_per_second=20")
    with pair(tiny_model, home, *paced) as server:
        clients: dict[int, socket.socket] = {}
        body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":40,"stream":true}'
        lines = f"Host: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{lines}"

        def one_at_each() -> bool:
            client = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
            client.sendall(head.encode() + body)
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            ends = (server.port, client.getsockname()[1])
            for one in psutil.net_connections("tcp"):
                if one.laddr and one.raddr and (one.laddr.port, one.raddr.port) == ends:
                    assert one.pid is not None
                    clients.setdefault(one.pid, client)
            if client not in clients.values():
                client.close()
            return len(clients) == 2

        eventually(one_at_each, "a request at each")
        server.process.send_signal(signal.SIGTERM)
        for client in clients.values():
            answer = b""
            while b"[DONE]" not in answer:
                piece = client.recv(65536)
                assert piece, answer
                answer += piece
            client.close()
        assert server.process.wait(PATIENCE) == exit_codes.OK


def test_a_killed_first_process_takes_the_others_along(tiny_model, home):
    with pair(tiny_model, home) as server:
        children = [psutil.Process(pid) for pid in siblings(server)]
        server._remember_children()
        server.process.kill()
        _, alive = psutil.wait_procs(children, timeout=PATIENCE)
        assert not alive


@pytest.mark.long(one_in=3)
def test_too_many_deaths_are_the_end_of_all(tiny_model, home):
    with pair(tiny_model, home) as server:
        for _ in range(6):
            (pid,) = eventually(lambda: siblings(server), "a sibling")
            psutil.Process(pid).kill()
            eventually(functools.partial(gone, server, pid), "its end")
        assert server.process.wait(PATIENCE) == exit_codes.FAILED
        server.wait_for_line("gives up")


def test_a_port_of_somebody_elses_is_not_shared(server, tiny_model, home):
    flags = ("--engine", "instant", "--frontends", "2", "--port", str(server.port))
    with Server(tiny_model, *flags, XDG_CONFIG_HOME=home) as second:
        assert second.process.wait(PATIENCE) == exit_codes.CANNOT_LISTEN
    assert any("choose another --port" in line for line in second.lines)


@pytest.mark.long(one_in=3)
def test_a_frontend_alone_shares_its_port_too(tiny_model, home):
    own = {"XDG_CONFIG_HOME": home}
    with Server(None, "--role", "router", "--listen", "127.0.0.1:0", **own) as router:
        seed = router.wait_for_line(r"router \S+ at (\S+)")[1]
        worker = ("--role", "worker", "--engine", "instant", "--join", seed)
        front = ("--role", "frontend", "--frontends", "3", "--join", seed)
        with Server(tiny_model, *worker, **own), Server(None, *front, **own) as server:
            server.wait_for_line("ready: ")
            eventually(lambda: len(siblings(server)) == 2, "two siblings")
            wait_asked(server, {server.process.pid, *wait_siblings(server)})
            server.post("/v1/chat/completions", CHAT)
            assert server.metric(COMPLETED) == 1


@pytest.mark.long(one_in=3)
def test_each_process_may_have_a_router_of_its_own(tiny_model, home):
    with pair(tiny_model, home, "--with-router") as server:
        (sibling,) = siblings(server)
        routers = server.metric("pdserve_router_routed_total")
        wait_asked(server, {server.process.pid, sibling})
        seen = {asked_router(server) for _ in range(64)}
        assert len(seen) == 2, "both routers were asked"
        assert server.metric("pdserve_router_routed_total") == routers + 64
        os.kill(sibling, signal.SIGKILL)
        server.wait_for_line(rf"frontend 2 \(process {sibling}\) was killed by SIGKILL")
        wait_siblings(server, but=sibling)
        assert asked_router(server)
