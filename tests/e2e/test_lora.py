"""LoRA adapters over real processes: each answers as itself, wherever it is computed.

The sim engine's tokens follow from the bytes of all blocks, and every byte depends on the adapter.
So an answer shows it if any token of it, or any block that was reused, received or recomputed, was
another adapter's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.cluster import Cluster, Node, eventually
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = 32
NAMES = ("bundled", "poet", "clerk")
pytestmark = [pytest.mark.long(whole_file=True, one_in=2), pytest.mark.timeout(180)]


def adapter(folder: Path, name: str, weights: str = "") -> str:
    """The flag's value for an adapter, whose directory is written."""
    path = folder / f"{name}{weights}"
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (path / "adapter_model.safetensors").write_text(f"{name} {weights}")
    return f"{name}={path}"


def worker(cluster: Cluster, name: str, *loras: str, mode: str = "aggregated") -> Node:
    engine = ("--engine", "sim", "--engine-option", "content=on", "--engine-option", "blocks=2000")
    # Without fetches: what a worker finds it has computed itself.
    flags = [*engine, "--mode", mode, "--disagg", "always", "--verify-kv", "all"]
    flags += ["--kv-fetch", "never"]
    for lora in loras:
        flags += ["--lora", lora]
    return cluster.start("worker", name, "--join", cluster.address, *flags)


class Site:
    """A cluster with its frontend."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.router = cluster.router()
        self.workers: dict[str, Node] = {}

    def worker(self, name: str, *loras: str, mode: str = "aggregated") -> Node:
        written = [adapter(self.folder, each) for each in loras]
        self.workers[name] = worker(self.cluster, name, *written, mode=mode)
        return self.workers[name]

    def open(self) -> None:
        """Start the frontend, and wait until all can work and every name is served."""
        self.front = self.cluster.frontend()
        self.cluster.wait_ready()

    def served(self) -> list[str]:
        return [model["id"] for model in self.front.get("/v1/models")[1]["data"]]

    def request(self, model: str, at: str, **fields: Any) -> urllib.request.Request:
        body = {"model": model, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
        headers = {"x-pdserve-worker": at} if at else {}
        url = f"{self.front.url}/v1/completions"
        return urllib.request.Request(url, json.dumps(body).encode(), headers)

    def ask(self, model: str, prompt: list[int], at: str = "", **fields: Any) -> dict[str, Any]:
        asked = self.request(model, at, prompt=prompt, **fields)
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        assert found["model"] == model
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Cluster(tmp_path / "home") as cluster:
        (tmp_path / "home").mkdir()
        yield Site(cluster, tmp_path)


def text(answer: dict[str, Any]) -> str:
    found: str = answer["choices"][0]["text"]
    return found


def cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["pdserve"]["cached_tokens"]
    return found


def prompt_of(blocks: int, first: int = 10) -> list[int]:
    """Whole blocks and a little more."""
    return [first + i % 900 for i in range(blocks * BLOCK + 5)]


def test_adapters_answer_as_themselves_and_share_no_blocks(site: Site) -> None:
    a = site.worker("a", "poet", "clerk")
    b = site.worker("b", "poet")
    site.open()
    eventually(lambda: set(site.served()) == set(NAMES), site.served)
    listed = {model["id"]: model for model in site.front.get("/v1/models")[1]["data"]}
    assert [listed[name]["parent"] for name in NAMES] == [None, "bundled", "bundled"]
    assert listed["bundled"]["root"] == "bundled"
    assert listed["poet"]["root"].startswith("poet@")
    assert listed["poet"]["max_model_len"] == listed["bundled"]["max_model_len"]

    prompt = prompt_of(4)
    first = {name: site.ask(name, prompt, "a") for name in NAMES}
    assert len({text(answer) for answer in first.values()}) == len(NAMES)
    assert [cached(answer) for answer in first.values()] == [0, 0, 0]
    assert len({answer["system_fingerprint"] for answer in first.values()}) == len(NAMES)
    again = {name: site.ask(name, prompt, "a") for name in NAMES}
    assert [text(again[name]) for name in NAMES] == [text(first[name]) for name in NAMES]
    assert [cached(answer) for answer in again.values()] == [4 * BLOCK] * 3
    overlaps = [answer["usage"]["pdserve"]["overlap_tokens"] for answer in again.values()]
    assert overlaps == [4 * BLOCK] * 3, "the router knew"
    a.wait_count("pdserve_cached_prompt_tokens_total", 3 * 4 * BLOCK, 10)

    assert text(site.ask("poet", prompt, "b")) == text(first["poet"])
    for _ in range(3):  # the only worker that has it, however busy
        answer = site.ask("clerk", prompt_of(1, 400))
        assert answer["usage"]["pdserve"]["worker"] == "a"
    for model, at, status, words in (
        ("poem", "", 404, "the model 'poem' is not served here, did you mean 'poet'?"),
        ("clerk", "b", 503, "no worker of the model 'bundled' is left: the request excludes it"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            site.ask(model, prompt, at)
        with refused.value as error:
            assert error.code == status
            assert words in json.loads(error.read())["error"]["message"]
    assert b.count("pdserve_cached_prompt_tokens_total") == 0


class Stream:
    """One streamed answer as it comes."""

    def __init__(self, asked: urllib.request.Request) -> None:
        assert isinstance(asked.data, bytes)
        self.model = json.loads(asked.data)["model"]
        self._answer = urllib.request.urlopen(asked, timeout=PATIENCE)
        self.worker = self._answer.headers["x-pdserve-worker"]
        self.text = ""
        self.usage: Any = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self._answer.close()

    def read(self, chunks: int = 1_000_000) -> None:
        """Until the end, or so many chunks more."""
        while chunks and (line := self._answer.readline()):
            event = line.decode().removeprefix("data: ").strip()
            if not event or event == "[DONE]":
                continue
            chunk = json.loads(event)
            assert "error" not in chunk, chunk
            self.text += "".join(choice["text"] for choice in chunk["choices"])
            self.usage = chunk["usage"] or self.usage
            chunks -= 1


def test_a_stream_continues_on_the_same_adapter_when_its_worker_is_killed(site: Site) -> None:
    for name in ("a", "b"):
        site.worker(name, "poet", "clerk")
    site.worker("c")  # the nearest refuge does not have them
    site.open()
    eventually(lambda: set(site.served()) == set(NAMES), site.served)
    prompt = prompt_of(2)
    long: dict[str, Any] = {"max_tokens": 200}
    calm = {name: text(site.ask(name, prompt, **long)) for name in NAMES[1:]}
    assert len(set(calm.values())) == 2
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    with contextlib.ExitStack() as open_:
        streams = [
            open_.enter_context(Stream(site.request(name, "", prompt=prompt, **long, **streaming)))
            for name in (*calm, *calm)
        ]
        for stream in streams:
            stream.read(20)
        doomed = streams[0].worker
        (survivor,) = {"a", "b"} - {doomed}
        site.workers[doomed].kill()
        for stream in streams:
            stream.read()
            assert stream.text == calm[stream.model]
            moved = stream.worker == doomed
            told = stream.usage["pdserve"]
            assert (told["worker"], told["migrations"]) == (survivor, 1 if moved else None)


def test_a_prompt_of_an_adapter_prefilled_elsewhere_is_exact(site: Site) -> None:
    """Only the prefill worker that has the adapter is asked."""
    site.worker("alone", "poet", "clerk")
    decode = site.worker("decode", "poet", "clerk", mode="decode")
    site.worker("with", "poet", mode="prefill")
    site.worker("without", mode="prefill")
    site.open()
    eventually(lambda: set(site.served()) == set(NAMES), site.served)

    def where(model: str, blocks: int, first: int) -> str:
        prompt = prompt_of(blocks, first)
        answer = site.ask(model, prompt, "decode")
        assert text(answer) == text(site.ask(model, prompt, "alone"))
        found: str = answer["usage"]["pdserve"]["prefill"]
        return found

    fresh = itertools.count(10)

    def reached() -> bool:
        """The decode worker knows the one with the adapter, and the router knows all."""
        with contextlib.suppress(urllib.error.HTTPError):
            return where("poet", 1, next(fresh)).startswith("remote; node=with")
        return False

    eventually(reached, "the worker with the adapter is not reached")
    for number in range(1, 5):
        assert where("poet", number, 100 * number) == "remote; node=with; reason=always"
        assert where("clerk", number, 100 * number) == "local; node=decode; reason=no_worker"
    received = 'pdserve_transfer_bytes_total{backend="shm",direction="received"}'
    assert decode.count(received) > 0


def test_other_files_under_one_name_are_refused_by_name(site: Site) -> None:
    site.worker("a", "poet")
    site.open()
    eventually(lambda: "poet" in site.served(), site.served)
    before = text(site.ask("poet", prompt_of(1)))
    late = worker(site.cluster, "late", adapter(site.folder, "poet", "-retrained"))
    words = r"worker late: its adapter 'poet' has other files \(revision [0-9a-f]{32}\) than the"
    site.front.wait_said(words)
    degraded = site.front.get("/health")[1]["degraded"]
    assert "its adapter 'poet' has other files" in degraded["model_conflict"]
    late.wait_ready()
    for _ in range(3):
        answer = site.ask("poet", prompt_of(1))
        assert (text(answer), answer["usage"]["pdserve"]["worker"]) == (before, "a")
