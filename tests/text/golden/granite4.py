"""Granite 4: calls as Hermes writes them."""

from __future__ import annotations

from tests.text.golden import hermes
from tests.text.golden.samples import Call, Sample

PARIS: Call = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})

SAMPLES = [
    *hermes.SAMPLES,
    Sample(
        "text around each of two calls",
        'One.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\nTwo.\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\nThree.',
        "One.\nTwo.\nThree.",
        [NOW, PARIS],
    ),
    Sample(
        "a list in a block",
        '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>',
        "",
        [NOW],
    ),
]
PIECES = hermes.PIECES
LONG_CALLS = hermes.LONG_CALLS
TRIGGER = hermes.TRIGGER
TEMPLATES = [
    '<|start_of_role|>{% if tools %}<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>',
]
