"""Starts the systems that are compared, each placed alike.

Frontend and router have one core, all else the other: workers, engine cores, load generator.
Dynamo's router is in its frontend's process; pdserve's is, too, or is a process of its own.
SGLang's and vLLM's routers stand before two servers that answer with ready-made bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.frontend import FRONT, OTHER, child_processes, cpu_seconds, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["CHAT", "WORKERS", "System", "dynamo", "model_of", "pdserve", "proxy"]

CHAT: Final = "/v1/chat/completions"
WORKERS: Final = 2
_BLOCK: Final = 32
_PATIENCE: Final = 90.0
_LONGEST: Final = 131_072
"""Tokens of a prompt and its answer."""


@dataclass
class System:
    """A running arm."""

    name: str
    port: int
    front: list[int]
    """Processes of frontend and router."""
    workers: list[int]
    """All other processes."""
    started: float
    """Seconds from the first process to the first answer."""
    tokenises: bool = True
    """False: it passes requests on and does not know tokens."""
    idle: int = 0
    """PSS of all processes before the load, in bytes."""
    python: dict[str, int] = field(default_factory=dict)
    """Processes whose profile py-spy can take, by what they do."""

    def cpu(self) -> tuple[float, float]:
        """CPU seconds so far: of frontend and router, and of all others."""
        return sum(map(cpu_seconds, self.front)), sum(map(cpu_seconds, self.workers))

    def held(self) -> int:
        """PSS of all processes, in bytes."""
        return sum(map(_pss, (*self.front, *self.workers)))


@contextlib.contextmanager
def pdserve(model: Path, policy: str, *, inside: bool) -> Iterator[System]:
    """Starts frontend, router and workers; engine cores are children of workers. `inside`: the
    router is in the frontend's process, else in its own."""
    program = [sys.executable, "-m", "pdserve"]
    seed, port = f"127.0.0.1:{free_port()}", free_port()
    worker = [*program, "--role=worker", "--join", seed, "--model", str(model), "--engine", "sim"]
    worker += ["--served-model-name", "bench", "--threads", "1", "--block-size", str(_BLOCK)]
    worker += ["--engine-option", "preset=dynamo-mocker", "--engine-option", "slowdown=0.001"]
    worker += ["--max-model-len", str(_LONGEST)]
    frontend = [*program, "--role=frontend", "--port", str(port)]
    router = ["--listen", seed, "--policy", policy]
    front = (
        {"frontend with its router": [*frontend, "--with-router", *router]}
        if inside
        else {
            "frontend": [*frontend, "--join", seed],
            "router": [*program, "--role=router", *router],
        }
    )
    commands = [(command, FRONT) for command in front.values()] + [(worker, OTHER)] * WORKERS
    name = f"pdserve, {policy}{', router inside' if inside else ''}"
    with _running(name, port, commands, len(front), {}) as system:
        system.python = dict(zip(front, system.front, strict=False))
        yield system


@contextlib.contextmanager
def dynamo(python: Path, model: Path, mode: str, tokenizer: str = "") -> Iterator[System]:
    """Starts frontend and mocker; the mocker's process has both workers."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": folder,
            "DYN_LOG": "error",
            "HF_HUB_OFFLINE": "1",
        }
        frontend = [str(python), "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        frontend += ["--http-port", str(port), "--router-mode", mode]
        frontend += ["--kv-cache-block-size", str(_BLOCK)]
        frontend += ["--tokenizer", tokenizer] if tokenizer else []
        mocker = [str(python), "-m", "dynamo.mocker", "--model-path", str(model)]
        mocker += ["--model-name", "bench", "--speedup-ratio", "1000"]
        mocker += ["--block-size", str(_BLOCK), "--num-workers", str(WORKERS)]
        name = ", ".join(["Dynamo", mode, *([tokenizer] if tokenizer else [])])
        commands = [(frontend, FRONT), (mocker, OTHER)]
        with _running(name, port, commands, 1, environment) as system:
            yield system


@contextlib.contextmanager
def proxy(name: str, launch: list[str], generator: Path) -> Iterator[System]:
    """Starts a router that passes requests on, before two servers with ready-made answers."""
    port, ports = free_port(), [free_port() for _ in range(WORKERS)]
    servers = [
        ([str(generator), "serve", "--port", str(one), "--openai", "1"], OTHER) for one in ports
    ]
    router = [*launch, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    router += ["--worker-urls", *(f"http://127.0.0.1:{one}" for one in ports)]
    # Its metrics have a port of their own, which another router may have.
    router += ["--prometheus-port", str(free_port())]
    with _running(name, port, [(router, FRONT), *servers], 1, {}) as system:
        system.tokenises = False
        yield system


@contextlib.contextmanager
def _running(
    name: str,
    port: int,
    commands: list[tuple[list[str], int]],
    front: int,
    environment: Mapping[str, str],
) -> Iterator[System]:
    """Starts the commands, of which the first `front` are frontend and router."""
    begin = time.perf_counter()
    with _processes(commands, environment) as started:
        _first_answer(name, port, lambda: any(one.poll() is not None for one in started))
        took = time.perf_counter() - begin
        time.sleep(1.0)
        pids = [process.pid for process in started]
        system = System(
            name, port, _with_children(pids[:front]), _with_children(pids[front:]), took
        )
        system.idle = system.held()
        yield system


@contextlib.contextmanager
def _processes(
    commands: list[tuple[list[str], int]], extra: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts each command on its core; ends the processes and their children afterwards."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command, core in commands:
            started.append(
                subprocess.Popen(
                    ["taskset", "-c", str(core), *command],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, **extra},
                    start_new_session=True,
                )
            )
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _first_answer(name: str, port: int, ended: Callable[[], bool]) -> None:
    """Sends requests until one is answered. Raises `RuntimeError` if it takes too long, or when a
    process ends."""
    body = {"model": "bench", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    ask = urllib.request.Request(
        f"http://127.0.0.1:{port}{CHAT}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and not ended():
        with contextlib.suppress(OSError), urllib.request.urlopen(ask, timeout=5):
            return
        time.sleep(0.02)
    raise RuntimeError(f"{name} does not answer on port {port}; start it by hand to see why")


def _with_children(pids: list[int]) -> list[int]:
    found, look = list(pids), list(pids)
    while look:
        children = child_processes(look.pop())
        found += children
        look += children
    return found


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        found = re.search(r"^Pss:\s+(\d+) kB", text, re.M)
        return int(found[1]) * 1024 if found else 0
    return 0


def model_of(model: Path) -> Path:
    """Adds the fields that Dynamo needs to `config.json`, and room for long prompts."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 2,
        "bos_token_id": 0,
        "max_position_embeddings": _LONGEST,
    }
    path.write_text(json.dumps({**config, **sizes, **more}))
    return model
