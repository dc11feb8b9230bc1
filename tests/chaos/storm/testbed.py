"""Where a storm takes place: hosts, ways, a disk, and the cluster's nodes on them.

As root, with `ip` and `nft`, every node has a network namespace of its own, with rules between
them, and logs go to a small disk that can be filled. Elsewhere all is on 127.0.0.1, and `missing`
says what is left out. Some nodes are known to others by a proxy's address only.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from pdserve.worker.config import WorkerConfig
from tests.chaos.cluster import free_port
from tests.chaos.netns import Host, Network, network
from tests.chaos.proxy import Proxy
from tests.chaos.storm import schedule
from tests.chaos.storm.nodes import Node

if TYPE_CHECKING:
    from types import TracebackType

    from tests.chaos.storm.schedule import Part

Engine = Literal["sim", "torch"]

REQUEST_TIMEOUT, HURRIED_TIMEOUT = 120.0, 3.0
"""Seconds that a request may take at a frontend: longer than the storm waits for any, so that one
which is lost hangs, and does not end by a deadline; at the one for clients in a hurry."""
DISK = 192 << 20
"""Bytes of the disk that is filled."""
CLUSTER_PORT, HTTP_PORT, PROBES_PORT = 7700, 8000, 9000


@dataclass(frozen=True)
class Place:
    """One node of the plan."""

    name: str
    part: Part
    flags: tuple[str, ...] = ()
    proxied: bool = False
    hurried: bool = False


def plan(engine: Engine) -> list[Place]:
    """Two routers, two frontends and one in a hurry, three workers that take requests, of which two
    have long prompts computed by a fourth."""
    decode = ("--mode", "decode", "--disagg-min-tokens", "128")
    if engine == "torch":
        decode = ("--mode", "decode", "--disagg-min-tokens", "64")
    timeout = ("--request-timeout", f"{REQUEST_TIMEOUT}s")
    return [
        Place("router-1", "router"),
        Place("router-2", "router", proxied=True),
        Place("prefill-1", "prefill", ("--mode", "prefill")),
        Place("decode-1", "worker", decode),
        Place("decode-2", "worker", decode),
        Place("whole-1", "worker", proxied=True),
        Place("front-1", "frontend", timeout),
        Place("front-2", "frontend", timeout),
        Place("hurried", "frontend", ("--request-timeout", f"{HURRIED_TIMEOUT}s"), hurried=True),
    ]


STALL_TIMEOUT = 3.0
"""Seconds of a worker's `--stall-timeout`: shorter than the default, so that more stalls show."""
VERIFY = "all"
"""`--verify-kv` of workers with the sim engine: more than the default compares."""
PACE = {"base": 0.08, "sequence": 0.0, "weights": 0.0, "token": 2e-5, "pair": 0.0, "kv": 0.0}
"""The sim engine's step times: twelve tokens a second for each stream at any load, and 17,000
prompt tokens a second, so that other workers soon recompute what a lost worker had."""


def engine_flags(engine: Engine, trouble: Path, timing: Path) -> tuple[str, ...]:
    """Engine flags of every worker."""
    stall = ("--stall-timeout", f"{STALL_TIMEOUT:g}s")
    if engine == "torch":
        own = ("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB")
        return ("--engine", "torch", *own, "--max-sequences", "32", *stall)
    options = {"content": "on", "blocks": "4000", "timing": timing, "trouble": trouble}
    many = [f for name, value in options.items() for f in ("--engine-option", f"{name}={value}")]
    return ("--engine", "sim", *many, "--verify-kv", VERIFY, "--max-sequences", "512", *stall)


def settings(engine: str) -> str:
    """Which of the workers' settings are not the defaults, in words; see `engine_flags`."""
    usual = WorkerConfig()
    stall = f"`--stall-timeout {STALL_TIMEOUT:g}s` (default {usual.stall_timeout:g} s)"
    verify = f" and `--verify-kv {VERIFY}` (default {usual.verify_kv})" if engine == "sim" else ""
    return f"Workers have {stall}{verify}."


class Testbed:
    """Use with `with`."""

    def __init__(self, engine: Engine, seed: int | str, *, plain: bool = False) -> None:
        """`plain`: without hosts and disk, for measurements."""
        self.engine: Engine = engine
        self._plain = plain
        self.seed = seed
        self.nodes: dict[str, Node] = {}
        self.hosts: dict[str, Host] = {}
        self.ways: dict[str, Proxy] = {}
        self.places = {place.name: place for place in plan(engine)}
        self.missing: list[str] = []
        """What cannot be had here, and why."""
        self.offers = {"proxy"} | ({"trouble"} if engine == "sim" else set())
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Testbed:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def roster(self) -> list[schedule.Node]:
        """All on whom faults may be drawn: not the frontend of those in a hurry."""
        return [
            schedule.Node(place.name, place.part, place.proxied)
            for place in self.places.values()
            if not place.hurried
        ]

    @property
    def frontends(self) -> list[Node]:
        return [
            self.nodes[place.name] for place in self.places.values() if place.part == "frontend"
        ]

    def trouble(self, name: str) -> Path:
        """The file by which a worker's engine is told to fail."""
        return self.home / f"{name}.trouble"

    def status(self) -> subprocess.CompletedProcess[str]:
        """What `pdserve status --json` says."""
        join = ",".join(self._addresses[name] for name in ("router-1", "router-2"))
        command = [shutil.which("pdserve", path=_BIN) or "pdserve", "status", "--json"]
        command += ["--join", join, "--cluster-key-file", str(self._keys), "--config", "none"]
        environ = os.environ | {"HOME": str(self.home)}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=environ
        )

    # ------------------------------------------------------------------ building

    def _build(self) -> None:
        self.home = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="storm-")))
        self._keys = self.home / "key"
        self._keys.write_text(secrets.token_hex(32) + "\n")
        self._keys.chmod(0o600)
        self._timing = self.home / "timing.json"
        self._timing.write_text(json.dumps({"roofline": PACE}))
        self.disk = self._disk()
        net = self._network()
        self._ports: dict[str, tuple[int, int, int]] = {}
        self._addresses: dict[str, str] = {}
        for place in self.places.values():
            self._settle(place, net)
        for place in self.places.values():
            self.nodes[place.name] = self._node(place)
        self._stack.callback(self._end_all)

    def _disk(self) -> Path:
        disk = self.home / "disk"
        disk.mkdir()
        if self._plain:
            return disk
        try:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "storm", str(disk)]
            done = subprocess.run(mount, capture_output=True, text=True, check=False)
            why = done.stderr.strip()
        except OSError as error:
            why = str(error)
        if why:
            self.missing.append(f"no disk is filled: {why}")
        else:
            self.offers.add("disk")
            self._stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
        return disk

    def _network(self) -> Network | None:
        if self._plain:
            return None
        try:
            net = self._stack.enter_context(network())
        except pytest.skip.Exception as why:
            self.missing.append(f"no network between hosts is disturbed: {why}")
            return None
        self.offers.add("network")
        return net

    def _settle(self, place: Place, net: Network | None) -> None:
        """Give it a host, ports, and an address under which others know it."""
        if net is None:
            address, ports = "127.0.0.1", (free_port(), free_port(), free_port())
            ours = address
        else:
            host = self.hosts[place.name] = net.host()
            address, ports = host.address, (CLUSTER_PORT, HTTP_PORT, PROBES_PORT)
            ours = address.rpartition(".")[0] + ".1"
        self._ports[place.name] = ports
        self._addresses[place.name] = own = f"{address}:{ports[0]}"
        if place.proxied and not self._plain:
            way = Proxy(random.Random(f"{self.seed} {place.name}").getrandbits(32), ours)
            way.target = own
            self.ways[place.name] = self._stack.enter_context(way)
            self._addresses[place.name] = way.address

    def _node(self, place: Place) -> Node:
        cluster, http, probes = self._ports[place.name]
        host = self.hosts.get(place.name)
        address = "127.0.0.1" if host is None else host.address
        join = ",".join(self._addresses[name] for name in ("router-1", "router-2"))
        flags = [*place.flags, "--listen", f"{address}:{cluster}", "--join", join]
        flags += ["--cluster-key-file", str(self._keys)]
        if place.name in self.ways:
            flags += ["--advertise", self._addresses[place.name]]
        if place.part in ("worker", "prefill"):
            flags += engine_flags(self.engine, self.trouble(place.name), self._timing)
        return Node(
            place.name,
            place.part,
            address,
            http,
            probes,
            flags,
            log=self.disk / f"{place.name}.log",
            home=self.home,
            prefix=() if host is None else host.prefix,
        )

    def _end_all(self) -> None:
        for node in self.nodes.values():
            for process in node.processes() if node.alive else ():
                with contextlib.suppress(Exception):
                    process.resume()
                    process.kill()
            if node.process is not None:
                node.process.wait()


_BIN = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
