"""Apriel 1.5 and 1.6."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<tool_calls>", "</tool_calls>")
SAMPLES = [
    *LAYOUT.samples(),
    Sample(
        "in the response",
        f"[BEGIN FINAL RESPONSE]\nI ask.\n{LAYOUT.calls(LAYOUT.now)}\n[END FINAL RESPONSE]",
        "I ask.",
        [NOW],
    ),
    Sample("a response", "[BEGIN FINAL RESPONSE]\nMild.\n[END FINAL RESPONSE]", "Mild."),
    Sample("an id", LAYOUT.calls(LAYOUT.paris[:-1] + ', "id": "7"}', LAYOUT.now), "", [PARIS, NOW]),
    Sample("looks like a marker", "[BEGIN FINAL <tool_calls", "[BEGIN FINAL <tool_calls"),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<tool_calls>"
TEMPLATES = [
    '{% if tools %}<tool_calls>[{"name": <name>, "arguments": <args>}]</tool_calls>',
]
