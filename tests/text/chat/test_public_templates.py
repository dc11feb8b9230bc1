"""Public chat templates of many families render as transformers renders them, byte for byte.

`.ci/templates.sh` downloads them.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import pytest

from pdserve.errors import InvalidRequest
from pdserve.text.chat.chat_template import ChatTemplate
from tests.text.chat import reference
from tests.text.chat.conversations import CONVERSATIONS, Conversation

PINNED = Path(__file__).parents[3] / ".ci" / "templates.txt"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve"
FOLDER = CACHE / f"templates-{sha256(PINNED.read_bytes()).hexdigest()[:16]}"
TEMPLATES = sorted(FOLDER.glob("*.jinja")) if (FOLDER / ".complete").exists() else []

OTHERWISE = {
    # `dict.from_keys(pairs)` makes a dictionary in jinja2 and not in transformers.
    "ai-sage-GigaChat3.1-Audio-10B-A1.8B": {
        name for name, each in CONVERSATIONS.items() if each.tools
    },
}
"""Conversations that pdserve renders and transformers refuses."""


def test_the_templates_are_there():
    if os.environ.get("PDSERVE_REQUIRE_TEMPLATES", "") in ("", "0") and not TEMPLATES:
        pytest.skip("without public chat templates: bash .ci/templates.sh")
    assert len(TEMPLATES) == 786


@pytest.mark.long
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_renders_as_transformers_renders_it(path: Path):
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(source, reference.SPECIAL, now=lambda: reference.NOW)
    ours = {name: rendered(template, each) for name, each in CONVERSATIONS.items()}
    theirs = {name: reference.render(source, each) for name, each in CONVERSATIONS.items()}
    unequal = {name for name in ours if not equal(ours[name], theirs[name])}
    assert unequal == OTHERWISE.get(path.stem, set())


def rendered(template: ChatTemplate, conversation: Conversation) -> str | InvalidRequest:
    try:
        return template.render(
            conversation.messages,
            tools=conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.generation,
            continue_final_message=conversation.continued,
            template_kwargs=conversation.kwargs,
        )
    except InvalidRequest as error:
        return error


def equal(ours: str | InvalidRequest, theirs: reference.Rendering) -> bool:
    """The same text; or both refuse, and the client is told the template's own words."""
    if isinstance(ours, str) or theirs.text is not None:
        return ours == theirs.text
    assert ours.http_status == 400
    return any(
        words in ours.message or words.startswith("continue_final_message is set")
        for words in theirs.refusals
    )
