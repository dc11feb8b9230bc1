"""A cluster of real processes on ports and with a key of its own, and what it leaves behind.

Nodes are ended together: those that the test did not kill must exit with 0, without a traceback and
without children left. Each has a name, a JSON log and a second listener for probes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import random
import re
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import psutil

from pdserve.launch import exit_codes
from tests.e2e.server import PATIENCE, Server
from tests.support.metrics_page import find
from tests.support.parts import PROCESSES, worker_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_POLL = 0.05
_PORTS = range(20_000, 30_000)[worker_number() % PROCESSES :: PROCESSES]
"""Below those that systems give to whoever asks for any: nobody gets ours between two starts. Tests
that run at the same time have different ones."""


_given: set[tuple[str, int]] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody uses now, and that was not given before: who got it may not listen yet."""
    while True:
        port = random.choice(_PORTS)
        if (host, port) in _given:
            continue
        if len(_given) > len(_PORTS) // 2:
            _given.clear()  # the oldest have long been used or forgotten
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            _given.add((host, port))
            return port


def eventually(
    holds: Callable[[], Any], what: Callable[[], object] | str, timeout: float = PATIENCE
) -> Any:
    """Wait until `holds` is true; returns what it returned. `what` explains a failure."""
    deadline = time.monotonic() + timeout
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"in vain: {what() if callable(what) else what}")
        time.sleep(_POLL)
    return found


class Node(Server):
    """One role as a process."""

    def __init__(
        self, role: str, name: str, *flags: str, prefix: tuple[str, ...] = (), **environ: str
    ) -> None:
        """`prefix`: what runs the command, as `ip netns exec` does."""
        own = ("--role", role, "--node-name", name, "--log-format", "json")
        super().__init__(None, *own, *flags, **environ)
        self._command = [*prefix, *self._command]
        self.role = role
        self.name = name
        self.flags = flags
        self.killed = False
        self.expected = exit_codes.OK
        self.expected_errors = False
        """Lines of level error are part of the test."""

    # ------------------------------------------------------------------ looking

    def records(self) -> list[dict[str, Any]]:
        """The log so far; what is not JSON is a message of level `raw`."""
        return [_record(line) for line in tuple(self.lines)]

    def said(self, pattern: str, since: float = 0.0) -> float | None:
        """When a line that matches was logged, Unix time; None if not (yet)."""
        for record in self.records():
            if re.search(pattern, record["message"]):
                when = _unix(record.get("time"))
                if when >= since:
                    return when
        return None

    def wait_said(self, pattern: str, since: float = 0.0) -> float:
        """The same, waiting for it."""
        return float(eventually(lambda: self.said(pattern, since), lambda: self._unsaid(pattern)))

    def _unsaid(self, pattern: str) -> str:
        return f"{self.name} did not say {pattern!r}:\n" + "\n".join(self.lines)

    @property
    def probes(self) -> int:
        """The port of `/health` and `/metrics`."""
        return int(self.wait_for_line(r"probes (?:at http://\S+:|on port )(\d+)")[1])

    def health(self) -> tuple[int, Any]:
        """Status and content of `/health`."""
        return self.get("/health", self.probes)

    def wait_ready(self) -> None:
        """Until its probes call it healthy."""

        def ready() -> bool:
            assert self.process.poll() is None, f"{self.name} has ended:\n" + "\n".join(self.lines)
            return self.health()[0] == 200

        eventually(ready, lambda: (self.name, self.health(), self.lines))

    def count(self, metric: str) -> float:
        """The sum of its samples with this name and these labels. Errors: `LookupError` as long as
        there is none."""
        _, page = self.get("/metrics", self.probes)
        found = find(page, metric)
        if found is None:
            raise LookupError(f"{self.name} has no {metric}")
        return found

    def wait_count(self, metric: str, value: float, timeout: float = PATIENCE) -> None:
        """Until a sample is there and has this value."""

        def reached() -> bool:
            with contextlib.suppress(LookupError):
                return self.count(metric) == value
            return False

        eventually(reached, f"{self.name}: {metric}", timeout)

    def rss(self) -> int:
        """Resident bytes of the process itself."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    # ------------------------------------------------------------------ acting

    def kill(self) -> float:
        """As `kill -9`; returns when, Unix time. Its engine goes down with it."""
        self._remember_children()
        self.killed = True
        when = time.time()
        self.process.kill()
        self.process.wait(PATIENCE)
        return when

    def pause(self) -> float:
        """As a process that is stopped, its engine included; returns when."""
        when = time.time()
        for process in self.processes():
            process.suspend()
        return when

    def resume(self) -> float:
        """See `pause`."""
        when = time.time()
        for process in self.processes():
            process.resume()
        return when

    def processes(self) -> list[psutil.Process]:
        """This node and all below it."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]


class Cluster:
    """Use with `with`; nodes are started by role and get the names of their roles, numbered."""

    def __init__(self, home: Path, *flags: str) -> None:
        """`home` takes the cluster's key; `flags` are for every node."""
        self.home = home
        self.flags = flags
        self.address = f"127.0.0.1:{free_port()}"
        """Where the first router listens and everybody joins."""
        self.probes = True
        """Nodes have a second listener, which `wait_ready` and counts need."""
        self.nodes: list[Node] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(looking=kind is None)

    # ------------------------------------------------------------------ starting

    def router(self, *flags: str, name: str = "", **environ: str) -> Node:
        """One of those that run is where all join."""
        there = ("--listen", self.address)
        taken = any(
            there == n.flags[-len(there) :] and n.process.poll() is None for n in self.nodes
        )
        where = ("--listen", "127.0.0.1:0", "--join", self.address) if taken else there
        return self.start("router", name, *flags, *where, **environ)

    def worker(
        self,
        *flags: str,
        name: str = "",
        rate: float = 50.0,
        model: Path | str = "",
        **environ: str,
    ) -> Node:
        """With an engine that gives `rate` tokens a second to each stream."""
        engine = ("--engine", "instant", "--engine-option", f"tokens_per_second={rate}")
        what = ("--model", str(model)) if model else ()
        return self.start("worker", name, "--join", self.address, *engine, *what, *flags, **environ)

    def frontend(self, *flags: str, name: str = "", **environ: str) -> Node:
        """On any port."""
        return self.start("frontend", name, "--join", self.address, *flags, **environ)

    def start(self, role: str, name: str, *flags: str, **environ: str) -> Node:
        """Any role with any flags; the node is not waited for."""
        name = name or f"{role}-{1 + sum(n.role == role for n in self.nodes)}"
        own = {"HOME": str(self.home), "XDG_CONFIG_HOME": str(self.home / "config")}
        probes = ("--metrics-port", "0") if self.probes else ()
        all_flags = (*probes, *self.flags, *flags)
        return self.add(self.make(role, name, *all_flags, **(own | environ)))

    def make(self, role: str, name: str, *flags: str, **environ: str) -> Node:
        """A node that has not started: what another kind of cluster does otherwise."""
        return Node(role, name, *flags, prefix=(), **environ)

    def add(self, node: Node) -> Node:
        """Start a node that was made elsewhere; it ends with this cluster."""
        node.__enter__()
        self.nodes.append(node)
        self._stack.push(lambda *exception: node.__exit__(*exception))
        return node

    def serving(self, *, workers: int = 1, rate: float = 50.0) -> tuple[Node, list[Node], Node]:
        """A router, workers of one model and a frontend, ready."""
        router = self.router()
        found = [self.worker(rate=rate) for _ in range(workers)]
        frontend = self.frontend()
        self.wait_ready()
        return router, found, frontend

    def wait_ready(self) -> None:
        """Until every node that runs says of itself that it can work."""
        for node in self.nodes:
            if not node.killed:
                node.wait_ready()

    # ------------------------------------------------------------------ ending

    def close(self, *, looking: bool = True) -> None:
        """End every node. `looking`: and look at how it ended; else the test has failed anyway."""
        for node in self.nodes:
            if node.process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    node.resume()
                node._remember_children()
                node.process.send_signal(signal.SIGTERM)
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(PATIENCE)
        self._stack.close()
        if looking:
            for node in self.nodes:
                look_at(node)


def look_at(node: Node) -> None:
    """A node that has ended: as it should, and with nothing in its log that nobody foresaw."""
    log = f"log of {node.name}:\n" + "\n".join(node.lines)
    status = node.process.returncode
    assert status == (-signal.SIGKILL if node.killed else node.expected), f"{status}, {log}"
    assert "Traceback" not in log, log
    wrong = [r for r in node.records() if r.get("level") in ("error", "critical", "raw")]
    assert node.expected_errors or not wrong, f"{wrong}, {log}"


@contextlib.contextmanager
def holding(cluster: Cluster, *nodes: Node) -> Iterator[None]:
    """Nodes stand still inside."""
    for node in nodes:
        node.pause()
    try:
        yield
    finally:
        for node in nodes:
            node.resume()


def _record(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "message" not in found:
        return {"level": "raw", "message": line}
    return found


def _unix(time: str | None) -> float:
    return datetime.datetime.fromisoformat(time).timestamp() if time else 0.0
