"""README's cluster that grows and shrinks, pasted into a shell: a planner, an agent, and workers
that come and go under load."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.e2e.readme import Places, blocks, free_port, need_shell, section
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="an agent reads /proc"),
]
(PASTED,) = blocks(section("A cluster that grows and shrinks"))


class Site:
    """The shell into which README's block is pasted, and all that it starts."""

    def __init__(self, home: Path) -> None:
        self.home, self.places = home, Places()
        self.places.ports |= {"7700": free_port(), "8000": free_port()}
        self.seed = f"127.0.0.1:{self.places.ports['7700']}"
        self.said = home / "said.txt"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
        self.environ = clean | {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home),
            "XDG_RUNTIME_DIR": str(home),
            "XDG_STATE_HOME": str(home / "state"),
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "PDSERVE_CONFIG": "none",
        }
        command = home / "bin" / "pdserve"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m pdserve "$@"\n')
        command.chmod(0o755)

    @property
    def block(self) -> str:
        """README's block with other ports than the usual ones, which some commands have to name."""
        text = self.places.fill(PASTED)
        url = f"--url http://127.0.0.1:{self.places.ports['8000']}"
        text = text.replace("--role=router", f"--role=router --listen {self.seed}")
        text = text.replace("pdserve bench", f"pdserve bench {url}")
        return text.replace("pdserve planner", f"pdserve planner --join {self.seed}")

    def paste(self) -> subprocess.Popen[bytes]:
        with self.said.open("wb") as file:
            return subprocess.Popen(
                ["bash", "-c", self.block],
                cwd=ROOT,
                env=self.environ,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pdserve", *arguments, "--join", self.seed],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""

    def workers(self) -> int:
        """Number of ready workers by the planner's plan; 0: there is none yet."""
        reports = json.loads(self.run("planner", "--json") or "{}").values()
        plans: list[Any] = [one["plans"][0] for one in reports if one and one["plans"]]
        return sum(plans[0]["present"].values()) if plans else 0

    def until(self, holds: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.said.read_text()
            time.sleep(0.3)

    def end_workers(self) -> None:
        """As `pkill -f -- --change=` does; only this cluster's."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if any(w.startswith("--change=") for w in words) and any(self.seed in w for w in words):
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    need_shell()
    made = Site(tmp_path_factory.mktemp("home"))
    shell = made.paste()
    try:
        made.until(lambda: made.workers() == 3, 120.0)
        assert shell.wait(PATIENCE) == 0, made.said.read_text()
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
        _ = shell.wait(PATIENCE)
        made.end_workers()


def test_readmes_cluster_grows_and_shrinks_without_a_lost_request(site: Site) -> None:
    said = site.said.read_text()
    assert re.search(r"\b(\d+) of \1 requests answered", said)
    assert "as it is, " in said.partition("requests answered")[2], "what the planner makes of it"
    site.until(lambda: site.workers() == 1, 120.0)
    assert "acts" in site.run("planner")
    assert "plan 1 of term" in site.run("planner", "explain", "1")
    assert "Traceback" not in site.said.read_text()


def test_what_an_operator_pins_is_kept_until_it_is_taken_back(site: Site) -> None:
    site.until(lambda: site.workers() >= 1, 60.0)
    assert "pinned to 2 aggregated" in site.run("planner", "pin", "bundled", "aggregated=2")
    site.until(lambda: site.workers() == 2, 60.0)
    assert "nothing is pinned" in site.run("planner", "unpin", "bundled")
    site.until(lambda: site.workers() == 1, 120.0)
