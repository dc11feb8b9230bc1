"""Phi-4-mini and FireFunction 2."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("functools[", "")
SAMPLES = [
    *LAYOUT.samples(),
    Sample("the newer marker", f"<|tool_call|>[{LAYOUT.paris}]<|/tool_call|>", "", [PARIS]),
    Sample(
        "parameters",
        'functools[{"name": "get_weather", "parameters": {"city": "Paris"}}]',
        "",
        [PARIS],
    ),
    Sample(
        "a module of Python",
        "from functools import cache, functools.wraps",
        "from functools import cache, functools.wraps",
    ),
    Sample("an unknown tool", 'functools[{"name": "f"}]', 'functools[{"name": "f"}]'),
    Sample("no list", f"Well.\nfunctools{LAYOUT.paris}\nBye.", "Well.\nBye.", [PARIS]),
    Sample("both markers", f"<|tool_call|>functools[{LAYOUT.now}]<|/tool_call|>", "", [NOW]),
]
PIECES = LAYOUT.pieces()
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\nfunctools["
TEMPLATES = [
    "{% if tools %}functools[{{ calls | join(', ') }}]",
]
