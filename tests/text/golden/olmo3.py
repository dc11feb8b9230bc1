"""OLMo 3."""

from __future__ import annotations

from tests.text.golden.marked_python import NOW, PARIS, python_samples
from tests.text.golden.samples import Sample

START, END = "<function_calls>", "</function_calls>"


def block(calls: str) -> str:
    return f"{START}{calls}{END}"


SAMPLES = [
    *python_samples(START, END, block, "\n"),
    Sample("a list of calls", block('[get_weather(city="Paris"), now()]'), "", [PARIS, NOW]),
    Sample(
        "a bracket that opens nothing",
        block("plan(x=1])\nnow()"),
        "plan(x=1])",
        [NOW],
    ),
]
PIECES = [START, END, "now", "(", ")", "a=", "'b'", "=", "b'", "True", "now()", "</func"]
LONG_CALLS = {
    "call": "<function_calls>now(a='%s')</function_calls>",
    "list": "<function_calls>now(a=['%s'])</function_calls>",
    "blank": "<function_calls>%snow()</function_calls>",
}
TRIGGER = "Well.\n<function_calls>"
TEMPLATES = ["{% if tools %}<function_calls>{{ f }}{% endif %}<|im_start|>environment"]
WITHOUT_DEFINITIONS = True
