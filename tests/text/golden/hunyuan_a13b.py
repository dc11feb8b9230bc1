"""Hunyuan A13B."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<tool_calls>", "</tool_calls>")
SAMPLES = [
    *LAYOUT.samples(),
    Sample(
        "in an answer", f"<answer>\nI ask.\n{LAYOUT.calls(LAYOUT.now)}\n</answer>", "I ask.", [NOW]
    ),
    Sample("an answer", "<answer>\nMild.\n</answer>", "Mild."),
    Sample("the turn's name", f"助手：{LAYOUT.calls(LAYOUT.paris)}", "", [PARIS]),
    Sample("the turn's name before text", "助手：Mild.", "Mild."),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<tool_calls>"
TEMPLATES = [
    '{% if tools %}<|extra_0|><tool_calls>[{"name": ...}]</tool_calls>',
]
