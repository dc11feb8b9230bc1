"""MiniCPM 5."""

from __future__ import annotations

from tests.text.golden.glm45 import pair_samples
from tests.text.golden.samples import Cut, Sample
from tests.text.golden.tagged import PARIS, Tags, closers, common_samples

TAGS = Tags(
    begin=lambda name: f'<function name="{name}">',
    parameter=lambda key, value: f'<param name="{key}">{value}</param>',
    end="</function>",
    parameter_end="</param>",
    start="<function name=",
    stop="</function>",
    pairs=True,
)
MARKUP = "<a></param>\n</function> ]] ]> &"
OTHER = (
    "line breaks that are spelled",
    "an unknown name alone",
    "a word alone",
    "cut in the name",
    "cut behind the name",
)
SAMPLES = [
    *common_samples(TAGS),
    *(each for each in pair_samples(TAGS) if each.about not in OTHER),
    Sample(
        "a value in quotes",
        TAGS.call("write_file", path="<![CDATA[]]>", content=f"<![CDATA[{MARKUP}]]>"),
        "",
        [("write_file", {"path": "", "content": MARKUP})],
    ),
    Sample(
        "a number in quotes",
        TAGS.call("get_weather", city="Paris", opt_days="<![CDATA[3]]>"),
        "",
        [("get_weather", {"city": "Paris", "opt_days": 3})],
    ),
    Sample("other quotes", TAGS.call("get_weather", city="Paris").replace('"', "'"), "", [PARIS]),
    Sample(
        "cut in quotes",
        TAGS.begin("get_weather") + '<param name="city"><![CDATA[a]]',
        "",
        [("get_weather", Cut('{"city": "a]]'))],
    ),
    Sample(
        "tags without blanks",
        TAGS.call("get_weather", city="Paris").replace(" name", "name"),
        "",
        [PARIS],
    ),
    Sample(
        "tags with the vocabulary's sign for a blank",
        TAGS.call("get_weather", city="Paris").replace(" name", "\u0120name"),
        "",
        [PARIS],
    ),
    Sample(
        "the whole in one", TAGS.call("get_weather", arguments='{"city": "Paris"}'), "", [PARIS]
    ),
    Sample("a tag that ends itself", 'A <function name="now"/> B', "A B", [("now", {})]),
    Sample("a call that is talked about", 'Write <function name="x"> here.', "Write x here."),
]
PIECES = [
    *('<function name="', 'now">', "</function>", '<param name="', 'a">', 'opt_days">'),
    *("</param>", "<![CDATA[", "]]>", "]]", "<!", "</"),
]
LONG_CALLS = {
    "call": '<function name="now"><param name="a">%s</param></function>',
    "quoted": '<function name="now"><param name="a"><![CDATA[%s]]></param></function>',
    "blank": '<function name="now">%s</function>',
    "junk": '<function name="now"><param name="a">1</param>x%s</function>',
}
TRIGGER = "Well.\n<function name="
TEMPLATES = ["{% if tools %}<function name=\"{{ f }}\">{{ '<param name=' }}"]
UNIONS_AS_TEXT = True
CLOSERS = closers("</param>")
