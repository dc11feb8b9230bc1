"""A worker's process is killed in the middle of a stream: the client does not notice."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.readme import wait_sound
from tests.e2e.server import PATIENCE, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPLETION = {
    "model": "bundled",
    "prompt": "Tell me all that you know of pdserve, and of routers, please. ",
    "max_tokens": 150,
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 7,
    "frequency_penalty": 0.3,
    "n": 2,
}
GOVERNED = {
    "model": "bundled",
    "prompt": "Words: ",
    "max_tokens": 400,
    "temperature": 1.0,
    "seed": 8,
    "structured_outputs": {"regex": "([a-z]{1,7} ){60}[0-9]{3}"},
}


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, Server]]]:
    """A frontend, and workers by name."""
    home = {"XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("home"))}
    with Server(None, "--role=router", "--listen=127.0.0.1:0", **home) as router:
        join = "--join=" + router.wait_for_line(r"router \S+ at (\S+)")[1]
        worker = ("--role=worker", "--dtype=float32", "--threads=1", join)
        with (
            Server(None, *worker, "--node-name=left", **home) as left,
            Server(None, *worker, "--node-name=right", **home) as right,
            Server(None, "--role=frontend", join, **home) as front,
        ):
            for server in (left, right, front):
                server.wait_for_line("ready: ")
            wait_sound(front, 2)
            yield front, {"left": left, "right": right}


class Stream:
    """One streamed answer as it comes."""

    def __init__(self, front: Server, body: dict[str, Any]) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body | options).encode()
        self.answer = urllib.request.urlopen(f"{front.url}/v1/completions", data, PATIENCE)
        self.texts = ["", ""]
        self.worker = self.answer.headers["x-pdserve-worker"]
        self.usage: Any = None

    def read(self, chunks: int = 1_000_000) -> None:
        """Until the end, or so many chunks more."""
        while chunks and (line := self.answer.readline()):
            event = line.decode().removeprefix("data: ").strip()
            if not event or event == "[DONE]":
                continue
            chunk = json.loads(event)
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                self.texts[choice["index"]] += choice["text"]
            self.usage = chunk["usage"] or self.usage
            chunks -= 1


@pytest.mark.timeout(240)
def test_a_stream_outlives_its_worker(cluster: tuple[Server, dict[str, Server]]) -> None:
    front, workers = cluster
    calm = front.post("/v1/completions", COMPLETION)
    fitting = front.post("/v1/completions", GOVERNED)["choices"][0]["text"]
    assert re.fullmatch(GOVERNED["structured_outputs"]["regex"], fitting)  # type: ignore[index]
    stream = Stream(front, COMPLETION)
    assert stream.answer.headers["x-pdserve-migrations"] is None
    doomed = stream.worker
    governed = [Stream(front, GOVERNED)]
    while governed[-1].worker != doomed:
        assert len(governed) < 8, "all go to the other worker"
        governed.append(Stream(front, GOVERNED))
    for some in (stream, *governed):
        some.read(20)
    workers[doomed].end(signal.SIGKILL)
    for some in (stream, *governed):
        some.read()
    assert [some.texts[0] for some in governed] == [fitting] * len(governed)
    assert governed[-1].usage["pdserve"]["migrations"] == 1
    assert stream.texts == [choice["text"] for choice in calm["choices"]]
    told = stream.usage.pop("pdserve")
    expected = dict(calm["usage"])
    del expected["pdserve"]
    assert {k: v for k, v in stream.usage.items() if "details" not in k} == {
        k: v for k, v in expected.items() if "details" not in k
    }
    (survivor,) = workers.keys() - {doomed}
    assert (told["migrations"], told["worker"]) == (1, survivor)
    name = 'pdserve_migrations_total{outcome="completed",reason="worker_lost"}'
    moved = 1 + sum(some.worker == doomed for some in governed)
    assert front.metric(name) == moved
    assert front.metric("pdserve_migration_gap_seconds_count") == moved
