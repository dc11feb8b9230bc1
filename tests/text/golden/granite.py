"""Granite 3: a list without an end."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<|tool_call|>", "")
SAMPLES = [
    *LAYOUT.samples(),
    Sample("with space", f"<|tool_call|> \n [{LAYOUT.paris}]\n", "", [PARIS]),
    Sample(
        "the marker as text", f"Hm. <tool_call>[{LAYOUT.paris}, {LAYOUT.now}]", "Hm.", [PARIS, NOW]
    ),
    Sample("the end of a block", f"<tool_call>[{LAYOUT.now}]</tool_call>", "", [NOW]),
    Sample("the end of the text", f"<|tool_call|>[{LAYOUT.now}]<|end_of_text|>", "", [NOW]),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<|tool_call|>"
TEMPLATES = [
    "<|start_of_role|>{% if tools %}respond with <|tool_call|> and a list",
]
