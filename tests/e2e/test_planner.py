"""README's cluster that grows and shrinks: a planner, an agent, and workers that come and go."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.e2e.readme import Places, blocks, section
from tests.e2e.server import PATIENCE, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="an agent reads /proc"),
]
COMMANDS = blocks(section("A cluster that grows and shrinks"))


class Site:
    """The four processes of README, and the workers that they start."""

    front: Server
    planner: Server

    def __init__(self, home: Path) -> None:
        self.home, self.places = home, Places()
        self.places.ports["7700"] = self.places.ports["9001"]
        self.seed = f"127.0.0.1:{self.places.ports['7700']}"
        self.environ = {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home),
            "XDG_RUNTIME_DIR": str(home),
            "XDG_STATE_HOME": str(home / "state"),
        }

    def words(self, command: str) -> list[str]:
        """A command's flags with the ports of this test; `Server` has its own for HTTP."""
        text = command.replace("7700", str(self.places.ports["7700"]))
        text = text.replace(" --port 8000", "").replace("examples/", f"{ROOT}/examples/")
        name, *words = shlex.split(text)
        assert name == "pdserve"
        return words

    def start(self, command: str, *more: str) -> Server:
        return Server(None, *self.words(command), *more, **self.environ)

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

    def plan(self) -> dict[str, Any]:
        (report,) = json.loads(self.run("planner", "--json")).values()
        return report["plans"][0] if report and report["plans"] else {"present": {}}

    def workers(self) -> int:
        return sum(self.plan()["present"].values())

    def until(self, holds: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.run("planner")
            time.sleep(0.3)

    def end_workers(self) -> None:
        """Workers outlive their agent."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if any(w.startswith("--change=") for w in words) and any(self.seed in w for w in words):
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("home"))
    router, frontend, agent, planner = COMMANDS[0].splitlines()
    with contextlib.ExitStack() as ends:
        where = ("--listen", "127.0.0.1:0")
        first = ends.enter_context(made.start(router, "--listen", made.seed))
        first.wait_for_line(r"router \S+ at ")
        made.front = ends.enter_context(made.start(frontend, *where))
        ends.enter_context(made.start(agent, *where))
        ends.callback(made.end_workers)
        made.planner = ends.enter_context(made.start(planner, *where))
        made.planner.wait_for_line(r"planner \S+ at ")
        yield made


class Load:
    """Requests at a rate, whatever becomes of those before; each has a prompt of its own."""

    def __init__(self, front: Server, rate: float) -> None:
        self.front, self.rate = front, rate
        self.answers: dict[str, str] = {}
        self.failures: list[object] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._clock = threading.Thread(target=self._run)
        self._clock.start()

    def _run(self) -> None:
        while not self._over.wait(1 / self.rate):
            prompt = f"{len(self._threads)} " + "the sea is deep " * 40
            thread = threading.Thread(target=self._ask, args=(prompt,))
            self._threads.append(thread)
            thread.start()

    def _ask(self, prompt: str) -> None:
        try:
            self.answers[prompt] = answer_of(self.front, prompt)
        except Exception as error:
            self.failures.append(error)

    def end(self) -> None:
        self._over.set()
        self._clock.join()
        for thread in self._threads:
            thread.join(PATIENCE)


def answer_of(front: Server, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    return front.post("/v1/completions", body)["choices"][0]["text"]


def test_readmes_cluster_grows_and_shrinks_without_a_lost_request(
    site: Site,
) -> None:
    site.until(lambda: site.workers() == 1, 60.0)
    load = Load(site.front, rate=18.0)
    try:
        site.until(lambda: site.workers() == 3, 90.0)
    finally:
        load.end()
    assert load.failures == []
    site.until(lambda: site.workers() == 1, 120.0)
    sample = list(load.answers.items())[:: max(1, len(load.answers) // 20)]
    assert [(p, answer_of(site.front, p)) for p, _ in sample] == sample
    shown = site.run("planner")
    assert "acts" in shown
    assert "binds" in shown
    explained = site.run("planner", "explain", "1")
    assert "plan 1 of term" in explained
    assert not [line for line in site.planner.lines if "Traceback" in line]


def test_what_an_operator_pins_is_kept_until_it_is_taken_back(site: Site) -> None:
    site.until(lambda: site.workers() >= 1, 60.0)
    assert "pinned to 2 aggregated" in site.run("planner", "pin", "bundled", "aggregated=2")
    site.until(lambda: site.workers() == 2, 60.0)
    assert "nothing is pinned" in site.run("planner", "unpin", "bundled")
    site.until(lambda: site.workers() == 1, 120.0)


def test_the_load_of_readme_is_a_command(site: Site) -> None:
    bench, show = COMMANDS[1].splitlines()
    assert show == "pdserve planner"
    assert shlex.split(bench)[:2] == ["pdserve", "bench"]
