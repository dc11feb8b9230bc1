"""Seed-OSS."""

from __future__ import annotations

from tests.text.golden.samples import Sample
from tests.text.golden.tagged import NOW, PARIS, Tags, common_samples

TAGS = Tags(
    begin=lambda name: f"<seed:tool_call>\n<function={name}>\n",
    parameter=lambda key, value: f"<parameter={key}>{value}</parameter>\n",
    end="</function>\n</seed:tool_call>",
    parameter_end="</parameter>",
    start="<seed:tool_call>",
    stop="</seed:tool_call>",
)
SAMPLES = [
    *common_samples(TAGS),
    Sample(
        "line breaks around a value",
        TAGS.call("get_weather", city="\nParis\n"),
        "",
        [PARIS],
    ),
    Sample(
        "two functions in one block",
        "<seed:tool_call>\n<function=now>\n</function>\n<function=get_weather>\n"
        "<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        "",
        [NOW, PARIS],
    ),
    Sample(
        "no block",
        "Well: <function=get_weather><parameter=city>Paris</parameter></function>",
        "Well:",
        [PARIS],
    ),
    Sample(
        "a function that is only talked about",
        "Write <function=example> and </function>.",
        "Write <function=example> and </function>.",
    ),
]
PIECES = [
    *("<seed:tool_call>", "</seed:tool_call>", "<function=", "now>", "</function>"),
    *("<parameter=", "city>", "opt_days>", "</parameter>", "\n<", "</"),
]
LONG_CALLS = {
    "call": "<seed:tool_call>\n<function=now>\n<parameter=a>%s</parameter>\n</function>",
    "blank": "<seed:tool_call>\n<function=now>\n%s</function>",
    "junk": "<seed:tool_call>\n<function=now>\nx%s</function>",
}
TRIGGER = "Well.\n<seed:tool_call>"
TEMPLATES = ["{% if tools %}{{ '<seed:tool_call>' }}\n<function=f>\n<parameter=p>"]
UNIONS_AS_TEXT = True
