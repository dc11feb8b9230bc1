"""What a newcomer does: start it without a flag, paste the command it prints, ask a question."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.server import PATIENCE, Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The bundled model with the default engine."""
    with serving(None) as server:
        yield server


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
