"""Step3-VL: Hermes' calls between markers."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<tool_call>", "</tool_call>")
SAMPLES = [
    *LAYOUT.samples(),
    Sample(
        "one call between markers",
        f"<tool_calls>\n<tool_call>\n{LAYOUT.paris}\n</tool_call>\n</tool_calls>",
        "",
        [PARIS],
    ),
    Sample(
        "two calls between markers",
        f"I ask.\n<tool_calls>\n<tool_call>\n{LAYOUT.now}\n</tool_call>\n<tool_call>\n"
        f"{LAYOUT.paris}\n</tool_call>\n</tool_calls>\n",
        "I ask.",
        [NOW, PARIS],
    ),
    Sample("markers around nothing", "a<tool_calls></tool_calls>b", "ab"),
]
PIECES = [*LAYOUT.pieces(), "<tool_calls>", "</tool_calls>"]
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<tool_call>"
TEMPLATES = [
    "{% if tools %}<tool_calls>\\n<tool_call>\\n{...}\\n</tool_call>",
]
