"""DeepSeek V3.2: DSML."""

from __future__ import annotations

from tests.text.golden.minimax_m2 import invoke_samples
from tests.text.golden.samples import Cut, Sample
from tests.text.golden.tagged import PARIS, Data, Tags, closers, common_samples


def dsml(word: str, space: str = "") -> Tags:
    """The tags with `word` around the calls."""
    mark = f"｜DSML｜{space}"

    def parameter(key: str, value: str) -> str:
        string = "false" if isinstance(value, Data) else "true"
        return f'<{mark}parameter name="{key}" string="{string}">{value}</{mark}parameter>\n'

    return Tags(
        begin=lambda name: f'<{mark}{word}>\n<{mark}invoke name="{name}">\n',
        parameter=parameter,
        end=f"</{mark}invoke>\n</{mark}{word}>",
        parameter_end=f"</{mark}parameter>",
        start=f"<{mark}{word}>",
        stop=f"</{mark}{word}>",
        sure=True,
    )


def dsml_samples(tags: Tags, space: str = "") -> list[Sample]:
    mark = f"｜DSML｜{space}"
    begin, end = tags.begin("plan"), f"</{mark}parameter>\n{tags.end}"
    return [
        *common_samples(tags),
        *invoke_samples(tags, f"<{mark}invoke", f"<{mark}parameter"),
        Sample(
            "the tag does not tell the type",
            f'{begin}<{mark}parameter name="steps">["a"]{end}',
            "",
            [("plan", {"steps": ["a"]})],
        ),
        Sample(
            "the tag does not tell the type of text",
            f'{tags.begin("get_weather")}<{mark}parameter name="city">Paris{end}',
            "",
            [PARIS],
        ),
        Sample(
            "a type the schema does not know",
            tags.call("plan", steps=Data("[]"), other=Data('{"a": 1.50}'), text="7"),
            "",
            [("plan", {"steps": [], "other": {"a": 1.5}, "text": "7"})],
        ),
        Sample(
            "a string where the schema wants a number",
            tags.call("get_weather", city="Paris", opt_days="3"),
            "",
            [("get_weather", {"city": "Paris", "opt_days": 3})],
        ),
        Sample(
            "all arguments as one object",
            tags.call("get_weather", arguments=Data('{"city": "Paris"}')),
            "",
            [PARIS],
        ),
        Sample(
            "all arguments as one string",
            tags.call("get_weather", input='{"city": "Paris"}'),
            "",
            [PARIS],
        ),
        Sample(
            "an object that is not all arguments",
            tags.call("get_weather", arguments=Data('{"town": 1}')),
            "",
            [("get_weather", {"arguments": {"town": 1}})],
        ),
        Sample(
            "an object and another parameter",
            tags.call("get_weather", arguments=Data("{}"), city="Paris"),
            "",
            [("get_weather", {"arguments": {}, "city": "Paris"})],
        ),
        Sample(
            "cut in an object of all arguments",
            begin.replace("plan", "get_weather") + tags.open("arguments", Data('{"city": "P')),
            "",
            [("get_weather", Cut('{"arguments": {"city": "P'))],
        ),
        Sample(
            "all arguments as Python's object in a string",
            tags.call("get_weather", input="{'city': 'Paris'}"),
            "",
            [PARIS],
        ),
        Sample(
            "a tag that ends itself",
            f"A {tags.begin('now').rstrip()[:-1]}/>\n{tags.end.splitlines()[-1]}B",
            "A B",
            [("now", {})],
        ),
        Sample(
            "a tag that ends itself, and a call",
            tags.begin("now").rstrip()[:-1]
            + "/>\n"
            + tags.call("get_weather", city="Paris").partition("\n")[2],
            "",
            [("now", {}), PARIS],
        ),
        Sample(
            "a number that is too large",
            tags.call("plan", steps=Data("[1e999]")),
            "",
            [("plan", {"steps": "[1e999]"})],
        ),
    ]


TAGS = dsml("function_calls")
SAMPLES = [
    *dsml_samples(TAGS),
    Sample(
        "words of the next version",
        dsml("tool_calls").call("get_weather", city="Paris"),
        "",
        [PARIS],
    ),
]
PIECES = [
    *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "<｜DSML｜invoke name=", '"now">'),
    *("</｜DSML｜invoke>", '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>"),
    *('<｜DSML｜parameter name="a"', "<｜DSML｜", "</｜", ' string="false">'),
]
LONG_CALLS = {
    "call": '<｜DSML｜function_calls><｜DSML｜invoke name="now">'
    '<｜DSML｜parameter name="a" string="true">%s</｜DSML｜parameter></｜DSML｜invoke>',
    "json": '<｜DSML｜function_calls><｜DSML｜invoke name="now">'
    '<｜DSML｜parameter name="a" string="false">"%s"</｜DSML｜parameter></｜DSML｜invoke>',
    "blank": '<｜DSML｜function_calls><｜DSML｜invoke name="now">%s</｜DSML｜invoke>',
    "junk": '<｜DSML｜function_calls><｜DSML｜invoke name="now">x%s</｜DSML｜invoke>',
}
TRIGGER = "Well.\n<｜DSML｜function_calls>"
TEMPLATES = ["{% set dsml = '｜DSML｜' %}{% if tools %}{{ '<' + dsml + 'function_calls>' }}"]
CLOSERS = closers("</｜DSML｜parameter>\n")
