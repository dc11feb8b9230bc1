"""Workers of different engines in one cluster: each serves its model behind one frontend, and one
name is served by one engine."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.cluster import Cluster, eventually
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)


def ask(url: str, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


@pytest.mark.long(one_in=3)
def test_engines_serve_their_models_side_by_side_and_never_one_name(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.router()
        started = (("small", "torch"), ("fast", "instant"), ("timed", "sim"))
        for name, engine in started:
            flags = ("--engine", engine, "--served-model-name", name)
            cluster.start("worker", f"w-{name}", "--join", cluster.address, *flags)
        front = cluster.frontend()
        cluster.wait_ready()
        eventually(
            lambda: len(front.get("/v1/models")[1]["data"]) == 3, "all three models are served"
        )
        for name, _ in started:
            answer = ask(front.url, name)
            assert answer["model"] == name
            assert answer["usage"]["pdserve"]["worker"] == f"w-{name}"
        late = ("--engine", "sim", "--served-model-name", "small")
        cluster.start("worker", "intruder", "--join", cluster.address, *late)
        words = "its 'small' is computed by the engine sim, and the one served before it by torch"
        front.wait_said(words)
        assert ask(front.url, "small")["usage"]["pdserve"]["worker"] == "w-small"
