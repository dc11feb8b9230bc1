"""GLM 4.7 and 5."""

from __future__ import annotations

from tests.text.golden.glm45 import LONG_CALLS as LINES
from tests.text.golden.glm45 import PIECES, TRIGGER, pair_samples
from tests.text.golden.tagged import Tags, closers, common_samples

TAGS = Tags(
    begin=lambda name: f"<tool_call>{name}",
    parameter=lambda key, value: f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    end="</tool_call>",
    parameter_end="</arg_value>",
    start="<tool_call>",
    stop="</tool_call>",
    pairs=True,
    sure=True,
)
SAMPLES = [*common_samples(TAGS), *pair_samples(TAGS)]
LONG_CALLS = {case: text.replace("\n", "") for case, text in LINES.items()}
TEMPLATES = [
    "{% if tools %}<tool_call>{{ f }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>"
]
CLOSERS = closers("</arg_value>")
UNIONS_AS_TEXT = True
__all__ = ["CLOSERS", "LONG_CALLS", "PIECES", "SAMPLES", "TEMPLATES", "TRIGGER", "UNIONS_AS_TEXT"]
