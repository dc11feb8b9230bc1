"""What a newcomer does: start it without a flag, paste the command it prints, ask a question."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.readme import Places, blocks, flags, run, section
from tests.e2e.server import PATIENCE, Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runtime() -> Iterator[str]:
    """A runtime directory in which there is no other server."""
    with tempfile.TemporaryDirectory(prefix="pdserve-") as folder:
        yield folder


@pytest.fixture(scope="module")
def server(runtime: str) -> Iterator[Server]:
    """The bundled model with the default engine, as README starts it for tools."""
    (start, _) = blocks(section("JSON and tools"))[1].splitlines()
    with serving(None, *flags(start, Places()), XDG_RUNTIME_DIR=runtime) as server:
        yield server


def test_readmes_view_shows_the_server(server, runtime):
    commands = blocks(section("See what it does"))[0].splitlines()
    assert commands == ["pdserve status", "pdserve top"]
    server.post("/v1/completions", {"prompt": "hello", "max_tokens": 4})
    command = [sys.executable, "-m", *shlex.split(commands[0])]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
    environ = clean | {"PDSERVE_CONFIG": "none", "XDG_RUNTIME_DIR": runtime}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    shown = [line.partition("  ")[0] for line in done.stdout.splitlines()]
    example = section("See what it does").partition("```text\n")[2].partition("```")[0]
    labels = [line.partition("  ")[0] for line in example.splitlines()[1:6]]
    assert labels == ["requests", "tokens", "TTFT", "ITL", "KV cache"]
    assert set(labels) <= set(shown)
    assert f"pdserve at 127.0.0.1:{server.port} as " in done.stdout


def test_the_command_in_the_ready_line_works_as_it_stands(server):
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    command = server.wait_for_line(r"try: (curl .*)")[1]
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0
    assert done.stdout.startswith("data: {")
    assert done.stdout.rstrip().endswith("data: [DONE]")
    assert '"error"' not in done.stdout


def test_the_bundled_model_knows_what_it_belongs_to(server):
    command = [sys.executable, "-m", "pdserve", "chat", "--url", server.url]
    done = subprocess.run(
        command, input="Who are you?", capture_output=True, text=True, timeout=PATIENCE
    )
    assert "pdserve" in done.stdout, done.stderr


def test_equal_questions_get_equal_answers(server):
    question = {"messages": [{"role": "user", "content": "What is a block?"}], "max_tokens": 32}
    first, again = (server.post("/v1/chat/completions", question) for _ in range(2))
    assert first["choices"] == again["choices"]
    assert again["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]


@pytest.fixture
def places(server: Server) -> Places:
    """README's port 8000 is this server's."""
    places = Places()
    places.ports["8000"] = int(server.url.rpartition(":")[2])
    return places


def test_readmes_answer_fits_its_schema(places):
    answer = json.loads(run(blocks(section("JSON and tools"))[0], places))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    city = json.loads(choice["message"]["content"])
    assert set(city) == {"name", "continent"}
    assert city["continent"] in ("Africa", "America", "Europe")


def test_readmes_tool_is_called(server):
    (_, example) = blocks(section("JSON and tools"))[1].splitlines()
    python, *words = shlex.split(example)
    assert python == "python"
    command = [sys.executable, *words, "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("temperature(city=")


def test_the_tools_example_says_in_a_line_that_nobody_is_there():
    command = [sys.executable, "examples/tools.py", "--url", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "examples/tools.py: Connection error.\n"
