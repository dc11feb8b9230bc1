"""Hunyuan 3."""

from __future__ import annotations

from tests.text.golden.glm45 import pair_samples
from tests.text.golden.samples import Sample
from tests.text.golden.tagged import NOW, PARIS, Tags, closers, common_samples

OPEN = ":opensource"


def tags(suffix: str) -> Tags:
    return Tags(
        begin=lambda name: f"<tool_call{suffix}>{name}<tool_sep{suffix}>\n",
        parameter=lambda key, value: (
            f"<arg_key{suffix}>{key}</arg_key{suffix}>\n"
            f"<arg_value{suffix}>{value}</arg_value{suffix}>\n"
        ),
        end=f"</tool_call{suffix}>",
        parameter_end=f"</arg_value{suffix}>",
        start=f"<tool_call{suffix}>",
        stop=f"</tool_call{suffix}>",
        pairs=True,
        sure=True,
    )


OPEN_TAGS, TAGS = tags(OPEN), tags("")


def around(calls: str, suffix: str = OPEN) -> str:
    return f"<tool_calls{suffix}>\n{calls}\n</tool_calls{suffix}>"


TWO = OPEN_TAGS.call("now") + "\n" + OPEN_TAGS.call("get_weather", city="Paris")
SAMPLES = [
    *common_samples(OPEN_TAGS),
    *pair_samples(OPEN_TAGS),
    Sample("a block around calls", f"So:\n{around(TWO)}", "So:", [NOW, PARIS]),
    Sample("an empty block around nothing", f"So{around('')}.", "So\n\n."),
    Sample(
        "tags without a suffix",
        around(TAGS.call("get_weather", city="Paris") + TAGS.call("now"), ""),
        "",
        [PARIS, NOW],
    ),
    Sample(
        "no separator",
        "<tool_calls><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "</tool_call></tool_calls>",
        "",
        [PARIS],
    ),
    Sample("the block's end is missing", f"<tool_calls:opensource>\n{TWO}", "", [NOW, PARIS]),
]
PIECES = [
    *("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "now", "<tool_sep>"),
    *("<tool_call:opensource>", "<tool_sep:opensource>", "</tool_call:opensource>"),
    *("<arg_key>", "city", "</arg_key>", "<arg_value>", "</arg_value>", "</arg"),
]
LONG_CALLS = {
    "call": "<tool_call>now<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value></tool_call>",
    "blank": "<tool_calls>\n<tool_call>now<tool_sep>\n%s</tool_call>",
    "junk": "<tool_call>now<tool_sep>x%s</tool_call>",
}
TRIGGER = "Well.\n<tool_calls:opensource>"
TEMPLATES = [
    "{% if tools %}{{ '<tool_call>' + name + '<tool_sep>' }}\n<arg_key>k</arg_key>\n<arg_value>",
    "{% set HYTK = ':opensource' %}{% if tools %}{{ '<tool_sep' ~ HYTK }}{{ '<arg_key' ~ HYTK }}",
]
UNIONS_AS_TEXT = True
CLOSERS = closers("</arg_value:opensource>\n", "</arg_value>\n")
