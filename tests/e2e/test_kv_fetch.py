"""Workers that use what others have cached: fetched for a request, warmed up, and inherited."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.readme import wait_sound
from tests.e2e.server import PATIENCE, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.long(whole_file=True), pytest.mark.timeout(240)]

SIM = ("--engine", "sim", "--engine-option", "content=on", "--engine-option", "blocks=400")
WORKER = ("--role=worker", *SIM, "--kv-fetch", "always")


class Workers:
    """A router, two workers, a frontend."""

    def __init__(self, seed: str, router: Server, left: Server, right: Server, front: Server):
        self.seed, self.router, self.left, self.right = seed, router, left, right
        self.front = front

    def say(self, text: str, worker: str) -> tuple[str, dict[str, str]]:
        """What a worker answers, and the headers about its cache."""
        body = {"temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": text}]}
        request = urllib.request.Request(
            f"{self.front.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-pdserve-worker": worker},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            headers = {name.lower(): value for name, value in reply.headers.items()}
            answer: dict[str, Any] = json.load(reply)
        return answer["choices"][0]["message"]["content"], headers

    def known(self, text: str, worker: str = "left") -> str:
        """Have a worker answer; returns once a router knows what it has cached."""
        answer, _ = self.say(text, worker)
        end = time.monotonic() + PATIENCE
        body = {"messages": [{"role": "user", "content": text}]}
        while True:
            found = self.front.post("/route", body)["candidates"]
            if any(one["worker"] == worker and one["overlap_tokens"] for one in found):
                return answer
            assert time.monotonic() < end, found
            time.sleep(0.05)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pdserve", *arguments, "--join", self.seed],
            capture_output=True,
            text=True,
            env=self.router.environ,
            timeout=PATIENCE,
            check=False,
        )


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    home = {"XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("home"))}
    with Server(None, "--role=router", "--listen", "127.0.0.1:0", **home) as router:
        seed = router.wait_for_line(r"router \S+ at (\S+)")[1]
        with (
            Server(None, *WORKER, "--node-name", "left", "--join", seed, **home) as left,
            Server(None, *WORKER, "--node-name", "right", "--join", seed, **home) as right,
            Server(None, "--role=frontend", "--join", seed, **home) as front,
        ):
            for one in (left, right, front):
                one.wait_for_line("ready: ")
            wait_sound(front, 2)
            yield Workers(seed, router, left, right, front)


def cached(headers: dict[str, str]) -> int:
    return int(headers["x-pdserve-cached-tokens"])


def test_a_prefix_is_fetched_from_the_worker_that_has_it(workers: Workers) -> None:
    text = "one " * 400
    answer = workers.known(text)
    again, headers = workers.say(text, "right")
    assert again == answer
    assert cached(headers) > 300
    assert f"peer={cached(headers)}" in headers["x-pdserve-cached"]
    assert "node=left" in headers["x-pdserve-cached"]


def test_a_worker_is_warmed_from_another(workers: Workers) -> None:
    text = "two " * 400
    answer = workers.known(text)
    done = workers.command("tier", "warm", "--from", "left")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("right: pulled ")
    again, headers = workers.say(text, "right")
    assert again == answer
    assert cached(headers) > 300
    assert "peer" not in headers.get("x-pdserve-cached", "")


def test_a_worker_that_leaves_hands_its_blocks_on(workers: Workers) -> None:
    text = "three " * 400
    answer = workers.known(text)
    assert workers.left.end() == 0
    workers.left.wait_for_line(r"\d+ cached blocks moved to 1 other workers")
    again, headers = workers.say(text, "right")
    assert again == answer
    assert cached(headers) > 300


def test_an_owner_that_hangs_and_is_killed_costs_a_computation(workers: Workers) -> None:
    text = "four " * 400
    home = {"XDG_CONFIG_HOME": workers.router.environ["XDG_CONFIG_HOME"]}
    flags = (*WORKER, "--node-name", "third", "--join", workers.seed)
    with Server(None, *flags, **home) as third:
        third.wait_for_line("ready: ")
        wait_sound(workers.front, 2)
        answer = workers.known(text, "third")
        third.core().suspend()
        again, headers = workers.say(text, "right")
        third.end(signal.SIGKILL)
    assert again == answer
    assert cached(headers) == 0
    again, headers = workers.say(text, "right")
    assert again == answer
    assert cached(headers) > 300
