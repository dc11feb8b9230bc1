"""MiniMax M1: an object in each line."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<tool_calls>", "</tool_calls>")
SAMPLES = [
    *LAYOUT.samples(),
    Sample("one call in a line", f"<tool_calls>\n{LAYOUT.now}\n</tool_calls>", "", [NOW]),
    Sample(
        "two calls in lines",
        f"Hm.\n<tool_calls>\n{LAYOUT.now}\n{LAYOUT.paris}\n</tool_calls>",
        "Hm.",
        [NOW, PARIS],
    ),
    Sample("a line is broken", f"<tool_calls>\n{LAYOUT.now}\n{{1}}\n</tool_calls>", "{1}", [NOW]),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<tool_calls>"
TEMPLATES = [
    '<beginning_of_sentence>{% if tools %}<tool_calls>\\n{"name": ...}\\n</tool_calls>',
]
