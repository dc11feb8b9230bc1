"""The SGLang engine over its fake in real processes. The fake stands for the package only."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.server import serving
from tests.engines.sglang.fake_sglang import ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.server import Server

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(map(str, (ROOT, ROOT / "engines")))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--engine", f"{ENGINE}_newer", "--block-size", "4")
    with serving(None, *flags, PYTHONPATH=PATHS) as server:
        yield server


def complete(server: Server, **fields: Any) -> Any:
    body = {"prompt": "one two three " * 8, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body | fields)


def test_answers_repeat_and_the_prompt_is_found_in_the_cache(server):
    first, second = complete(server), complete(server)
    assert first["choices"] == second["choices"]
    assert second["usage"]["completion_tokens"] == 12
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["usage"]["prompt_tokens"]


def test_choices_and_logprobs(server):
    answer = complete(server, n=3, temperature=1.0, seed=5, logprobs=2)
    assert len(answer["choices"]) == 3
    assert all(len(choice["logprobs"]["tokens"]) == 12 for choice in answer["choices"])


def test_a_release_that_is_not_known_is_a_degradation(server):
    _, health = server.get("/health")
    assert "SGLang 0.9.1 is untested" in health["degraded"]["engine_untested"]
    assert server.metric('pdserve_degraded{reason="engine_untested"}') == 1


def test_a_core_that_is_killed_is_started_anew(server):
    server.core().kill()
    server.wait_for_metric("pdserve_engine_restarts_total", 1)
    server.wait_for_metric("pdserve_engine_ready", 1)
    server.wait_healthy()
    assert complete(server)["usage"]["completion_tokens"] == 12


def test_sigterm_ends_everything(server):
    assert server.end(signal.SIGTERM) == 0
    assert server.left_behind() == []
