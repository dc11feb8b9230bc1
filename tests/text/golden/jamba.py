"""Jamba 1.5 to 1.7."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<tool_calls>", "</tool_calls>")
SAMPLES = [
    *LAYOUT.samples(),
    Sample("a space before", f" <tool_calls>[\n    {LAYOUT.now}\n]</tool_calls>", "", [NOW]),
    Sample(
        "each in a line",
        f"<tool_calls>[\n    {LAYOUT.now},\n    {LAYOUT.paris}\n]</tool_calls>",
        "",
        [NOW, PARIS],
    ),
    Sample(
        "looks like a marker",
        "<tool_call> </tool_call> <tool_c",
        "<tool_call> </tool_call> <tool_c",
    ),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<tool_calls>"
CLOSERS = ("\n]",)
TEMPLATES = [
    '{% set bom = "<|bom|>" %}{% if tools %}<tool_calls>[]</tool_calls>',
]
