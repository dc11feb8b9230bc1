"""Granite 20B for function calling: a marker before each object."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<function_call>", "")
SAMPLES = [
    *LAYOUT.samples(),
    Sample("one object", f"<function_call> {LAYOUT.paris}", "", [PARIS]),
    Sample(
        "two objects",
        f"Hm.\n<function_call> {LAYOUT.paris}\n<function_call> {LAYOUT.now}",
        "Hm.",
        [PARIS, NOW],
    ),
    Sample(
        "an object between texts", f"One. <function_call> {LAYOUT.now}\nTwo.", "One. Two.", [NOW]
    ),
    Sample("text after an object", f"<function_call> {LAYOUT.now} ok", "ok", [NOW]),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<function_call>"
TEMPLATES = [
    "{% if tools %}<function_call> {{ call | tojson }}",
]
