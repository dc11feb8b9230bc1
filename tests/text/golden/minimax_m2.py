"""MiniMax M2."""

from __future__ import annotations

from tests.text.golden.samples import Cut, Sample
from tests.text.golden.tagged import NOW, PARIS, Tags, closers, common_samples, shown

TAGS = Tags(
    begin=lambda name: f'<minimax:tool_call>\n<invoke name="{name}">\n',
    parameter=lambda key, value: f'<parameter name="{key}">{value}</parameter>\n',
    end="</invoke>\n</minimax:tool_call>",
    parameter_end="</parameter>",
    start="<minimax:tool_call>",
    stop="</minimax:tool_call>",
)


def invoke_samples(tags: Tags, invoke: str, parameter: str) -> list[Sample]:
    """Samples of all formats with several calls in a block. `invoke` and `parameter`: the beginning
    of these tags."""
    paris = tags.call("get_weather", city="Paris")
    inner = paris[paris.index(invoke) : paris.rindex(tags.stop)]
    now = tags.call("now")
    inner_now = now[now.index(invoke) : now.rindex(tags.stop)]
    return [
        Sample(
            "two calls in a block", f"{tags.start}\n{inner}{inner_now}{tags.stop}", "", [PARIS, NOW]
        ),
        Sample("a block without an end", f"{tags.start}\n{inner}{inner_now}", "", [PARIS, NOW]),
        Sample("no block", f"Well: {inner}", "Well:", [PARIS]),
        Sample(
            "a call that is only talked about",
            f'Write:{invoke} name="example"> here.',
            shown(f'Write:{invoke} name="example"> here.'),
        ),
        Sample("other quotes", paris.replace('"', "'"), "", [PARIS]),
        Sample(
            "blank space of a value",
            tags.call("get_weather", city=" Paris\n"),
            "",
            [("get_weather", {"city": " Paris\n"})],
        ),
        Sample(
            "a parameter without its end before another",
            tags.begin("get_weather")
            + tags.open("city", "Paris")
            + tags.parameter("opt_unit", "celsius")
            + tags.end,
            "",
            [("get_weather", {"city": "Paris", "opt_unit": "celsius"})],
        ),
        Sample(
            "a broken tag",
            f"{tags.start}\n{invoke} nam>\n{tags.stop}",
            shown(f"{invoke} nam>").lstrip(),
        ),
        Sample("cut in the name", f'{tags.start}\n{invoke} name="get_w', '"get_w'),
        Sample("cut behind the name", tags.begin("now"), "", [("now", Cut(""))]),
        Sample(
            "a broken parameter",
            f"{tags.begin('get_weather')}{tags.parameter('city', 'Paris')}{parameter} name=>x"
            f"{tags.parameter_end}{tags.end}",
            shown(f">x{tags.parameter_end}"),
            [PARIS],
        ),
    ]


SAMPLES = [
    *common_samples(TAGS),
    *invoke_samples(TAGS, "<invoke", "<parameter"),
    Sample(
        "names without quotes",
        "<minimax:tool_call><invoke name=get_weather><parameter name=city>Paris</parameter>"
        "</invoke></minimax:tool_call>",
        "",
        [PARIS],
    ),
]
PIECES = [
    *("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", '"now">', "</invoke>"),
    *('<parameter name="', 'city">', 'opt_days">', "</parameter>", "</", "'a'>"),
]
LONG_CALLS = {
    "call": '<minimax:tool_call><invoke name="now"><parameter name="a">%s</parameter></invoke>',
    "blank": '<minimax:tool_call><invoke name="now">%s</invoke>',
    "junk": '<minimax:tool_call><invoke name="now">x%s</invoke>',
}
TRIGGER = "Well.\n<minimax:tool_call>"
TEMPLATES = ["{% set begin = '<minimax:tool_call>' %}{% if tools %}<invoke name=\"{{ f }}\">"]
UNIONS_AS_TEXT = True
CLOSERS = closers("</parameter>\n")
