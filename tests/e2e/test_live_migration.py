"""Sequences that run on one real worker and go on at another: same tokens, and only what is missing
is sent and computed."""

from __future__ import annotations

import json
import random
import signal
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.protocols.sse import SseDecoder
from pdserve.token_ids import token_ids
from tests.chaos.cluster import Cluster, Node, eventually
from tests.e2e.direct import Call, Direct
from tests.e2e.server import PATIENCE
from tests.e2e.test_disaggregation import BLOCK, BLOCK_BYTES, CHUNK, blocks_of, tokens, total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BACKENDS = ("shm", "tcp")
LENGTH = 120
"""Tokens of an output: a source that is quick may be done before its sequence has moved, and then
the move goes on from what was heard by then, less a few."""
MOVED = "moved; node=source; reason=source"
pytestmark = pytest.mark.timeout(180)


@dataclass
class Workers:
    direct: Direct
    frontend: Node
    nodes: dict[str, Node]
    """`source`, one for each backend, and `alone`, which does everything by itself."""
    asked: int = 0


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.router()
        engine: tuple[str, ...] = ("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB")
        engine += ("--block-size", str(BLOCK), "--max-batch-tokens", str(CHUNK))
        engine += ("--max-sequences", "16", "--verify-kv", "all", "--join", cluster.address)
        flags = {
            "source": (),
            "alone": (),
            **{backend: ("--transfer", backend) for backend in BACKENDS},
        }
        nodes = {name: cluster.start("worker", name, *engine, *flags[name]) for name in flags}
        frontend = cluster.frontend()
        cluster.wait_ready()
        with Direct(cluster.home, cluster.address) as direct:
            for name in nodes:
                direct.epoch(name)
            yield Workers(direct, frontend, nodes)


def asked(workers: Workers, prompt: int, **sampling: Any) -> GenerateRequest:
    """One that nobody has asked before."""
    workers.asked += 1
    usual: dict[str, Any] = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
    return GenerateRequest(
        request_id=f"r{workers.asked}",
        model="bundled",
        prompt=token_ids(tokens(prompt, f"move {workers.asked}")),
        sampling=SamplingParams(**(usual | sampling)),
    )


def warm_up(workers: Workers, wanted: GenerateRequest, output: list[int]) -> GenerateRequest:
    sampling = replace(wanted.sampling, max_tokens=len(output) + 1, ignore_eos=True, logprobs=None)
    return replace(
        wanted,
        request_id=f"{wanted.request_id}-move",
        output=[output],
        sampling=sampling,
        source="source",
        source_epoch=workers.direct.epoch("source"),
    )


@dataclass
class Move:
    """A sequence that has moved."""

    wanted: GenerateRequest
    snapshot: int
    """Tokens of output at the time of the warm-up,"""
    given: int
    """and when it was moved."""
    warm: Call
    output: list[int]
    """All of it."""
    logprobs: list[Any]


def moved(workers: Workers, target: str, wanted: GenerateRequest, cut: int, later: int) -> Move:
    direct = workers.direct
    running = direct.open("source", wanted)
    snapshot = direct.tokens(running, cut)[: cut + 5]
    warm = direct.finished(direct.open(target, warm_up(workers, wanted, snapshot)))
    direct.tokens(running, cut + later)
    given = direct.abort(running)[: len(snapshot) + later]
    logprobs = running.logprobs[: len(given)]
    after = direct.finished(direct.open(target, replace(wanted, output=[given])))
    assert after.prefill == "", "who names no source has no choice"
    whole = given + after.tokens
    return Move(wanted, len(snapshot), len(given), warm, whole, logprobs + after.logprobs)


def unbroken(workers: Workers, wanted: GenerateRequest) -> Call:
    return workers.direct.finished(workers.direct.open("alone", wanted))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_is_missing_is_sent_and_computed(workers, backend):
    node = workers.nodes[backend]
    received = f'pdserve_transfer_bytes_total{{backend="{backend}",direction="received"}}'
    decisions = 'pdserve_prefill_decisions_total{reason="source",where="remote"}'

    def counts() -> tuple[float, float, float]:
        computed = total(node, "pdserve_computed_tokens_total")
        return total(node, received) / BLOCK_BYTES, computed, total(node, decisions)

    before = counts()
    cuts = (1, BLOCK - 1, BLOCK, BLOCK + 1, 57)
    moves = [moved(workers, backend, asked(workers, 2 * BLOCK + 7), cut, 3) for cut in cuts]
    blocks = computed = 0
    for move in moves:
        assert move.warm.prefill == MOVED
        assert move.output == unbroken(workers, move.wanted).tokens
        assert move.warm.started is not None
        prompt, size = len(move.wanted.prompt), len(move.wanted.prompt) + move.snapshot
        assert move.warm.started.received_tokens == size
        blocks += blocks_of(size)
        # The warm-up leaves whole blocks; of each further token the last is never computed.
        computed += prompt + LENGTH - 1 - size // BLOCK * BLOCK
    wanted = (before[0] + blocks, before[1] + computed, before[2] + len(cuts))
    eventually(lambda: counts() == wanted, lambda: (counts(), wanted), 10)


SETTINGS: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 1.0, "seed": 17, "top_p": 0.9, "top_k": 40},
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 3},
    "penalties": {"presence_penalty": 1.1, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {700: 5.0, 701: -100.0}, "min_tokens": 30},
    "a grammar": {
        "grammar": "start: /[0-9]+(, [0-9]+)*/",
        "eos_token_ids": (3,),
        "temperature": 1.0,
        "seed": 9,
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_sampling_goes_on_as_if_nothing_had_happened(workers, backend, setting):
    chance = random.Random(f"{backend} {setting}")
    for _ in range(2):
        wanted = asked(workers, chance.randrange(BLOCK + 1, 200), **SETTINGS[setting])
        cut, later = chance.randrange(1, 70), chance.randrange(12)
        move = moved(workers, backend, wanted, cut, later)
        assert move.warm.prefill == MOVED
        whole = unbroken(workers, wanted)
        assert move.output == whole.tokens
        assert [one.token for one in move.logprobs] == [one.token for one in whole.logprobs]
        for ours, theirs in zip(move.logprobs, whole.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_a_source_that_is_gone_costs_nothing_but_work(workers):
    direct = workers.direct
    wanted = asked(workers, 100)
    output = direct.tokens(direct.open("source", wanted), 20)[:20]
    hint = replace(wanted, output=[output], source="source", source_epoch=1)
    after = direct.finished(direct.open("shm", hint))
    assert after.prefill == "local; node=shm; reason=source_gone"
    assert output + after.tokens == unbroken(workers, wanted).tokens
    counted = 'pdserve_prefill_decisions_total{reason="source_gone",where="local"}'
    eventually(lambda: total(workers.nodes["shm"], counted) == 1, "it is counted")


def test_a_worker_that_goes_gives_its_streams_away_with_their_kv(workers):
    """Whichever has it, of those that have a path to each other. To ask for one by name would be
    to stay there."""
    fields = {"prompt": tokens(300, "drained"), "max_tokens": 600, "temperature": 0}
    fields |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}

    def ask(wanted: str, then: Callable[[str], object]) -> tuple[str, Any]:
        """Its text and usage; `then` hears soon which worker it has begun at."""
        headers = {"Connection": "close"} | ({"x-pdserve-worker": wanted} if wanted else {})
        request = urllib.request.Request(
            f"{workers.frontend.url}/v1/completions", json.dumps(fields).encode(), headers
        )
        decoder, text, usage, seen = SseDecoder(), "", None, 0
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            while data := answer.read1():
                for event in decoder.feed(data):
                    seen += 1
                    if seen == 30:
                        then(answer.headers["x-pdserve-worker"])
                    if event.data != "[DONE]":
                        chunk = json.loads(event.data)
                        assert "error" not in chunk, chunk
                        text += "".join(choice["text"] for choice in chunk["choices"])
                        usage = chunk["usage"] or usage
        return text, usage

    gone: list[Node] = []

    def end(worker: str) -> None:
        gone.append(workers.nodes.pop(worker))
        gone[0].process.send_signal(signal.SIGTERM)

    decisions = 'pdserve_prefill_decisions_total{reason="source",where="remote"}'

    def moves() -> dict[str, float]:
        return {name: total(node, decisions) for name, node in workers.nodes.items()}

    before = moves()
    text, usage = ask("!shm", end)
    assert usage["completion_tokens"] == 600
    assert usage["pdserve"]["migrations"] >= 1  # a busy machine may have it move once more
    assert gone[0].process.wait(PATIENCE) == 0

    def targets() -> list[str]:
        return [name for name, count in moves().items() if count > before[name]]

    eventually(targets, moves)
    other = min(workers.nodes, key=lambda name: name in targets())
    assert text == ask(other, lambda worker: None)[0]


def test_nothing_is_left(workers):
    for node in workers.nodes.values():
        for name in ("kv_blocks_used", "kv_blocks_quarantined", "num_requests_running"):
            node.wait_count(f"pdserve_{name}", 0)
