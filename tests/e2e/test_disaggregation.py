"""Prompts computed on one worker and decoded on another, as real processes.

Whatever is asked of a decode worker is also asked of a worker that does everything by itself; the
answers must be the same. That KV came from elsewhere is asserted where it arrived.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.protocols.sse import SseDecoder
from tests.chaos.cluster import Cluster, Node, eventually
from tests.e2e.model import write_model
from tests.e2e.openai_client import client_of
from tests.e2e.server import PATIENCE, Server, serving
from tests.support.metrics_page import find

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BLOCK = 32
BLOCK_BYTES = 2 * 4 * 2 * 64 * 4 * BLOCK
"""K and V of the bundled model: layers, KV heads, head dimension, float32."""
CHUNK = 128
"""Tokens of a step at most: longer prompts are computed, and sent, in several."""
BACKENDS = ("shm", "tcp")
pytestmark = [pytest.mark.long(whole_file=True, one_in=2), pytest.mark.timeout(180)]


@dataclass
class Roles:
    """A prefill worker, one decode worker for each backend, one worker that does it all."""

    cluster: Cluster
    router: Node
    prefill: Node
    frontend: Node
    decode: dict[str, Node] = field(default_factory=dict)
    told: dict[str, Counter[str]] = field(default_factory=partial(defaultdict, Counter))
    """What the answers of each decode worker say that it has received and computed."""

    def tell(self, worker: str, prefill: str, usage: Mapping[str, Any], choices: int) -> None:
        """An answer has come."""
        prompt, cached = usage["prompt_tokens"], usage["pdserve"]["cached_tokens"]
        told, remote = self.told[worker], prefill.startswith("remote")
        told["blocks"] += blocks_of(prompt) - cached // BLOCK if remote else 0
        told["computed"] += usage["completion_tokens"] - choices
        told["computed"] += 0 if remote else prompt - cached


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        router = cluster.router()
        engine: tuple[str, ...] = ("--dtype", "float32", "--threads", "1", "--kv-memory", "128MiB")
        engine += ("--block-size", str(BLOCK), "--max-batch-tokens", str(CHUNK))
        engine += ("--max-sequences", "16")

        def worker(name: str, *flags: str) -> Node:
            flags = ("--verify-kv", "all", *engine, *flags)
            return cluster.start("worker", name, "--join", cluster.address, *flags)

        prefill = worker("prefill", "--mode", "prefill")
        decode = {
            backend: worker(
                backend, "--mode", "decode", "--disagg", "always", "--transfer", backend
            )
            for backend in BACKENDS
        }
        worker("alone")
        frontend = cluster.frontend()
        cluster.wait_ready()
        found = Roles(cluster, router, prefill, frontend, decode)
        for name in (*BACKENDS, "alone"):
            eventually(partial(reached, found, name), f"{name} is not reached")
        yield found


@dataclass
class Answer:
    headers: Mapping[str, str]
    body: Any

    @property
    def prefill(self) -> str:
        return self.headers["x-pdserve-prefill"]


def ask(roles: Roles, worker: str, path: str = "/v1/completions", **fields: Any) -> Answer:
    """Of one worker by name."""
    with opened(roles, worker, path, fields) as response:
        headers = {k.lower(): v for k, v in response.headers.items()}
        answer = Answer(headers, json.loads(response.read()))
    choices = len(answer.body["choices"])
    roles.tell(worker, headers.get("x-pdserve-prefill", ""), answer.body["usage"], choices)
    return answer


def opened(roles: Roles, worker: str, path: str, fields: Mapping[str, object]) -> Any:
    request = urllib.request.Request(
        roles.frontend.url + path,
        json.dumps({"max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}).encode(),
        {"x-pdserve-worker": worker, "Connection": "close"},
    )
    # A stream is silent while its worker starts anew.
    return urllib.request.urlopen(request, timeout=2 * PATIENCE)


def reached(roles: Roles, worker: str) -> bool:
    """It serves; a decode worker with a prompt from elsewhere."""
    try:
        answer = ask(roles, worker, prompt=tokens(3, f"hello {worker}"), max_tokens=1)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    return worker == "alone" or answer.prefill == "remote; node=prefill; reason=always"


def tokens(count: int, seed: object) -> list[int]:
    """A prompt that no other test has."""
    return random.Random(f"prompt {seed}").choices(range(10, 1000), k=count)


# ---------------------------------------------------------------------- what moved


@dataclass
class Counted:
    """What a decode worker and the prefill worker have counted so far."""

    received: float
    """Blocks."""
    computed: float
    cached: float
    there: float
    """Computed by the prefill worker."""


def count(roles: Roles, backend: str) -> Counted:
    decode, prefill = roles.decode[backend], roles.prefill
    received = f'pdserve_transfer_bytes_total{{backend="{backend}",direction="received"}}'
    return Counted(
        total(decode, received) / BLOCK_BYTES,
        total(decode, "pdserve_computed_tokens_total"),
        total(decode, "pdserve_cached_prompt_tokens_total"),
        total(prefill, "pdserve_computed_tokens_total"),
    )


def total(node: Node, metric: str) -> float:
    """0 if nothing has been counted yet."""
    _, page = node.get("/metrics", node.probes)
    return find(page, metric) or 0.0


class Moved:
    """Since it was made: exactly so much. Counters are late by a second, so they are waited for,
    and before it begins they must have caught up with what the answers so far say."""

    def __init__(self, roles: Roles, backend: str) -> None:
        self._roles, self._backend = roles, backend
        told = roles.told[backend]

        def caught_up() -> bool:
            idle = total(roles.decode[backend], "pdserve_num_requests_running") == 0
            now = self._before = count(
                roles, backend
            )  # a stop string may come after further tokens
            return idle and now.received == told["blocks"] and now.computed >= told["computed"]

        eventually(caught_up, lambda: (self._before, told), 10)

    def is_(self, *, blocks: int, computed: int, cached: int = 0, there: int | None = None) -> None:
        """`blocks` received, tokens `computed` by the decode worker and `there`."""

        def now() -> dict[str, float]:
            before, after = self._before, count(self._roles, self._backend)
            return {
                "blocks": after.received - before.received,
                "computed": after.computed - before.computed,
                "cached": after.cached - before.cached,
                "there": after.there - before.there,
            }

        wanted = {"blocks": blocks, "computed": computed, "cached": cached, "there": there}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        eventually(lambda: wanted.items() <= now().items(), lambda: (now(), wanted), 10)


def blocks_of(length: int) -> int:
    """That a prompt takes."""
    return -(-length // BLOCK)


# ---------------------------------------------------------------------- the same answers

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 17, "top_p": 0.9, "top_k": 40},
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 3},
    "prompt logprobs": {"logprobs": 2, "echo": True},
    "penalties": {"presence_penalty": 1.1, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {"700": 5.0, "701": -100.0}},
    "choices": {"n": 3, "temperature": 1.2, "seed": 5},
    "a grammar": {
        "structured_outputs": {"regex": "[0-9]{3}(, [0-9]{3}){9}"},
        "temperature": 1.0,
        "seed": 9,
        "n": 2,
        "max_tokens": 30,
    },
    "one token": {"max_tokens": 1},
    "choices of one token": {"max_tokens": 1, "n": 4, "temperature": 1.0, "seed": 8},
}


def same(got: Any, wanted: Any) -> bool:
    """Log probabilities may differ in the last digits: batches differ."""
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(same(got[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    return (
        bool(got == pytest.approx(wanted, abs=1e-3))
        if isinstance(wanted, float)
        else (got == wanted)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompts_of_all_lengths_around_block_borders(roles, backend):
    lengths: tuple[int, ...] = (
        1,
        2,
        BLOCK - 1,
        BLOCK,
        BLOCK + 1,
        2 * BLOCK,
        2 * BLOCK + 1,
        CHUNK - 1,
        CHUNK,
    )
    lengths += (CHUNK + 1, 5 * CHUNK - 7)
    moved = Moved(roles, backend)
    for length in lengths:
        prompt = tokens(length, f"{backend} {length}")
        answer = ask(roles, backend, prompt=prompt)
        assert answer.prefill == "remote; node=prefill; reason=always"
        assert answer.body["usage"]["prompt_tokens"] == length
        assert answer.headers["x-pdserve-cached-tokens"] == "0"
        assert same(answer.body["choices"], ask(roles, "alone", prompt=prompt).body["choices"]), (
            length
        )
    moved.is_(blocks=sum(map(blocks_of, lengths)), computed=7 * len(lengths), there=sum(lengths))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_sampling_goes_on_where_the_prompt_ended(roles, backend, setting):
    prompt, fields = tokens(75, f"{backend} {setting}"), SETTINGS[setting]
    moved = Moved(roles, backend)
    answer = ask(roles, backend, prompt=prompt, **fields)
    expected = ask(roles, "alone", prompt=prompt, **fields)
    assert same(answer.body["choices"], expected.body["choices"])
    usage = answer.body["usage"]
    assert usage["completion_tokens"] == expected.body["usage"]["completion_tokens"]
    assert usage["pdserve"]["prefill"] == answer.prefill == "remote; node=prefill; reason=always"
    choices = len(answer.body["choices"])
    moved.is_(blocks=blocks_of(75), computed=usage["completion_tokens"] - choices)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stops_and_streams(roles, backend):
    prompt = tokens(50, f"{backend} stop")
    whole = ask(roles, "alone", prompt=prompt, max_tokens=24).body["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:3]
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 24, "stop": [stop]}
    stopped = ask(roles, backend, **fields).body["choices"][0]
    assert stopped == ask(roles, "alone", **fields).body["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole.partition(stop)[0]
    text, usage = streamed(roles, backend, prompt=tokens(70, f"{backend} stream"), max_tokens=16)
    expected = ask(roles, "alone", prompt=tokens(70, f"{backend} stream"), max_tokens=16)
    assert text == expected.body["choices"][0]["text"]
    assert usage["pdserve"]["prefill"] == "remote; node=prefill; reason=always"


def streamed(roles: Roles, worker: str, **fields: Any) -> tuple[str, Any]:
    """Its text and its usage."""
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    usage: Any = None
    decoder, text = SseDecoder(), ""
    with opened(roles, worker, "/v1/completions", fields) as answer:
        while data := answer.read1():
            for event in decoder.feed(data):
                if event.data != "[DONE]":
                    chunk = json.loads(event.data)
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    usage = chunk["usage"] or usage
    roles.tell(worker, usage["pdserve"]["prefill"], usage, 1)
    return text, usage


# ---------------------------------------------------------------------- prefixes


def disagg(roles: Roles, how: str, worker: str) -> None:
    """As an operator: decide like this from now on."""
    command = (sys.executable, "-m", "pdserve", "disagg", how, "--worker", worker)
    environ = roles.prefill.environ
    subprocess.run(
        [*command, "--join", roles.cluster.address], env=environ, timeout=PATIENCE, check=True
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefixes_on_one_side_and_on_both(roles, backend):
    other = BACKENDS[1 - BACKENDS.index(backend)]

    def asks(prompt: list[int]) -> Answer:
        answer = ask(roles, backend, prompt=prompt)
        assert same(answer.body["choices"], ask(roles, "alone", prompt=prompt).body["choices"])
        return answer

    first = tokens(100, f"{backend} prefix")
    ask(roles, other, prompt=first)  # now the prefill worker has it
    time.sleep(1.5)  # and counts it: counters are late by a second
    moved = Moved(roles, backend)
    answer = asks(longer := first + tokens(40, f"{backend} longer"))
    assert answer.headers["x-pdserve-cached-tokens"] == "0"
    moved.is_(blocks=blocks_of(140), computed=7, there=140 - 96)

    moved = Moved(roles, backend)  # both have it
    answer = asks(longer + tokens(60, f"{backend} longest"))
    assert answer.headers["x-pdserve-cached-tokens"] == "128"
    moved.is_(blocks=blocks_of(200) - 4, computed=7, cached=128, there=200 - 128)

    disagg(roles, "never", backend)
    here = tokens(100, f"{backend} here")
    assert asks(here).prefill == f"local; node={backend}; reason=never"
    disagg(roles, "always", backend)
    moved = Moved(roles, backend)  # only the decode worker has it
    answer = asks(here + tokens(30, f"{backend} there"))
    assert answer.prefill == "remote; node=prefill; reason=always"
    assert answer.headers["x-pdserve-cached-tokens"] == "96"
    moved.is_(blocks=blocks_of(130) - 3, computed=7, cached=96, there=130)


# ---------------------------------------------------------------------- everything around


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_official_client_talks_to_a_decode_worker(roles, backend):
    fields: dict[str, Any] = {
        "model": "bundled",
        "messages": [{"role": "user", "content": f"What is a prefix cache over {backend}?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    with client_of(roles.frontend.url) as client:
        raw = client.chat.completions.with_raw_response.create(
            **fields, extra_headers={"x-pdserve-worker": backend}
        )
        assert raw.headers["x-pdserve-prefill"] == "remote; node=prefill; reason=always"
        alone = client.chat.completions.create(
            **fields, extra_headers={"x-pdserve-worker": "alone"}
        )
    parsed: Any = raw.parse()
    roles.tell(backend, raw.headers["x-pdserve-prefill"], parsed.usage.to_dict(), 1)
    assert parsed.choices[0].message == alone.choices[0].message


def test_status_shows_what_moved(roles):
    command = (sys.executable, "-m", "pdserve", "status", "--join", roles.cluster.address)
    shown = subprocess.run(
        command,
        env=roles.prefill.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    ).stdout
    for backend in BACKENDS:
        assert re.search(rf"^{backend} +prefill +{backend} +0 B +\d\S* [KM]iB +0 ", shown, re.M), (
            shown
        )
        assert re.search(rf"^{backend} +decode +always +\d", shown, re.M), shown


def test_the_queue_is_counted_at_its_router(roles):
    enqueued = roles.router.count(
        'pdserve_prefill_queue_events_total{event="enqueued",role="router"}'
    )
    assert enqueued > 0
    assert roles.router.count('pdserve_prefill_queue_items{model="bundled",role="router"}') == 0


def test_nothing_is_left(roles):
    """After quiet no blocks are held or quarantined, and nothing runs."""
    for node in (roles.prefill, *roles.decode.values()):
        for name in ("kv_blocks_used", "kv_blocks_quarantined", "num_requests_running"):
            node.wait_count(f"pdserve_{name}", 0)


# ---------------------------------------------------------------------- all in one

LONG = " ".join(f"word {i}" for i in range(300))


@pytest.mark.long(one_in=3)
def test_one_process_does_both_with_one_engine_process():
    with serving(None, "--kv-memory", "128MiB", "--threads", "1") as server:
        core = server.core()
        eventually(
            lambda: served(server, f"{time.time()} {LONG}").prefill.startswith("remote"),
            "the decode worker knows of the prefill worker",
        )
        first = served(server)
        assert re.fullmatch(r"remote; node=\S+; reason=rule", first.prefill)
        short = served(server, "hello")
        assert re.fullmatch(r"local; node=\S+; reason=short_prompt", short.prefill)
        core.kill()
        core.wait(PATIENCE)
        again = served(server)
        assert again.body["choices"] == first.body["choices"]
        eventually(
            lambda: served(server, f"{time.time()} {LONG}").prefill.startswith("remote"),
            "prompts are computed elsewhere again",
        )
        assert server.core().pid != core.pid
        assert server.end() == 0
    assert not any("Traceback" in line for line in server.lines), server.lines


@pytest.mark.long
def test_two_workers_of_one_process_have_one_copy_of_the_weights(tmp_path):
    """Against one worker, which has one for certain."""
    model = write_model(tmp_path / "wide", hidden=1024, inner=4096)
    weights = (model / "model.safetensors").stat().st_size  # float32, as they are computed with
    used = []
    for flags in ((), ("--aggregated",)):
        with serving(model, "--kv-memory", "64MiB", "--threads", "1", *flags) as server:
            answer = served(server, " ".join(map(str, range(400))))
            assert ("x-pdserve-prefill" in answer.headers) is not bool(flags)
            used.append(server.core().memory_full_info().uss)
    assert weights > 100e6
    assert used[1] > weights
    assert used[0] - used[1] < weights / 2, (used, weights)


def served(server: Server, prompt: str = LONG) -> Answer:
    """The first answer; until then 503 is all that may come."""
    fields = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 4}

    def asked() -> Answer | None:
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(fields).encode(), {"Connection": "close"}
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                headers = {k.lower(): v for k, v in response.headers.items()}
                return Answer(headers, json.loads(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 503:
                    raise
        return None

    found: Answer = eventually(asked, lambda: server.lines)
    return found
