"""DeepSeek V4.1."""

from __future__ import annotations

from tests.text.golden.deepseek_v32 import LONG_CALLS as OLDER_CALLS
from tests.text.golden.deepseek_v32 import PIECES as OLDER_PIECES
from tests.text.golden.deepseek_v32 import dsml, dsml_samples
from tests.text.golden.samples import Sample
from tests.text.golden.tagged import PARIS, closers


def spaced(text: str) -> str:
    return (
        text.replace("｜function_calls", "｜ calls")
        .replace("｜inv", "｜ inv")
        .replace("｜par", "｜ par")
    )


SAMPLES = [
    *dsml_samples(dsml("calls", " "), " "),
    Sample("words of V4", dsml("tool_calls").call("get_weather", city="Paris"), "", [PARIS]),
]
PIECES = [*map(spaced, OLDER_PIECES), "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"]
LONG_CALLS = {case: spaced(text) for case, text in OLDER_CALLS.items()}
TRIGGER = "Well.\n<｜DSML｜ calls>"
TEMPLATES = ["{% if tools %}{{ '<｜DSML｜ calls>' }}{{ m.tool_calls }}"]
CLOSERS = closers("</｜DSML｜ parameter>\n")
