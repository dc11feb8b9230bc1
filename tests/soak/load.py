"""Very many short requests: the load generator of `bench/`, and prompts never asked before."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from tests.chaos.cluster import Node

SOURCE = Path(__file__).parents[2] / "bench" / "loadgen" / "loadgen.cpp"
WORDS = ("a", "cat", "the", "hat", "is", "on", "no", "yes", "why", "what", "then", "some", "ever")
CHAT = "/v1/chat/completions"


def build(folder: Path) -> Path:
    """Compile the generator; a test without a compiler is skipped."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the load generator needs g++")
    program = folder / "loadgen"
    subprocess.run([compiler, "-O1", "-std=c++17", "-o", str(program), str(SOURCE)], check=True)
    return program


def body(random: Random, model: str, least: int) -> str:
    """One request in a line: short, half of them streamed, one in eight with two choices. `least`:
    words of its prompt."""
    text = " ".join(random.choices(WORDS, k=random.randint(least, least + 20)))
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"{random.getrandbits(48):x} {text}"}],
        "max_tokens": random.randint(1, 8),
        "ignore_eos": True,
        "temperature": 0,
    }
    if random.random() < 0.5:
        fields["stream"] = True
    if random.random() < 0.125:
        fields["n"] = 2
    return json.dumps(fields)


class Load:
    """Portions of requests to one frontend, over connections that are closed after each."""

    def __init__(
        self, program: Path, frontend: Node, model: str, random: Random, *, least: int = 3
    ) -> None:
        """`least`: words of a prompt."""
        self._least = least
        self._program = program
        self._frontend = frontend
        self._model = model
        self._random = random
        self._file = program.parent / "bodies"

    def send(self, count: int, *, connections: int = 32) -> dict[str, Any]:
        """What the generator reports, once all have been answered."""
        lines = (body(self._random, self._model, self._least) for _ in range(count))
        self._file.write_text("\n".join(lines))
        command = self._command(count, connections)
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
        report: dict[str, Any] = json.loads(found.stdout)
        return report

    @contextlib.contextmanager
    def streams(self, count: int, *, tokens: int, vanish: bool) -> Iterator[None]:
        """So many streams at a time; at the end they are waited for, or `vanish`."""
        fields = {
            "model": self._model,
            "messages": [{"role": "user", "content": "a long story"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self._file.write_text(json.dumps(fields))
        command = self._command(count, count)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield
                if not vanish:
                    output, _ = process.communicate(timeout=900)
                    report = json.loads(output)
                    assert (report["requests"], report["errors"]) == (count, 0), report
            finally:
                process.kill()

    def _command(self, count: int, connections: int) -> list[str]:
        where = ["--port", str(self._frontend.port), "--path", CHAT]
        what = ["--bodies", str(self._file), "--requests", str(count)]
        how = ["--connections", str(connections), "--warmup", "0", "--seconds", "800"]
        return [str(self._program), "load", *where, *what, *how]
