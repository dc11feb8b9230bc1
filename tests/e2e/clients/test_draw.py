"""What a run takes of the clients, and what the page says of them."""

from __future__ import annotations

import re
from collections import Counter

from tests.e2e.clients.draw import AGENTS, IN_A_RUN, SDKS, drawn
from tests.e2e.clients.snippets import MODEL, PAGE, PORT, sections

CODING_AGENTS = ("Claude Code", "Codex")
"""Of tests/e2e/agents."""


def test_a_run_takes_three_clients_and_every_client_has_its_turn() -> None:
    draws = [drawn(f"{number:08x}") for number in range(300)]
    assert {len(set(draw)) for draw in draws} == {IN_A_RUN}
    turns = Counter(name for draw in draws for name in draw)
    assert set(turns) == {*SDKS, *AGENTS}
    assert min(turns.values()) > 50
    assert drawn("a") == drawn("a")


def test_every_section_of_the_page_is_of_a_client_that_is_tested() -> None:
    assert set(sections()) == {*SDKS, *AGENTS, *CODING_AGENTS}


def test_the_page_speaks_of_one_server_and_one_model() -> None:
    text = PAGE.read_text()
    assert set(re.findall(r"http://[\w.]+:\d+", text)) == {f"http://127.0.0.1:{PORT}"}
    for name, section in sections().items():
        assert MODEL in section or name.startswith("Ollama")


def test_the_readme_leads_to_the_page() -> None:
    assert "(docs/clients.md)" in (PAGE.parents[1] / "README.md").read_text()
