"""Prompts computed by vLLM on one worker and decoded by vLLM on another, as real processes.

Whatever is asked of a decode worker is also asked of a worker that does everything by itself; the
answers must be the same. Where KV came from, and how much of it, is counted where it arrived.
"""

from __future__ import annotations

import json
import random
import re
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.cluster import eventually
from tests.e2e.model import write_model
from tests.e2e.server import PATIENCE
from tests.e2e.vllm.cluster import (
    BLOCK,
    LOADING,
    VllmCluster,
    require_vllm,
    vllm_worker,
    wait_gone,
)
from tests.e2e.vllm.cluster import processes_of_vllm as processes_of
from tests.support.metrics_page import find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psutil

    from tests.chaos.cluster import Node

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(one_in=8, turn=1),  # it loads four engines
    pytest.mark.timeout(900),
]

BACKENDS = ("shm", "tcp")
BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * BLOCK
"""K and V of the model: layers, KV heads, head dimension, float32."""
CHUNK = 16
"""Tokens of a step of the prefill worker: prompts are computed, and sent, in many."""


@dataclass
class Answer:
    prefill: str
    usage: Any
    tokens: list[list[int]]


@dataclass
class Roles:
    """Two prefill workers, a decode worker for each back end, and a worker that does it all."""

    cluster: VllmCluster
    prefills: list[Node]

    @property
    def alive(self) -> list[Node]:
        """Prefill workers that run."""
        return [node for node in self.prefills if not node.killed]

    def is_remote(self, answer: Answer) -> bool:
        """Whether a prefill worker that runs has computed the prompt."""
        names = "|".join(node.name for node in self.alive)
        return bool(re.fullmatch(f"remote; node=({names}); reason=always", answer.prefill))


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    require_vllm()
    model = write_model(tmp_path_factory.mktemp("model") / "tiny", hidden=128)
    cluster = VllmCluster(tmp_path_factory.mktemp("cluster"), model)
    with cluster:
        cluster.router()
        first = ("--mode", "prefill", "--max-batch-tokens", str(CHUNK), "--verify-kv", "all")
        found = Roles(cluster, [cluster.with_vllm(name, *first) for name in ("p0", "p1")])
        for backend in BACKENDS:
            apart = ("--mode", "decode", "--disagg", "always", "--verify-kv", "all")
            cluster.with_vllm(backend, *apart, "--transfer", backend)
        cluster.with_vllm("alone")
        cluster.front = cluster.frontend()
        healthy = all_healthy(found.prefills)
        eventually(healthy, lambda: [node.lines for node in found.prefills], LOADING)
        for name in (*BACKENDS, "alone"):
            wait_reached(found, name)
        yield found


def all_healthy(nodes: list[Node]) -> Callable[[], bool]:
    return lambda: all(node.health()[0] == 200 for node in nodes)


def wait_reached(roles: Roles, worker: str) -> None:
    """Until it serves; a decode worker with a prompt from a prefill worker."""
    seen: list[object] = []

    def reached() -> bool:
        try:
            answer = ask(roles, worker, tokens(3, f"hello {worker} {len(seen)}"), max_tokens=1)
        except urllib.error.HTTPError as error:
            error.close()
            seen.append(error.code)
            return False
        seen.append(answer.prefill)
        return worker == "alone" or roles.is_remote(answer)

    eventually(reached, lambda: (worker, seen, roles.cluster.workers[worker].lines), LOADING)


def tokens(count: int, seed: object) -> list[int]:
    """A prompt that no other test has."""
    return random.Random(f"vllm {seed}").choices(range(10, 250), k=count)


def ask(roles: Roles, worker: str, prompt: list[int], **fields: Any) -> Answer:
    """Of one worker by name."""
    asked = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    request = urllib.request.Request(
        f"{roles.cluster.front.url}/v1/completions",
        json.dumps(asked).encode(),
        {"x-pdserve-worker": worker, "Connection": "close"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        body = json.loads(response.read())
        prefill = response.headers.get("x-pdserve-prefill", "")
    return Answer(prefill, body["usage"], [choice["token_ids"] for choice in body["choices"]])


# ---------------------------------------------------------------------- counters


def total(node: Node, metric: str) -> float:
    """0 if nothing has been counted yet."""
    _, page = node.get("/metrics", node.probes)
    return find(page, metric) or 0.0


def computed(node: Node) -> float:
    return total(node, "pdserve_computed_tokens_total")


def counted(roles: Roles, backend: str) -> dict[str, float]:
    """What a decode worker and the prefill worker have counted so far."""
    node = roles.cluster.workers[backend]
    received = f'pdserve_transfer_bytes_total{{backend="{backend}",direction="received"}}'
    return {
        "bytes": total(node, received),
        "computed": computed(node),
        "cached": total(node, "pdserve_cached_prompt_tokens_total"),
        "there": sum(computed(node) for node in roles.prefills),
    }


class Moved:
    """Counts from its making on. Counters are late by a second: they are waited for, and before it
    begins they must be at rest."""

    def __init__(self, roles: Roles, backend: str) -> None:
        self._roles, self._backend = roles, backend
        self._before: dict[str, float] = {}
        eventually(self._at_rest, lambda: self._before)

    def _at_rest(self) -> bool:
        before, self._before = self._before, counted(self._roles, self._backend)
        pause = threading.Event()
        pause.wait(1.2)  # longer than between two reports
        return before == self._before == counted(self._roles, self._backend)

    def wait(self, **wanted: float) -> None:
        """Until exactly so much has been counted."""

        def now() -> dict[str, float]:
            after = counted(self._roles, self._backend)
            return {name: after[name] - self._before[name] for name in wanted}

        eventually(lambda: now() == wanted, lambda: (now(), wanted), 15)


# ---------------------------------------------------------------------- the same answers


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_those_of_a_worker_alone(roles: Roles, backend: str) -> None:
    """The decode worker computes one token of each prompt, and receives each block once."""
    lengths = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 333)
    moved = Moved(roles, backend)
    for length in lengths:
        prompt = tokens(length, f"{backend} {length}")
        answer = ask(roles, backend, prompt)
        assert roles.is_remote(answer)
        assert answer.usage["prompt_tokens"] == length
        assert answer.tokens == ask(roles, "alone", prompt).tokens, length
    blocks = sum(-(-length // BLOCK) for length in lengths)
    moved.wait(
        bytes=blocks * BLOCK_BYTES,
        computed=len(lengths) * (1 + 7),
        cached=0,
        there=sum(lengths),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefixes_that_the_decode_worker_has_are_not_sent(roles: Roles, backend: str) -> None:
    prompt = tokens(200, f"{backend} prefix")
    ask(roles, backend, prompt[:100])
    moved = Moved(roles, backend)
    answer = ask(roles, backend, prompt)
    assert roles.is_remote(answer)
    assert answer.usage["pdserve"]["cached_tokens"] == 96
    assert answer.tokens == ask(roles, "alone", prompt).tokens
    # A prefill worker may have the prefix, too, or not.
    moved.wait(bytes=4 * BLOCK_BYTES, computed=8, cached=96)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "temperature": 0.9, "seed": 5},
        {"logprobs": 2, "echo": True},
        {"structured_outputs": {"regex": "[0-9]{3}(, [0-9]{3}){4}"}, "max_tokens": 30},
    ],
    ids=["choices", "prompt logprobs", "a grammar"],
)
def test_sampling_goes_on_where_the_prompt_ended(roles: Roles, fields: dict[str, Any]) -> None:
    prompt = tokens(75, sorted(fields))
    answer = ask(roles, "shm", prompt, **fields)
    assert roles.is_remote(answer)
    assert answer.tokens == ask(roles, "alone", prompt, **fields).tokens


def test_many_prompts_at_once(roles: Roles) -> None:
    prompts = [tokens(50 + 37 * number, f"many {number}") for number in range(10)]
    answers: dict[int, Answer] = {}

    def one(number: int) -> None:
        answers[number] = ask(roles, BACKENDS[number % 2], prompts[number], max_tokens=20)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for number, prompt in enumerate(prompts):
        assert roles.is_remote(answers[number])
        assert answers[number].tokens == ask(roles, "alone", prompt, max_tokens=20).tokens


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefill_worker_that_dies_in_the_middle_costs_time_only(
    roles: Roles, backend: str
) -> None:
    """Killed while it computes and sends: the other one computes the prompt, and after that has
    died in the same way, the decode worker itself. What the dead might have written to is freed."""
    prompt, node = tokens(1900, f"{backend} death"), roles.cluster.workers[backend]
    received = f'pdserve_transfer_bytes_total{{backend="{backend}",direction="received"}}'
    before, answers = total(node, received), list[Answer]()
    workers = {each.name: vllm_worker(each) for each in roles.alive}
    for worker in workers.values():
        worker.suspend()
    asking = threading.Thread(target=lambda: answers.append(ask(roles, backend, prompt)))
    asking.start()
    killed = eventually(lambda: busy(roles), "no prefill worker computes anything")
    engine = processes_of(killed)
    eventually(lambda: pulse(workers[killed.name]) and total(node, received) > before, "no bytes")
    assert total(node, received) - before < -(-1900 // BLOCK) * BLOCK_BYTES
    killed.kill()
    for name, worker in workers.items():
        if name != killed.name:
            worker.resume()
    asking.join(PATIENCE)
    (answer,) = answers
    local = answer.prefill.startswith(f"local; node={backend}; ")
    assert roles.is_remote(answer) if roles.alive else local, answer.prefill
    assert answer.tokens == ask(roles, "alone", prompt).tokens
    wait_gone(engine)
    node.wait_count("pdserve_kv_blocks_quarantined", 0)


def busy(roles: Roles) -> Node | None:
    """The prefill worker that computes a prompt."""
    state = 'pdserve_handoffs{state="computing"}'
    return next((node for node in roles.alive if total(node, state)), None)


def pulse(worker: psutil.Process) -> bool:
    """Let a process compute for a moment, and give counters the time to be reported."""
    pause = threading.Event()
    worker.resume()
    pause.wait(0.1)
    worker.suspend()
    pause.wait(1.5)
    return True


def test_models_whose_kv_cannot_be_exchanged_are_refused_by_name(roles: Roles) -> None:
    node = roles.cluster.with_vllm(
        "refused", *("--mode", "prefill", "--engine-option", "pipeline_parallel_size=2")
    )
    node.expected = 2
    node.wait_said("pipeline_parallel_size is over 1; run it with --mode=aggregated")
    assert node.process.wait(PATIENCE) == node.expected
    del roles.cluster.workers["refused"]
