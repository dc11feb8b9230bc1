"""Clients that people use, unchanged, against a real server, connected as docs/clients.md says.

Each calls a tool and has its result answered, meets a context that is full and knows what that is,
and hangs up in the middle of a stream, which frees its request. The model is a script; frontend,
templates, parsers and streams are the product's. A run takes three of the clients, drawn by the
commit, and all of them without a time budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.clients.conftest import ANSWER, CONTEXT
from tests.e2e.clients.draw import SDKS, taken
from tests.e2e.clients.snippets import snippet

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FULL: dict[str, dict[str, Any]] = {
    "LangChain": {"kind": "ContextOverflowError", "code": "context_length_exceeded"},
    "LlamaIndex": {"kind": "BadRequestError", "code": "context_length_exceeded"},
    "Pydantic-AI": {"kind": "ModelContextWindowExceededError"},
    "OpenAI Agents SDK": {"kind": "BadRequestError", "code": "context_length_exceeded"},
    "Vercel AI SDK": {"kind": "AI_APICallError", "code": "context_length_exceeded"},
    "Ollama for Python": {"kind": "ResponseError"},
    "Ollama for JavaScript": {"kind": "ResponseError"},
}
"""What each knows of a full context."""


def play_section(play: Callable[..., dict[str, Any]], name: str) -> dict[str, Any]:
    program, environment = SDKS[name]
    language = "js" if environment == "node" else "python"
    return play(program, environment, snippet(name, language))


@pytest.mark.parametrize("name", taken(SDKS))
def test_a_client_uses_tools_meets_a_full_context_and_hangs_up(
    play: Callable[..., dict[str, Any]], name: str
) -> None:
    told = play_section(play, name)
    assert told["tool"] == {"called": [{"city": "Paris"}], "answer": ANSWER}
    full, known = told["full"], FULL[name]
    assert known["kind"] in full["kinds"], full
    assert full["status"] == 400
    assert full["code"] == known.get("code", full["code"])
    assert "context length" in full["message"]
    assert "la la" in told["abort"]["read"]
    if name == "Ollama for Python":
        look_at_ollamas_own(told["own"])


def look_at_ollamas_own(own: dict[str, Any]) -> None:
    """What only Ollama's API has, as its client reads it."""
    assert own["capabilities"] == ["completion", "tools", "thinking"]
    assert own["context"] == own["running"] == [CONTEXT]
    assert own["generated"] == "Nothing to do."
    assert (own["reason"], own["loaded"]) == ("stop", "load")
    assert "get_weather" in own["streamed"]
    assert all(time > 0 for time in own["times"])
    assert abs(sum(own["times"]) - own["total"]) <= 2  # each is rounded to a nanosecond
    assert min(own["counts"]) > 0
