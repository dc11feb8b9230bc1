"""A cluster whose workers have the real vLLM, the processes of each engine, and streams of tokens.

Every node runs in the environment of `make vllm`, also if the tests themselves run in another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.chaos.cluster import Cluster, Node, eventually
from tests.e2e.server import PATIENCE
from tests.support.vllm_threads import ONE_THREAD

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
CACHE = ROOT / ".venv-vllm" / "cache"
"""For what vLLM finds out about a class of models, in a process that takes 9 seconds. In each new
home folder it would do so again."""
BLOCK = 32
"""vLLM's attention on CPUs takes multiples of it."""
ENGINE = (
    *("--engine", "vllm", "--engine-option", "enforce_eager=true", "--dtype", "float32"),
    *("--kv-memory", "64MiB", "--block-size", str(BLOCK), "--max-sequences", "16"),
)
"""Float32, so that a continued answer has the same tokens as an undisturbed one."""
LOADING = 300.0
"""Seconds for engines to load on a busy machine; it takes 12 for one on an idle core."""


def require_vllm() -> None:
    """Skip where there is no vLLM, unless the run asks for it."""
    if PYTHON.exists():
        return
    if os.environ.get("PDSERVE_REQUIRE_VLLM", "") not in ("", "0"):
        pytest.fail(f"PDSERVE_REQUIRE_VLLM is set, and there is no {PYTHON}", pytrace=False)
    pytest.skip("needs the environment of `make vllm`", allow_module_level=True)


class VllmCluster(Cluster):
    """`front` answers; `workers` by name are the nodes with an engine."""

    def __init__(self, home: Path, model: Path) -> None:
        super().__init__(home)
        self.model = model
        self.workers: dict[str, Node] = {}
        self.front: Node

    def __enter__(self) -> VllmCluster:
        super().__enter__()
        return self

    def make(self, role: str, name: str, *flags: str, **environ: str) -> Node:
        common = {"VLLM_CACHE_ROOT": str(CACHE)} | ONE_THREAD
        node = super().make(role, name, *flags, **(common | environ))
        node._command[0] = str(PYTHON)
        # vLLM and its libraries write lines of their own, and a killed engine is an error.
        node.expected_errors = role == "worker"
        return node

    def with_vllm(self, name: str, *flags: str) -> Node:
        """Start a worker; it is not waited for."""
        named = ("--model", str(self.model), "--served-model-name", "tiny")
        node = self.start("worker", name, "--join", self.address, *ENGINE, *named, *flags)
        self.workers[name] = node
        return node

    def open(self, **flags: Sequence[str]) -> None:
        """Start a router, two workers and a frontend, and wait until they can work. `flags`: more
        of them, by worker."""
        self.router()
        for name in ("left", "right"):
            self.with_vllm(name, "--stall-timeout", "8s", *flags.get(name, ()))
        self.front = self.frontend()
        self.wait_whole()

    def wait_whole(self) -> None:
        """Until the router sees every worker that runs, and none else."""
        running = sorted(name for name, node in self.workers.items() if not node.killed)
        eventually(lambda: self.sound() == running, lambda: self._missing(running), LOADING)

    def _missing(self, running: list[str]) -> object:
        return running, self.sound(), {name: self.workers[name].lines for name in running}

    def sound(self) -> list[str]:
        """Names of workers that can take requests; empty while the router knows of a bad one."""
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        try:
            found = self.front.post("/route", asked)["candidates"]
        except urllib.error.HTTPError as error:
            error.close()  # the model has no worker yet
            return []
        if any(one["standing"] != "sound" for one in found):
            return []
        return sorted(one["worker"] for one in found)


def processes_of_vllm(node: Node) -> list[psutil.Process]:
    """The engine process and all below it."""
    core = node.core()
    return [core, *core.children(recursive=True)]


def vllm_worker(node: Node) -> psutil.Process:
    """The process in which vLLM computes."""
    (found,) = (p for p in node.core().children() if p.cmdline()[:1] == ["VLLM::Worker"])
    return found


def wait_gone(processes: Iterable[psutil.Process]) -> None:
    """Until none of them runs. A zombie has ended; its new parent may be slow to notice."""

    def alive() -> list[str]:
        return [
            f"{process.pid} {process.status()}"
            for process in processes
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]

    eventually(lambda: not alive(), lambda: f"left behind: {alive()}")


class TokenStream:
    """One streamed completion, as token ids."""

    def __init__(self, front: Node, prompt: str, max_tokens: int) -> None:
        asked = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        data = json.dumps(asked).encode()
        self.answer = urllib.request.urlopen(f"{front.url}/v1/completions", data, PATIENCE)
        self.worker: str = self.answer.headers["x-pdserve-worker"]
        self.tokens: list[int] = []
        self.usage: Any = None

    def read(self, tokens: int = 1_000_000) -> list[int]:
        """Until so many tokens have come in all, or until the end; returns those that have come."""
        while len(self.tokens) < tokens and (line := self.answer.readline()):
            event = line.decode().removeprefix("data: ").strip()
            if not event or event == "[DONE]":
                continue
            chunk = json.loads(event)
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                self.tokens += choice["token_ids"] or []
            self.usage = chunk["usage"] or self.usage
        return self.tokens

    def close(self) -> None:
        """Go away, in the middle perhaps."""
        self.answer.close()


def answer_of(front: Node, prompt: str, max_tokens: int) -> list[int]:
    """The tokens of an undisturbed answer."""
    with contextlib.closing(TokenStream(front, prompt, max_tokens)) as stream:
        return stream.read()
