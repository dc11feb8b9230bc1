"""InternLM 2 and Intern-S1."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<|action_start|>", "<|action_end|>", arguments="parameters")
SAMPLES = [
    *LAYOUT.samples(),
    Sample("a plugin", f"<|action_start|><|plugin|>\n{LAYOUT.paris}\n<|action_end|>", "", [PARIS]),
    Sample(
        "a plugin, spaced out",
        f"I ask.<|action_start|> <|plugin|>{LAYOUT.now}<|action_end|>\n",
        "I ask.",
        [NOW],
    ),
    Sample(
        "two plugins",
        f"<|action_start|><|plugin|>{LAYOUT.now}<|action_end|>\n<|action_start|><|plugin|>{LAYOUT.paris}<|action_end|>",
        "",
        [NOW, PARIS],
    ),
    Sample(
        "arguments",
        '<|action_start|><|plugin|>{"name": "get_weather", "arguments": {"city": "Paris"}}',
        "",
        [PARIS],
    ),
    Sample(
        "code",
        "<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
        "<|interpreter|>\nprint(1)",
    ),
    Sample("cut in the plugin", "a<|action_start|><|plu", "a"),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<|action_start|>"
TEMPLATES = [
    "{% if tools %}<|action_start|><|plugin|>{{ call }}<|action_end|>",
]
