"""DeepSeek V4."""

from __future__ import annotations

from tests.text.golden.deepseek_v32 import LONG_CALLS as OLDER_CALLS
from tests.text.golden.deepseek_v32 import PIECES as OLDER_PIECES
from tests.text.golden.deepseek_v32 import dsml, dsml_samples
from tests.text.golden.samples import Sample
from tests.text.golden.tagged import PARIS, closers

SAMPLES = [
    *dsml_samples(dsml("tool_calls")),
    *(
        Sample(
            f"a block called {word}",
            f"A {dsml(word).call('get_weather', city='Paris')}",
            "A",
            [PARIS],
        )
        for word in ("toolcalls", "tool", "function_calls")
    ),
]
PIECES = [each.replace("function_calls", "tool_calls") for each in OLDER_PIECES]
LONG_CALLS = {
    case: text.replace("function_calls", "tool_calls") for case, text in OLDER_CALLS.items()
}
TRIGGER = "Well.\n<｜DSML｜tool_calls>"
TEMPLATES = [
    "{% if tools %}{{ '<｜DSML｜tool_calls>' }}",
    "{% set dsml = '｜DSML｜' %}{% if tools %}{{ '<' + dsml + 'tool_calls>' }}{{ m.tool_calls }}",
]
CLOSERS = closers("</｜DSML｜parameter>\n")
