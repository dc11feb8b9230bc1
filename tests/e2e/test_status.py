"""`pdserve status` and `pdserve top` against real processes, by their own command line."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import termios
import time
from typing import TYPE_CHECKING

import pytest

from pdserve.launch import exit_codes
from tests.e2e.server import PATIENCE, Server
from tests.support.screen import Terminal

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


def top(trio: Trio, *whom: str, columns: int = 80, lines: int = 24, **own: str) -> Terminal:
    """`pdserve top` on a terminal of its own."""
    command = [sys.executable, "-m", "pdserve", "top", *whom]
    return Terminal(command, environ(trio.home) | {"TERM": "xterm"} | own, columns, lines)


@pytest.mark.parametrize("end", ["q", "Ctrl-C", "Ctrl-\\", "SIGTERM"])
def test_top_draws_again_and_again_and_gives_the_terminal_back(trio, end):
    terminal = top(trio, "--join", trio.seed)
    try:
        first = terminal.shows("cluster pdserve, 3 nodes", "worker-", "q quit")
        assert terminal.screen.alternate
        assert not terminal.screen.cursor_shown
        # The ages of nodes go on.
        terminal.until(lambda lines: lines != first)
        if end == "SIGTERM":
            terminal.process.terminate()
        else:
            terminal.type({"Ctrl-C": "\x03", "Ctrl-\\": "\x1c"}.get(end, end))
        assert terminal.ended() == exit_codes.OK
        assert terminal.screen.scrolled == 0
    finally:
        terminal.close()


def test_top_that_fails_gives_the_terminal_back_and_then_says_why(trio):
    """Its cluster refuses it from now on; such errors end it."""
    failing = (
        "import pdserve.cli.top as top, pdserve.cli.main as main, sys\n"
        "whole = top.Viewer.press\n"
        "top.Viewer.press = lambda self, key: 1 / 0 if key == 'x' else whole(self, key)\n"
        "top.Viewer.screen = lambda self, *size, old=top.Viewer.screen: "
        "1 / 0 if self.minute else old(self, *size)\n"
        "sys.exit(main.main())\n"
    )
    command = [sys.executable, "-c", failing, "top", "--join", trio.seed]
    terminal = Terminal(command, environ(trio.home) | {"TERM": "xterm"})
    try:
        terminal.shows("q quit")
        terminal.type("w")
        assert terminal.ended() == exit_codes.FAILED
        assert "ZeroDivisionError" in "\n".join(terminal.screen.text)
    finally:
        terminal.close()


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
    named = alone.shown("--port", str(alone.server.port))
    assert named["members"][0]["node"] == shown["members"][0]["node"]


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


@pytest.mark.parametrize(
    ("columns", "lines"), [(80, 24), (60, 15), pytest.param(120, 40, marks=pytest.mark.long)]
)
def test_top_fits_any_terminal_and_every_row_is_reached(alone, columns, lines):
    alone.server.post("/v1/completions", {"prompt": "hello", "max_tokens": 2})
    terminal = top(alone, columns=columns, lines=lines, NO_COLOR="1")
    try:
        essential = ("requests", "errors", "running", "held", "TTFT", "ITL", "KV cache", "q quit")
        shown = "\n".join(terminal.shows(f"pdserve at 127.0.0.1:{alone.server.port}", *essential))
        assert "WORKER" in shown
        nodes = [member["node"] for member in alone.shown()["members"]]
        terminal.type("G")
        terminal.shows("NODE  ", *nodes)
        terminal.type("/front\r")
        terminal.until(lambda text: not any(line.startswith("worker") for line in text))
        terminal.shows("FRONTEND")
        terminal.type("\x1b")
        terminal.type("\x1b[H?")
        terminal.shows("PageUp, PageDown")
        terminal.type("?")
        terminal.shows("WORKER")
        terminal.resize(200 - columns, 50)
        terminal.shows("q quit")
        terminal.until(lambda text: text[49].startswith("q quit"))
        terminal.type("q")
        assert terminal.ended() == exit_codes.OK
        assert terminal.screen.scrolled == 0
        assert terminal.screen.styles <= {"0", "1", "7"}, "NO_COLOR"
    finally:
        terminal.close()


def test_a_terminal_that_takes_nothing_does_not_keep_top_from_ending(alone):
    terminal = top(alone)
    try:
        terminal.shows("q quit")
        termios.tcflow(terminal.theirs, termios.TCOOFF)
        terminal.type("jjj/x\r\x1bs")
        time.sleep(2.5)
        termios.tcflow(terminal.theirs, termios.TCOON)
        terminal.type("q")
        assert terminal.ended() == exit_codes.OK
    finally:
        terminal.close()


def test_the_overview_is_the_same_over_http(alone):
    alone.server.post("/v1/completions", {"prompt": "hello", "max_tokens": 2})
    text = alone.run("status", "--url", alone.server.url).stdout
    for word in ("is ok", "requests  ", "TTFT  ", "KV cache  "):
        assert word in text
    over_http = json.loads(alone.run("status", "--json", "--url", alone.server.url).stdout)
    assert over_http["status"] == "ok"
    inside = alone.shown()["overview"]
    assert set(inside) == set(over_http["overview"])
    assert inside["requests_per_second"] > 0
    assert inside["ttft_p50"] is not None
    assert list(inside["models"]) == [alone.server.get("/v1/models")[1]["data"][0]["id"]]
