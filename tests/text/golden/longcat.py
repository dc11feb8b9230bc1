"""LongCat-Flash: an object between tags of its own."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<longcat_tool_call>", "</longcat_tool_call>")
SAMPLES = [
    *LAYOUT.samples(),
    Sample(
        "one call in a block",
        f"I ask.\n<longcat_tool_call>\n{LAYOUT.paris}\n</longcat_tool_call>\n",
        "I ask.",
        [PARIS],
    ),
    Sample(
        "two blocks",
        f"<longcat_tool_call>\n{LAYOUT.now}\n</longcat_tool_call>"
        f"<longcat_tool_call>\n{LAYOUT.paris}\n</longcat_tool_call>",
        "",
        [NOW, PARIS],
    ),
    Sample("another family's tags", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<longcat_tool_call>"
TEMPLATES = [
    "{% if tools %}<longcat_tool_call>{{ call | tojson }}</longcat_tool_call>",
]
