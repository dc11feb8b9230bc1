"""Llama 4 where its template asks for JSON."""

from __future__ import annotations

from tests.text.golden import llama3_json
from tests.text.golden.samples import Sample

PARIS = ("get_weather", {"city": "Paris"})
CALL = '{"name": "get_weather", "parameters": {"city": "Paris"}}'

SAMPLES = [
    *llama3_json.SAMPLES,
    Sample("behind an empty pair", f"<|python_start|><|python_end|>{CALL}", "", [PARIS]),
    Sample("between markers", f"<|python_start|>{CALL}<|python_end|>", "", [PARIS]),
    Sample(
        "text in the pair",
        f"<|python_start|>I ask.<|python_end|>{CALL}{CALL}",
        "I ask.",
        [PARIS, PARIS],
    ),
    Sample("text before", f"I ask.\n<|python_start|>{CALL}<|python_end|>", "I ask.", [PARIS]),
    Sample("text after", f"<|python_start|>{CALL}<|python_end|>\nDone.", "Done.", [PARIS]),
    Sample("the end is missing", f"<|python_start|>{CALL}", "", [PARIS]),
    Sample(
        "an unknown tool between markers",
        '<|python_start|>{"name": "fly", "parameters": {}}<|python_end|>',
        "",
        [("fly", {})],
    ),
    Sample(
        "an unknown tool behind them",
        '<|python_start|><|python_end|>{"name": "fly", "parameters": {}}',
        '{"name": "fly", "parameters": {}}',
    ),
    Sample("code", "<|python_start|>print(1)<|python_end|>", "print(1)"),
    Sample(
        "cut short by the end",
        '<|python_start|>{"name": "plan", "parameters": {"steps": [<|python_end|>',
        "",
        [("plan", {"steps": []})],
    ),
]
PIECES = [*llama3_json.PIECES, "<|python_start|>", "<|python_end|>"]
LONG_CALLS = llama3_json.LONG_CALLS
TRIGGER = "{"
TEMPLATES = [
    '<|header_start|>{% if tools %}{"name": name, "parameters": arguments}<|python_start|>',
]
