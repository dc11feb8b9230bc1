"""Command R7B and Command A."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name", arguments="parameters")
SAMPLES = [
    *LAYOUT.samples(),
    Sample(
        "with ids, in lines",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather",'
        ' "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [PARIS, NOW],
    ),
    Sample("a response", "<|START_RESPONSE|>Mild.<|END_RESPONSE|>", "Mild."),
    Sample("a text", "<|START_TEXT|>Mild.<|END_TEXT|><|END_OF_TURN_TOKEN|>", "Mild."),
    Sample("name", '<|START_ACTION|>[{"name": "now", "arguments": {}}]<|END_ACTION|>', "", [NOW]),
    Sample("looks like a marker", "<|START_ACT <|START_RESPONSE", "<|START_ACT <|START_RESPONSE"),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<|START_ACTION|>"
CLOSERS = ("\n]",)
TEMPLATES = [
    "{% if tools %}<|START_ACTION|>[{{ calls }}]<|END_ACTION|>",
]
