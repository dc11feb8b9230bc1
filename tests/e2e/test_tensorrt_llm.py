"""The TensorRT-LLM engine over its fake in real processes: answers, and prompts handed over.

The fake stands for the package only; worker, router and frontend are the real ones, so this proves
that TensorRT-LLM's own way of moving KV fits into pdserve's attempts, leases and deadlines.
"""

from __future__ import annotations

import json
import urllib.request
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.cluster import Cluster, eventually
from tests.e2e.server import PATIENCE
from tests.engines.tensorrt_llm.fake_engine import ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.router()
        flags = ("--join", cluster.address, "--engine", ENGINE, "--max-sequences", "8")
        cluster.start("worker", "prefill", "--mode", "prefill", *flags)
        cluster.start("worker", "decode", "--mode", "decode", "--disagg", "always", *flags)
        cluster.start("worker", "alone", *flags)
        frontend = cluster.frontend()
        cluster.wait_ready()
        for name in ("decode", "alone"):
            eventually(partial(reached, frontend.url, name), f"{name} is not reached")
        yield frontend.url


def ask(url: str, worker: str, **fields: Any) -> tuple[str, Any]:
    """How the prompt was prefilled, and the answer."""
    body = {"prompt": "one two three", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | fields).encode(),
        {"x-pdserve-worker": worker, "Connection": "close"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return response.headers.get("x-pdserve-prefill", ""), json.loads(response.read())


def reached(url: str, worker: str) -> bool:
    try:
        ask(url, worker)
    except OSError:
        return False
    return True


def test_a_prompt_is_handed_over_and_the_answer_is_the_same(cluster):
    eventually(lambda: ask(cluster, "decode")[0].startswith("remote"), "nothing is handed over")
    for fields in ({}, {"max_tokens": 1}, {"logprobs": 2}, {"prompt": "four five " * 40}):
        there, answer = ask(cluster, "decode", **fields)
        _, alone = ask(cluster, "alone", **fields)
        assert there.startswith("remote")
        assert answer["choices"] == alone["choices"]
        assert answer["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]


def test_what_cannot_be_handed_over_is_computed_at_the_decode_worker(cluster):
    _, answer = ask(cluster, "decode", n=3, temperature=1.0, seed=5)
    assert len(answer["choices"]) == 3


def test_what_the_release_cannot_do_is_refused_by_name(cluster):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(cluster, "alone", presence_penalty=1.0)
    error = json.loads(caught.value.read())["error"]
    assert caught.value.code == 400
    assert error["param"] == "presence_penalty"
