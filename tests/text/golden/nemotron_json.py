"""Llama-Nemotron and Nemotron Nano v2."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<TOOLCALL>", "</TOOLCALL>")
SAMPLES = [
    *LAYOUT.samples(),
    Sample("an end alone", "a</TOOLCALL>b", "ab"),
    Sample("looks like a marker", "<TOOLCALLS> <toolcall> <TOOL", "<TOOLCALLS> <toolcall> <TOOL"),
    Sample(
        "a call that nothing lists",
        f"<TOOLCALL>{LAYOUT.now}\n{LAYOUT.paris}</TOOLCALL>",
        "",
        [NOW, PARIS],
    ),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<TOOLCALL>"
TEMPLATES = [
    '{% if tools %}<TOOLCALL>[{"name": ..., "arguments": ...}]</TOOLCALL>',
]
