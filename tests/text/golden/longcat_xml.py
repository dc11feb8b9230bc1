"""LongCat 2 and LongCat-Flash-Lite."""

from __future__ import annotations

from tests.text.golden.glm45 import LONG_CALLS as OTHER_CALLS
from tests.text.golden.glm45 import PIECES as OTHER_PIECES
from tests.text.golden.glm45 import pair_samples
from tests.text.golden.tagged import Tags, closers, common_samples


def turned(text: str) -> str:
    """Text of GLM in LongCat's tags."""
    for name in ("tool_call", "arg_key", "arg_value", "arg\n"):
        text = text.replace(f"<{name}", f"<longcat_{name}").replace(
            f"</{name}", f"</longcat_{name}"
        )
    return text


TAGS = Tags(
    begin=lambda name: f"<longcat_tool_call>{name}\n",
    parameter=lambda key, value: (
        f"<longcat_arg_key>{key}</longcat_arg_key>\n"
        f"<longcat_arg_value>{value}</longcat_arg_value>\n"
    ),
    end="</longcat_tool_call>",
    parameter_end="</longcat_arg_value>",
    start="<longcat_tool_call>",
    stop="</longcat_tool_call>",
    pairs=True,
    sure=True,
)
SAMPLES = [*common_samples(TAGS), *pair_samples(TAGS)]
PIECES = list(map(turned, OTHER_PIECES))
LONG_CALLS = {case: turned(text) for case, text in OTHER_CALLS.items()}
TRIGGER = "Well.\n<longcat_tool_call>"
TEMPLATES = ["{% if tools %}{{ '<longcat_tool_call>' + f }}\n<longcat_arg_key>{{ k }}"]
UNIONS_AS_TEXT = True
CLOSERS = closers("</longcat_arg_value>\n")
