"""LFM2 and LFM2.5."""

from __future__ import annotations

from tests.text.golden.marked_python import NOW, PARIS, python_samples
from tests.text.golden.samples import Sample

START, END = "<|tool_call_start|>", "<|tool_call_end|>"


def block(calls: str) -> str:
    return f"{START}[{calls}]{END}"


CITY = 'get_weather(city="Paris")'
SAMPLES = [
    *python_samples(START, END, block, ", "),
    Sample("an empty list", block(" "), ""),
    Sample("a call that is none", block(f"{CITY}, plan(x=b'z')"), "plan(x=b'z')]", [PARIS]),
    Sample(
        "JSON in a list",
        block('{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now"}'),
        "",
        [PARIS, NOW],
    ),
    Sample(
        "calls in a fence", f"{START}\n```python\n{CITY}\nnow()\n```\n{END}\n", "", [PARIS, NOW]
    ),
    Sample("the block again", f"{block(CITY)}[{CITY}]{END}Done.", "Done.", [PARIS]),
    Sample("a list behind the block", f"{block(CITY)}\n[1] says so.", "[1] says so.", [PARIS]),
]
PIECES = [START, END, "[", "]", "now", "(", ")", "a=", "'b'", ", ", "now()", "<|tool_call"]
LONG_CALLS = {
    "call": "<|tool_call_start|>[now(a='%s')]<|tool_call_end|>",
    "blank": "<|tool_call_start|>[%snow()]<|tool_call_end|>",
    "echo": "<|tool_call_start|>[now()]<|tool_call_end|>[%s",
}
TRIGGER = "Well.\n<|tool_call_start|>"
TEMPLATES = ["{% if tools %}{{ '<|tool_call_start|>[' }}{{ f }}"]
WITHOUT_DEFINITIONS = True
