"""The loads, and how an answer is checked.

Each request of a row has a text of its own, drawn word by word from Python's library. The seed of a
round gives all arms the same texts in the same order, and no other round the same. Every answer is
checked by the generator: its status, its number of tokens, and that a stream is whole. Before the
rounds, one answer of each arm to each row is read event by event.
"""

from __future__ import annotations

import glob
import json
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.frontend import OTHER, machine_busy
from bench.peers.frontends.arms import CHAT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.peers.frontends.arms import System

__all__ = ["ROWS", "Load", "Probe", "Row", "Sample", "read_answer", "request", "vocabulary"]

_WARMUP: Final = 0.3
_LONGEST_WORD: Final = 12
_WORDS: Final = 60_000
_MARKS: Final = {*map(chr, range(32)), *'"\\<>\x7f'}
_SLOW: Final = 100.0
"""Below so many requests per second a run takes longer, for its quantiles."""


@dataclass(frozen=True, slots=True)
class Row:
    """A load."""

    name: str
    connections: int
    tokens: int = 0
    """Tokens of each choice; 0: one token, without a stream."""
    choices: int = 1
    own: int = 12
    """Words of the prompt that no other has."""
    shared: int = 0
    """Words before them that an eighth of the prompts have."""
    rate: float = 0.0
    """Requests per second; 0: each connection sends the next one after an answer."""
    quickack: bool = True
    proxies: bool = False
    """True: also for routers that pass requests on."""

    @property
    def answer_tokens(self) -> int:
        """The tokens of a right answer, in all choices."""
        return max(1, self.tokens) * self.choices

    @property
    def compares(self) -> tuple[str, ...]:
        """The fields of `Sample` whose ratio is shown."""
        if self.rate or self.connections == 1:
            return ("p50", "p99", "front")
        return ("chunks" if self.tokens > 4 else "requests", "front")


ROWS: Final = (
    Row("one token, 16 connections", 16, proxies=True),
    Row("one token, 64 connections", 64, proxies=True),
    Row("one token, 500 words", 16, own=500),
    Row("one token, 2,000 words", 16, own=2000, proxies=True),
    Row("one token, 400 words after 1,600 shared", 16, own=400, shared=1600),
    Row("one token, 8,000 words", 16, own=8000),
    Row("one token, 400 words after 7,600 shared", 16, own=400, shared=7600),
    Row("streams of 64, 64 connections", 64, 64, proxies=True),
    Row("the same, client without quickack", 64, 64, quickack=False),
    Row("streams of 64 after 2,000 words", 16, 64, own=2000),
    Row("two choices of 64, 32 connections", 32, 64, choices=2, proxies=True),
    Row("20/s, streams of 16", 16, 16, rate=20, proxies=True),
    Row("20/s, streams of 16 after 2,000 words", 16, 16, own=2000, rate=20),
    Row("200/s, one token, 500 words", 64, own=500, rate=200),
    Row("one after the other, streams of 16", 1, 16, proxies=True),
    Row("the same one after the other, without quickack", 1, 16, quickack=False),
)


def request(row: Row) -> dict[str, Any]:
    """The row's chat request, with places for words; see `loadgen.cpp`."""
    shared = f"<<shared {row.shared} 8>> " if row.shared else ""
    body: dict[str, Any] = {
        "model": "bench",
        "messages": [{"role": "user", "content": f"{shared}<<own {row.own}>>"}],
        "max_tokens": row.tokens or 1,
        "temperature": 1 if row.choices > 1 else 0,
    }
    if row.choices > 1:
        body["n"] = row.choices
    if row.tokens:
        body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    return body


def vocabulary() -> list[str]:
    """Words of Python's library as they follow each other: code and prose, frequent ones often.
    None needs an escape in JSON, and none is a place for words."""
    files = sorted(glob.glob(sysconfig.get_path("stdlib") + "/*.py"))
    words = [
        word
        for file in files
        for word in Path(file).read_text(errors="ignore").split()
        if len(word) <= _LONGEST_WORD and word.isascii() and not set(word) & _MARKS
    ]
    step = max(1, len(words) // _WORDS)
    return words[::step]


# ---------------------------------------------------------------- one answer, read in full


@dataclass(frozen=True, slots=True)
class Probe:
    """What one answer to a row was."""

    wrong: str
    """Why the answer is not right; empty: it is."""
    prompt_tokens: int = 0
    other_events: int = 0
    """Events of a stream that have no text: the role, the end, usage, `[DONE]`."""


def read_answer(row: Row, status: int, text: str) -> Probe:
    """Checks an answer: as many choices and tokens as were asked for, each choice with its end."""
    if status != 200:
        return Probe(f"status {status}: {text[:200]}")
    try:
        if not row.tokens:
            return _read_whole(row, json.loads(text))
        return _read_stream(row, text)
    except (ValueError, KeyError, TypeError) as error:
        return Probe(f"not readable: {error!r}")


def _read_whole(row: Row, body: dict[str, Any]) -> Probe:
    ends = {choice["index"]: choice["finish_reason"] for choice in body["choices"]}
    return _judge(row, ends, body["usage"], 0)


def _read_stream(row: Row, text: str) -> Probe:
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part.strip()]
    if not events or events[-1] != "[DONE]":
        return Probe("the stream does not end with [DONE]")
    ends: dict[int, str] = {}
    usage: dict[str, int] = {}
    others = 1
    for event in map(json.loads, events[:-1]):
        usage = event.get("usage") or usage
        others += not any(one["delta"].get("content") for one in event["choices"])
        ends |= {
            one["index"]: one["finish_reason"]
            for one in event["choices"]
            if one.get("finish_reason")
        }
    return _judge(row, ends, usage, others)


def _judge(row: Row, ends: dict[int, str], usage: dict[str, int], others: int) -> Probe:
    if ends != dict.fromkeys(range(row.choices), "length"):
        return Probe(f"the choices end as {ends}")
    if usage.get("completion_tokens") != row.answer_tokens:
        return Probe(f"usage is {usage}, not {row.answer_tokens} tokens")
    return Probe("", usage["prompt_tokens"], others)


# ---------------------------------------------------------------- many answers, counted


@dataclass(frozen=True, slots=True)
class Sample:
    """The results of one load on one arm."""

    requests: float
    """Right answers per second."""
    chunks: float
    """Events with text, per second."""
    each: float
    """Events with text of a whole answer."""
    prompt: float
    """Prompt tokens per second."""
    p50: float
    """Milliseconds to the first text of an answer."""
    p99: float
    front: float
    """CPU microseconds of frontend and router, per request."""
    workers: float
    """CPU microseconds of the worker side, per request."""
    share: float
    """Share of a core that frontend and router used."""
    bad: int
    """Errors, wrong answers, and requests that found no idle connection."""
    foreign: float
    """Number of cores that other work used meanwhile."""

    @property
    def all(self) -> float:
        """CPU microseconds of all processes, per request."""
        return self.front + self.workers


class Load:
    """Runs rows on arms."""

    def __init__(self, generator: Path, folder: Path, words: Iterable[str]) -> None:
        self._generator = generator
        self._folder = folder
        self._words = folder / "words.txt"
        self._words.write_text("\n".join(words) + "\n")

    def probe(self, row: Row, system: System) -> Probe:
        """Sends one request, the same to all arms, and reads its answer."""
        own = " ".join(self._words.read_text().split()[: row.own + row.shared])
        body = request(row) | {"messages": [{"role": "user", "content": own}]}
        ask = urllib.request.Request(
            f"http://127.0.0.1:{system.port}{CHAT}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(ask, timeout=30) as answer:
                return read_answer(row, answer.status, answer.read().decode())
        except urllib.error.HTTPError as error:
            return read_answer(row, error.code, error.read().decode(errors="replace"))
        except OSError as error:
            return Probe(f"no answer: {error}")

    def command(self, row: Row, system: System, seed: int, seconds: float) -> list[str]:
        """The generator's command line."""
        body = self._folder / f"{row.name.replace(' ', '_').replace('/', '_')}.json"
        body.write_text(json.dumps(request(row)))
        command = ["taskset", "-c", str(OTHER), str(self._generator), "load"]
        command += ["--port", str(system.port), "--path", CHAT, "--body", str(body)]
        command += ["--vocabulary", str(self._words), "--seed", str(seed)]
        command += ["--connections", str(row.connections), "--warmup", str(_WARMUP)]
        command += ["--seconds", str(seconds * (3 if 0 < row.rate < _SLOW else 1))]
        command += ["--rate", str(row.rate)] if row.rate else []
        command += ["--quickack"] if row.quickack else []
        return [*command, "--tokens", str(row.answer_tokens)]

    def measure(self, row: Row, system: System, probe: Probe, seed: int, seconds: float) -> Sample:
        """Runs one load on one arm."""
        (front, workers), busy = system.cpu(), machine_busy()
        begin = time.perf_counter()
        done = subprocess.run(
            self.command(row, system, seed, seconds), check=True, capture_output=True, text=True
        )
        got, wall = json.loads(done.stdout), time.perf_counter() - begin
        front, workers = (
            now - then for now, then in zip(system.cpu(), (front, workers), strict=True)
        )
        own = front + workers + got["cpu_share"] * wall
        answers, took = max(got["finished"], 1), got["seconds"]
        events = max(got["answer_events"], 1)
        with_text = max(0.0, 1 - got["requests"] * probe.other_events / events) if row.tokens else 0
        return Sample(
            requests=got["requests"] / took,
            chunks=got["events"] * with_text / took,
            each=events * with_text / max(got["requests"], 1),
            prompt=got["prompt_tokens"] / took if system.tokenises else 0.0,
            p50=got["first"]["p50"] * 1e3,
            p99=got["first"]["p99"] * 1e3,
            front=front / answers * 1e6,
            workers=workers / answers * 1e6,
            share=front / wall,
            bad=got["errors"] + got["wrong"] + got["missed"],
            foreign=max(0.0, (machine_busy() - busy - own) / wall),
        )
