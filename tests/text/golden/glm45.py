"""GLM 4.5 and 4.6."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample
from tests.text.golden.tagged import NOW, PARIS, Tags, closers, common_samples

TAGS = Tags(
    begin=lambda name: f"<tool_call>{name}\n",
    parameter=lambda key, value: f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    end="</tool_call>",
    parameter_end="</arg_value>",
    start="<tool_call>",
    stop="</tool_call>",
    pairs=True,
    sure=True,
)


def pair_samples(tags: Tags) -> list[Sample]:
    """Samples of all formats with pairs of key and value."""
    spaced: Call = ("get_weather", {"city": " Paris\n"})
    return [
        Sample("blank space of a value", tags.call("get_weather", city=" Paris\n"), "", [spaced]),
        Sample("an unknown name alone", f"{tags.start}fly{tags.stop}", "", [("fly", {})]),
        Sample("a word alone", f"{tags.start}word {tags.start}", "word"),
        Sample(
            "line breaks that are spelled",
            tags.begin("get_weather").rstrip("\n")
            + "\\n"
            + tags.parameter("city", "Paris").replace("\n", "")
            + "\\n"
            + tags.parameter("opt_days", "1").replace("\n", "")
            + "\\n"
            + tags.end,
            "",
            [("get_weather", {"city": "Paris", "opt_days": 1})],
        ),
        Sample("cut in the name", f"ok {tags.start}get_w", "ok get_w"),
        Sample("cut behind the name", f"{tags.start}now\n", "", [("now", Cut(""))]),
        Sample("JSON that is no call", f'{tags.start}{{"a": 1}}{tags.stop}', '{"a": 1}'),
    ]


SAMPLES = [
    *common_samples(TAGS),
    *pair_samples(TAGS),
    Sample("the name on a line of its own", "<tool_call>\nnow\n</tool_call>", "", [NOW]),
    Sample(
        "a key's end is missing",
        "<tool_call>get_weather\n<arg_key>city\n<arg_value>Paris</arg_value>\n</tool_call>",
        "",
        [PARIS],
    ),
    Sample(
        "tags that are talked about",
        "Write <arg_key> before <arg_value>.",
        "Write before .",
    ),
    Sample(
        "quotes of an array are escaped",
        TAGS.call("plan", steps='[\\"a\\", \\"b\\"]'),
        "",
        [("plan", {"steps": ["a", "b"]})],
    ),
]
PIECES = [
    *("<tool_call>", "</tool_call>", "now", "\n", "<arg_key>", "city", "opt_days", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "</arg", '{"name": "now", "arguments": '),
]
LONG_CALLS = {
    "call": "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "blank": "<tool_call>now\n%s</tool_call>",
    "junk": "<tool_call>now\n<arg_key>a</arg_key><arg_value>1</arg_value>x%s</tool_call>",
}
TRIGGER = "Well.\n<tool_call>"
TEMPLATES = [
    "{% if tools %}{{ '<tool_call>' + name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}",
]
UNIONS_AS_TEXT = True
CLOSERS = closers("</arg_value>\n")
