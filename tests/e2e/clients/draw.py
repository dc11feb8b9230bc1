"""Which clients a run takes: all of them without a time budget, else three, drawn by the commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.support.seeds import is_long, number_for, run_seed

if TYPE_CHECKING:
    from collections.abc import Iterable

SDKS: Final = {
    "LangChain": ("langchain_agent.py", "openai"),
    "LlamaIndex": ("llamaindex_agent.py", "llamaindex"),
    "Pydantic-AI": ("pydantic_ai_agent.py", "openai"),
    "OpenAI Agents SDK": ("openai_agents.py", "openai"),
    "Vercel AI SDK": ("ai_sdk.mjs", "node"),
    "Ollama for Python": ("ollama_client.py", "openai"),
    "Ollama for JavaScript": ("ollama_js.mjs", "node"),
}
"""A section of docs/clients.md: its program, and the environment that runs it."""
AGENTS: Final = ("OpenCode", "Aider")
"""Further sections, of programs that bring everything with them."""
IN_A_RUN: Final = 3


def drawn(seed: str) -> list[str]:
    """The clients of a run with this seed."""
    clients = [*SDKS, *AGENTS]
    return sorted(clients, key=lambda name: number_for(seed, name))[:IN_A_RUN]


def taken(clients: Iterable[str]) -> list[str]:
    """Those of some clients that this run takes."""
    return [name for name in clients if is_long() or name in drawn(run_seed())]


def scene_of(name: str, scenes: Iterable[str]) -> list[str]:
    """The scenes of a client whose program takes seconds to start: all, or one of them."""
    if not taken([name]):
        return []
    ordered = sorted(scenes, key=lambda scene: number_for(run_seed(), name, scene))
    return ordered if is_long() else ordered[:1]
