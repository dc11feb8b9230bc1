"""Frontends over a model that thinks and calls tools, for the tests of both other APIs."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from tests.frontend.support import MODEL, TOKENIZER, Client, card, frontend, tokens
from tests.support.fake_backend import Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m.role }}({{ m.tool_call_id or '' }}):"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking is defined %}{{ '!' if enable_thinking else '?' }}{% endif %}"
)
THOUGHT = "The user wants the weather."
SAID = "Let me look."
CITIES = ({"city": "Paris"}, {"city": "Rome"})


def call(arguments: dict[str, str]) -> str:
    """As Hermes' models write it."""
    body = json.dumps({"name": "get_weather", "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


PLAIN = "Hello there, my friend."
THINKING = f"<think>{THOUGHT}</think>{SAID}"
CALLING = "\n".join([THINKING, *map(call, CITIES)])


@contextlib.asynccontextmanager
async def answering(
    text: str,
    burst: int = 1,
    *,
    max_model_len: int = 4096,
    chat_template: str = TEMPLATE,
    **config: Any,
) -> AsyncIterator[Client]:
    """A frontend whose model thinks, calls tools, and always says this."""
    able = card(
        tool_parser="hermes",
        reasoning_parser="think",
        chat_template=chat_template,
        max_model_len=max_model_len,
        features=("grammar", "thinking", "bans"),
    )
    script = Script(tokens=tokens(text), repeat=False, burst=burst, cached_tokens=3)
    async with frontend(script, {MODEL: able}, **config) as client:
        yield client


def prompt(client: Client) -> str:
    """What the model was given last."""
    return TOKENIZER.decode(client.backend.requests[-1].prompt, skip_special_tokens=False)
