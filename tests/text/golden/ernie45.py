"""ERNIE 4.5."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<tool_call>", "</tool_call>")
SAMPLES = [
    *LAYOUT.samples(),
    Sample("one block", f"\n\n<tool_call>\n{LAYOUT.paris}\n</tool_call>\n", "", [PARIS]),
    Sample(
        "two blocks",
        f"<tool_call>\n{LAYOUT.paris}\n</tool_call>\n<tool_call>\n{LAYOUT.now}\n</tool_call>\n",
        "",
        [PARIS, NOW],
    ),
    Sample("a response", "<response>\nMild.\n</response>\n", "Mild."),
    Sample(
        "a response before a call",
        f"<response>\nI ask.\n</response>\n\n<tool_call>\n{LAYOUT.now}\n</tool_call>",
        "I ask.",
        [NOW],
    ),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<tool_call>"
TEMPLATES = [
    '{% if tools %}<tool_call>{"name": ..., "arguments": ...}</tool_call>{{ "<response>" }}',
]
