"""A planner whose workers are jobs of a real Slurm: they join, serve, drain and end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.readme import free_port
from tests.e2e.server import PATIENCE, Server
from tests.support.slurm import Slurm, why_not

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

FILE = """\
[planner]
tick = "1s"
slow-tick = "3s"
start-prior = "5s"
drain-prior = "2s"
hold = "1s"

[[planner.pool]]
model = "bundled"
slo-ttft = "1s"
kinds = ["cpu"]
min = 1
max = 3

[planner.actuator]
type = "slurm"
directory = "{directory}"
program = "{program}"
worker = ["--engine=instant", "--listen=127.0.0.1:0"]

[planner.actuator.kinds.cpu]
slots = 3
flags = ["--time=10", "--cpus-per-task=1"]
"""


class Site:
    """A router, a frontend, and a planner with Slurm; no worker of its own."""

    front: Server
    planner: Server

    def __init__(self, slurm: Slurm, program: Path, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.seed = f"127.0.0.1:{free_port()}"
        home = str(folder)
        self.environ = {name: home for name in ("HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR")}
        self.environ |= {"SLURM_CONF": slurm.environ["SLURM_CONF"]}
        self.environ |= {"PATH": slurm.environ["PATH"], "XDG_STATE_HOME": home}
        self.file = folder / "planner.toml"
        self.file.write_text(FILE.format(directory=folder, program=program))

    def server(self, *flags: str) -> Server:
        return Server(None, *flags, **self.environ)

    def planner_server(self) -> Server:
        flags = ("--planner=act", f"--planner-file={self.file}", "--listen=127.0.0.1:0")
        return self.server("--role=planner", *flags, f"--join={self.seed}")

    @contextlib.contextmanager
    def open(self) -> Iterator[Site]:
        with contextlib.ExitStack() as ends:
            ends.callback(self.end_jobs)
            router = ends.enter_context(self.server("--role=router", f"--listen={self.seed}"))
            router.wait_for_line(r"router \S+ at ")
            where = (f"--join={self.seed}", "--listen=127.0.0.1:0")
            self.front = ends.enter_context(self.server("--role=frontend", *where))
            self.planner = ends.enter_context(self.planner_server())
            self.planner.wait_for_line(r"planner \S+ at ")
            yield self

    def end_jobs(self) -> None:
        ids = [job for job, state in self.jobs().values() if state in ("PENDING", "RUNNING")]
        if ids:
            self.slurm.run("scancel", "--signal=KILL", "--full", *ids)
            self.slurm.run("scancel", *ids)

    # ------------------------------------------------------------------ looking

    def run(self, *arguments: str) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
        done = subprocess.run(
            [sys.executable, "-m", "pdserve", *arguments, "--join", self.seed],
            env=clean | self.environ | {"PDSERVE_CONFIG": "none"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, (arguments, done)
        return done.stdout

    def jobs(self) -> dict[str, tuple[str, str]]:
        """Id and state by change, for all jobs of this planner that Slurm remembers. A change has
        one job that runs at most; a second one was withdrawn."""
        shown = self.slurm.run("squeue", "-h", "--states=all", "--format=%i|%T|%k").stdout
        found: dict[str, tuple[str, str]] = {}
        for line in shown.splitlines():
            job, state, comment = line.split("|", 2)
            change = comment.split(":")[2] if comment.startswith("pdserve:") else ""
            if found.get(change, ("", ""))[1] == "RUNNING":
                assert state != "RUNNING", shown
            elif change and (self.folder / f"pdserve-{change}.log").exists():
                found[change] = (job, state)
        return found

    def running(self) -> list[str]:
        return sorted(change for change, (_, state) in self.jobs().items() if state == "RUNNING")

    def serving(self) -> int:
        (report,) = json.loads(self.run("planner", "--json")).values()
        plans = report["plans"] if report else []
        return sum(plans[0]["present"].values()) if plans else 0

    def until(self, holds: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
        end = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < end, f"never {what}:\n" + "\n".join(self.planner.lines[-30:])
            time.sleep(0.3)
        return found

    def answer(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        return str(self.front.post("/v1/completions", body)["choices"][0]["text"])


@pytest.fixture
def site(slurm: Slurm, program: Path, tmp_path: Path) -> Iterator[Site]:
    with Site(slurm, program, tmp_path).open() as site:
        yield site


def test_a_worker_is_a_job_from_its_start_to_its_end(site: Site) -> None:
    """Started by `sbatch`, joined with its change, serving, drained, gone by itself."""
    site.until(lambda: site.serving() == 1, "a first worker")
    (first,) = site.running()
    assert site.answer("the sea")
    site.planner.wait_for_line("start cpu as aggregated after .*: done")
    site.run("planner", "pin", "bundled", "aggregated=2")
    site.until(lambda: site.serving() == 2, "a second worker")
    (second,) = set(site.running()) - {first}
    site.run("planner", "pin", "bundled", "aggregated=1")
    site.until(lambda: len(site.running()) == 1, "one job less")
    ended = first if site.running() == [second] else second
    assert site.jobs()[ended][1] == "COMPLETED", "a drained worker ends by itself, with status 0"
    assert site.answer("the sea")
    log = (site.folder / f"pdserve-{ended}.log").read_text()
    assert "runtime.orders.drain: drained" in log
    assert "Traceback" not in log
    assert len(site.jobs()) == 2


@pytest.fixture
def own_slurm(tmp_path: Path) -> Iterator[Slurm]:
    """One whose controller may be stopped: all that a test starts has to end with it."""
    (tmp_path / "slurm").mkdir()
    with Slurm(tmp_path / "slurm", cpus=4, kill_wait=2) as slurm:
        yield slurm


@pytest.mark.long(one_in=5)
def test_a_controller_that_is_away_starts_nothing_twice(
    own_slurm: Slurm, program: Path, tmp_path: Path, long: bool
) -> None:
    """It goes while a start is wanted, the planner dies meanwhile, and it comes back."""
    away = 60.0 if long else 8.0
    with Site(own_slurm, program, tmp_path).open() as site:
        site.until(lambda: site.serving() == 1, "a first worker")
        site.run("planner", "pin", "bundled", "aggregated=2")
        own_slurm.stop_controller()
        try:
            site.until(lambda: "slurm: squeue" in site.run("status"), "told as degraded")
            assert site.answer("the sea")
            site.planner.end(signal.SIGKILL)
            with site.planner_server() as site.planner:
                site.planner.wait_for_line(r"planner \S+ at ")
                site.run("planner", "pin", "bundled", "aggregated=2")
                time.sleep(away)
                assert "slurm: squeue" in site.run("status")
                assert site.answer("the sea")
                own_slurm.start_controller()
                site.until(lambda: site.serving() == 2, "a second worker")
                time.sleep(away / 4)
                assert sorted(state for _, state in site.jobs().values()) == ["RUNNING"] * 2
                assert "slurm: squeue" not in site.run("status")
        finally:
            if own_slurm.controller_is_away:
                own_slurm.start_controller()
