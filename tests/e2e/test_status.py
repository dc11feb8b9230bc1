"""`pdserve status` and `pdserve top` against real processes, by their own command line."""

from __future__ import annotations

import json
import os
import pty
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import pytest

from pdserve.launch import exit_codes
from tests.e2e.server import PATIENCE, Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Trio:
    """A router, a worker and a frontend; `seed` is where the router is."""

    def __init__(self, router: Server, worker: Server, frontend: Server, home: str) -> None:
        self.router, self.worker, self.frontend, self.home = router, worker, frontend, home
        self.seed = router.wait_for_line(r"router \S+ at (\S+)")[1]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of pdserve's with this cluster's key."""
        return subprocess.run(
            [sys.executable, "-m", "pdserve", *arguments],
            env=environ(self.home),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def wait_whole(self) -> None:
        """Until all three are members."""
        deadline = time.monotonic() + PATIENCE
        while len(self.status()["members"]) != 3:
            assert time.monotonic() < deadline

    def status(self) -> dict:
        done = self.run("status", "--json", "--join", self.seed)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def environ(home: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
    own = {"XDG_CONFIG_HOME": home, "XDG_RUNTIME_DIR": home}
    return clean | {"PDSERVE_CONFIG": "none"} | own


@pytest.fixture(scope="module")
def trio(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """One of each role, ready."""
    home = str(tmp_path_factory.mktemp("home"))
    own = {"XDG_CONFIG_HOME": home}
    with Server(None, "--role", "router", "--listen", "127.0.0.1:0", **own) as router:
        seed = router.wait_for_line(r"router \S+ at (\S+)")[1]
        worker = ("--role", "worker", "--engine", "instant", "--join", seed)
        with (
            Server(tiny_model, *worker, **own) as working,
            Server(None, "--role", "frontend", "--join", seed, **own) as front,
        ):
            front.wait_for_line("ready: ")
            yield Trio(router, working, front, home)


def test_all_members_and_their_numbers_are_seen(trio):
    shown = trio.status()
    members = {member["role"]: member for member in shown["members"]}
    assert set(members) == {"router", "worker", "frontend"}
    assert {m["pid"] for m in members.values()} == {
        server.process.pid for server in (trio.router, trio.worker, trio.frontend)
    }
    assert all(m["state"] == "alive" and not m["silence"] for m in members.values())
    assert members["worker"]["report"]["worker"]["ready"] is True
    assert members["frontend"]["http"].endswith(f":{trio.frontend.port}")
    (model,) = shown["models"]
    assert model["workers"] == [members["worker"]["node"]]


def test_a_routed_request_is_counted(trio):
    def routed() -> int:
        members = trio.status()["members"]
        return sum(m["report"]["router"]["routed"] for m in members if m["role"] == "router")

    before = routed()
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    trio.frontend.post("/v1/chat/completions", body)
    assert routed() == before + 1


def test_whoever_looks_is_not_seen(trio):
    for _ in range(3):
        trio.wait_whole()
    assert not [line for line in trio.router.lines if "visitor" in line]


def test_a_frozen_worker_is_named_as_silent(trio):
    deadline = time.monotonic() + PATIENCE
    shown = ""
    while "DID NOT ANSWER\n  worker-" not in shown:
        # On a busy machine the question may take so long that the worker is no member any more.
        assert time.monotonic() < deadline, shown
        trio.wait_whole()
        os.kill(trio.worker.process.pid, signal.SIGSTOP)
        try:
            shown = trio.run("status", "--join", trio.seed).stdout
        finally:
            os.kill(trio.worker.process.pid, signal.SIGCONT)
    trio.wait_whole()


def test_another_key_another_name_and_nobody_are_one_line_each(trio, tmp_path):
    key = tmp_path / "other.key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    wrong = trio.run("status", "--join", trio.seed, "--cluster-key-file", str(key))
    elsewhere = trio.run("top", "--join", trio.seed, "--cluster", "elsewhere")
    nobody = trio.run("status", "--join", "127.0.0.1:1")
    assert wrong.returncode == elsewhere.returncode == exit_codes.CANNOT_JOIN
    assert nobody.returncode == exit_codes.FAILED
    for done, remedy in (
        (wrong, "--cluster-key-file"),
        (elsewhere, "--cluster"),
        (nobody, "--join"),
    ):
        assert remedy in done.stderr
        assert done.stderr.count("\n") == 1
        assert not done.stdout


class Terminal:
    """`pdserve top` on a terminal of its own."""

    def __init__(self, trio: Trio, *whom: str) -> None:
        self.ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "pdserve", "top", *whom]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ(trio.home)
        )
        os.close(theirs)
        self.drawn = ""

    def until(self, met) -> None:
        """Read until `met(drawn)`."""
        deadline = time.monotonic() + PATIENCE
        while not met(self.drawn):
            assert time.monotonic() < deadline, self.drawn
            try:
                self.drawn += os.read(self.ours, 65536).decode()
            except OSError as error:
                raise AssertionError(f"ended: {self.drawn}") from error

    def close(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            os.close(self.ours)


@pytest.mark.parametrize("end", ["q", "Ctrl-C"])
def test_top_draws_again_and_again_and_gives_the_terminal_back(trio, end):
    terminal = Terminal(trio, "--join", trio.seed)
    try:
        terminal.until(lambda drawn: drawn.count("\x1b[H") >= 3)
        assert "PER SECOND" in terminal.drawn
        if end == "q":
            os.write(terminal.ours, b"q")
        else:
            terminal.process.send_signal(signal.SIGINT)
        terminal.until(lambda drawn: drawn.endswith("\x1b[?25h\x1b[?1049l"))
    finally:
        status = terminal.close()
    assert status == exit_codes.OK


# ---------------------------------------------------------------------- a server without a cluster


class Alone(Trio):
    """A server without a cluster, and commands that look for it."""

    def __init__(self, server: Server, home: str) -> None:
        self.server, self.home = server, home

    def shown(self, *arguments: str) -> dict:
        done = self.run("status", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Iterator[Alone]:
    with tempfile.TemporaryDirectory(prefix="pdserve-") as home:
        own = {"XDG_CONFIG_HOME": home, "XDG_RUNTIME_DIR": home}
        with Server(tiny_model, "--engine", "instant", **own) as server:
            server.wait_for_line("ready: ")
            yield Alone(server, home)


def test_a_server_without_a_cluster_is_found_without_flags(alone):
    shown = alone.shown()
    assert {m["role"] for m in shown["members"]} == {"router", "worker", "frontend"}
    assert {m["pid"] for m in shown["members"]} == {alone.server.process.pid}
    assert all(m["report"] and not m["report"]["degraded"] for m in shown["members"])
    assert shown == alone.shown("--port", str(alone.server.port)) | {"now": shown["now"]}


def test_one_of_several_servers_is_named(alone, tiny_model):
    own = {"XDG_RUNTIME_DIR": alone.home}
    with Server(tiny_model, "--engine", "instant", "--frontends", "2", **own) as second:
        second.wait_for_line("ready: ")
        done = alone.run("status")
        assert done.returncode == exit_codes.USAGE
        for server in (alone.server, second):
            assert f"--port {server.port} " in done.stderr
            assert f"pid {server.process.pid}" in done.stderr
        frontends = [m for m in alone.shown("--port", str(second.port))["members"] if m["http"]]
        assert all(m["http"].endswith(f":{second.port}") for m in frontends)
        done = alone.run("drain", "--wait", "--port", str(second.port))
        assert (done.returncode, done.stderr) == (exit_codes.OK, "")
        assert second.process.wait(PATIENCE) == exit_codes.OK
    assert alone.shown()


def test_a_killed_servers_socket_is_removed_and_a_bad_path_only_degrades(alone, tiny_model):
    own = {"XDG_RUNTIME_DIR": alone.home}
    with Server(tiny_model, "--engine", "instant", **own) as second:
        second.wait_for_line("ready: ")
        sockets = set(os.listdir(f"{alone.home}/pdserve"))
        assert len(sockets) == 2
        second.end(signal.SIGKILL)
    assert alone.shown()
    assert len(os.listdir(f"{alone.home}/pdserve")) == 1
    with Server(tiny_model, "--engine", "instant", "--admin-socket", "/no/s", **own) as third:
        third.wait_for_line("ready: ")
        degraded = third.get("/health")[1]["degraded"]
        assert "--admin-socket" in degraded["no_admin_socket"]
        assert "/no/s" in degraded["no_admin_socket"]


def test_top_shows_a_server_without_a_cluster(alone):
    terminal = Terminal(alone)
    try:
        terminal.until(lambda drawn: drawn.count("\x1b[H") >= 2)
        assert f":{alone.server.port}" in terminal.drawn
        os.write(terminal.ours, b"q")
        terminal.until(lambda drawn: drawn.endswith("\x1b[?25h\x1b[?1049l"))
    finally:
        status = terminal.close()
    assert status == exit_codes.OK
