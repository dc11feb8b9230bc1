"""Prefill and decode workers as real processes, whose KV goes by RDMA: all of a worker but a model.

The sim engine's tokens come from what is in its blocks, so a byte that did not arrive, or arrived
elsewhere, is another answer. In a virtual machine it takes minutes: it is of the long tests.
"""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.testing.scripted import reference_tokens
from tests.chaos import cluster as clusters
from tests.chaos.cluster import Cluster, Node, eventually
from tests.e2e import server
from tests.e2e.model import write_model
from tests.engine.test_handoff_between_engines import pair, request, spec
from tests.engine.test_handoff_between_engines import settled as engine_settled
from tests.rdma.conftest import DEVICES, sent
from tests.support.metrics_page import find

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE = 400.0
"""Programs start ten times slower there, eight of them at once."""
BLOCK = 16
KV_HEADS = 4
LENGTHS = (1, BLOCK, 5 * BLOCK + 3, 200)


def packets() -> int:
    return sum(map(sent, DEVICES))


async def test_engines_hand_over_by_rdma() -> None:
    before = packets()
    async with pair(spec("rdma"), spec("rdma")) as both:
        wanted = request()
        remote, _ = await both.hand_over(wanted)
        assert remote.ledger.tokens[0] == reference_tokens(wanted)
        await engine_settled(both.d, lambda stats: stats.received_tokens)
        assert both.d.stats().received_tokens == len(wanted.prompt)
    assert packets() - before >= 11


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", PATIENCE)
    monkeypatch.setattr(clusters, "PATIENCE", PATIENCE)


@pytest.fixture
def cluster(patient: None, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        yield made


def start(
    cluster: Cluster, model: Path, backend: str, ranks: tuple[int, int]
) -> tuple[Node, Node, Node]:
    """A frontend, a decode and a prefill worker, and one that does both by itself. `ranks`: of the
    prefill and of the decode worker."""
    cluster.router()
    engine: tuple[str, ...] = ("--engine", "sim", "--engine-option", "content=on")
    engine += ("--engine-option", f"kv_heads={KV_HEADS}")
    engine += ("--model", str(model), "--served-model-name", "m", "--block-size", str(BLOCK))
    engine += ("--kv-memory", "16MiB", "--max-batch-tokens", "64", "--max-sequences", "8")
    engine += ("--verify-kv", "all", "--join", cluster.address)
    tp = [("--tp", str(size)) for size in ranks]
    prefill = cluster.start(
        "worker", "p", *engine, "--mode", "prefill", *tp[0], "--transfer", backend
    )
    always = ("--disagg", "always", "--transfer", backend)
    decode = cluster.start("worker", "d", *engine, "--mode", "decode", *tp[1], *always)
    cluster.start("worker", "alone", *engine)
    frontend = cluster.frontend()
    for node in cluster.nodes:
        node.wait_for_line("probes at http:", PATIENCE)
        eventually(partial(healthy, node), node.name, PATIENCE)
    return frontend, decode, prefill


def healthy(node: Node) -> bool:
    return bool(node.health()[0] == 200)


def ask(frontend: Node, worker: str, prompt: list[int]) -> tuple[str, str]:
    """What one worker answers, and where its prompt was computed."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    asked = urllib.request.Request(
        frontend.url + "/v1/completions",
        json.dumps(body).encode(),
        {"x-pdserve-worker": worker, "Connection": "close", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=PATIENCE) as response:
        answer: Any = json.loads(response.read())
        where = response.headers.get("x-pdserve-prefill", "")
    return answer["choices"][0]["text"], where


def tried(frontend: Node, worker: str) -> str:
    """Where its prompt was computed; empty: it is not reached yet."""
    try:
        return ask(frontend, worker, [7, 8, 9])[1] or "here"
    except urllib.error.HTTPError as error:
        error.close()
        return ""


def received(node: Node, backend: str) -> float:
    _, page = node.get("/metrics", node.probes)
    name = f'pdserve_transfer_bytes_total{{backend="{backend}",direction="received"}}'
    return find(page, name) or 0.0


def received_more(node: Node, backend: str, before: float) -> bool:
    return received(node, backend) > before


def check(cluster: Cluster, model: Path, backend: str, ranks: tuple[int, int] = (1, 1)) -> None:
    """The same answers from both, and KV that came by this backend."""
    frontend, decode, _ = start(cluster, model, backend, ranks)
    eventually(lambda: tried(frontend, "alone"), "alone is not reached", PATIENCE)
    eventually(
        lambda: tried(frontend, "d").startswith("remote"),
        lambda: (tried(frontend, "d"), [node.lines[-20:] for node in cluster.nodes]),
        PATIENCE,
    )
    random_ = random.Random("prompts")
    for length in LENGTHS:
        prompt = random_.choices(range(10, 250), k=length)
        before = received(decode, backend)
        there, where = ask(frontend, "d", prompt)
        assert where == "remote; node=p; reason=always"
        assert there == ask(frontend, "alone", prompt)[0]
        eventually(partial(received_more, decode, backend, before), "no bytes", PATIENCE)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [(1, 1), (4, 2)], ids=str)
def test_workers_hand_over_by_rdma(
    cluster: Cluster, tmp_path: Path, ranks: tuple[int, int]
) -> None:
    before = packets()
    check(cluster, write_model(tmp_path / "model"), "rdma", ranks)
    blocks = sum(-(-length // BLOCK) for length in LENGTHS)
    assert packets() - before >= max(ranks) * blocks  # a write for each pair of ranks
