"""Samples that all formats with tags around each argument have, each in its own tags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.text.golden.samples import Call, Cut, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Data", "Tags", "closers", "common_samples", "shown"]

NOW: Call = ("now", {})
PARIS: Call = ("get_weather", {"city": "Paris"})
HERMES = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


class Data(str):
    """A value that is no string, as a model writes it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family writes a call."""

    begin: Callable[[str], str]
    """All that stands before the first parameter, for a function's name."""
    parameter: Callable[[str, str], str]
    """A key and its value, which may be `Data`."""
    end: str
    """All that stands behind the last parameter."""
    parameter_end: str
    start: str
    """The marker that begins a block."""
    stop: str
    """The marker that ends it."""
    pairs: bool = False
    """The name has no tag of its own."""
    sure: bool = False
    """A parameter's end ends its value wherever it stands."""

    def call(self, name: str, /, **values: str) -> str:
        told = "".join(self.parameter(key, value) for key, value in values.items())
        return f"{self.begin(name)}{told}{self.end}"

    def open(self, key: str, value: str) -> str:
        """A parameter without its end."""
        whole = self.parameter(key, value)
        return whole[: whole.rindex(self.parameter_end)]


def shown(text: str) -> str:
    """Text of tags as content: what all tags of a family begin with is never shown."""
    return text.replace("</｜DSML｜", "").replace("<｜DSML｜", "")


def closers(*ends: str) -> tuple[str, ...]:
    """What ends a value in a random answer. Text may contain anything else, and JSON any text but
    a line break."""
    return (*(f"\n{end}" for end in ends), '"', "}", "]", *ends)


def common_samples(tags: Tags) -> list[Sample]:
    return [*_plain(tags), *_typed(tags), *_odd(tags), *_cut(tags)]


def _plain(tags: Tags) -> list[Sample]:
    call = tags.call
    paris = call("get_weather", city="Paris")
    return [
        Sample("no call", "Use f(x) < g(y), <b>.\n", "Use f(x) < g(y), <b>.\n"),
        Sample("one call", paris, "", [PARIS]),
        Sample("text before", f"I look it up.\n\n{paris}", "I look it up.", [PARIS]),
        Sample("text after", f"{call('now')}\nDone.", "Done.", [NOW]),
        Sample("text between", f"A\n{call('now')}\nB\n{paris}", "A\nB", [NOW, PARIS]),
        Sample("no parameters", call("now"), "", [NOW]),
        Sample("two blocks", f"{call('now')}\n{paris}", "", [NOW, PARIS]),
        Sample("two blocks without layout", f"{paris}{call('now')}", "", [PARIS, NOW]),
        Sample("blank space around", f"\n \n{paris}\n\n", "", [PARIS]),
        Sample(
            "a tool named like a marker", call("tool_call", q="x"), "", [("tool_call", {"q": "x"})]
        ),
        Sample("an unknown tool", call("fly", to="1"), "", [("fly", {"to": "1"})]),
        Sample("no layout", paris.replace("\n", ""), "", [PARIS]),
    ]


def _typed(tags: Tags) -> list[Sample]:
    call = tags.call
    plan = {
        "steps": Data('["a", "b\\n"]'),
        "opt_tree": Data('{"label": "</b>", "children": [{}]}'),
        "opt_ratio": Data("-1.50"),
        "opt_note": Data("null"),
    }
    return [
        Sample(
            "types",
            call("get_weather", city="5", opt_days=Data("5"), opt_unit="celsius"),
            "",
            [("get_weather", {"city": "5", "opt_days": 5, "opt_unit": "celsius"})],
        ),
        Sample(
            "types of an array, an object by reference, a number and a union",
            call("plan", **plan),
            "",
            [("plan", {key: json.loads(value) for key, value in plan.items()})],
        ),
        Sample(
            "a boolean and null",
            call(
                "write_file",
                path="p",
                content="null",
                opt_mode=Data("null"),
                opt_executable=Data("true"),
            ),
            "",
            [
                (
                    "write_file",
                    {"path": "p", "content": "null", "opt_mode": None, "opt_executable": True},
                )
            ],
        ),
        Sample(
            "what is not of its type is a string",
            call("plan", steps=Data("first a, then b"), opt_ratio=Data("half")),
            "",
            [("plan", {"steps": "first a, then b", "opt_ratio": "half"})],
        ),
        Sample(
            "many lines, blank ones and indents",
            call("write_file", path="a.py", content="def f():\n    return 1\n\n\nf()"),
            "",
            [("write_file", {"path": "a.py", "content": "def f():\n    return 1\n\n\nf()"})],
        ),
        Sample(
            "quotes, backslashes, unicode",
            call("write_file", path='C:\\x "y"', content="日本\u2028😀\t\x07\\n"),
            "",
            [("write_file", {"path": 'C:\\x "y"', "content": "日本\u2028😀\t\x07\\n"})],
        ),
        Sample("an empty value", call("get_weather", city=""), "", [("get_weather", {"city": ""})]),
    ]


def _odd(tags: Tags) -> list[Sample]:
    call, start, stop = tags.call, tags.start, tags.stop
    inner = "</x>" if tags.sure else tags.parameter_end
    markup = f"<a>{inner}\n<b>{start} </"
    paris = tags.begin("get_weather") + tags.parameter("city", "Paris")
    return [
        Sample(
            "a value that looks like markup",
            call("write_file", path="<x=y>", content=markup),
            "",
            [("write_file", {"path": "<x=y>", "content": markup})],
        ),
        Sample("JSON in a block", f"{start}\n{HERMES}\n{stop}", "", [PARIS]),
        *(
            [
                Sample(
                    "all arguments as one object",
                    f'{tags.begin("get_weather")}{{"city": "Paris"}}{tags.end}',
                    "",
                    [PARIS],
                ),
                Sample(
                    "all arguments as one object that is cut",
                    f'{tags.begin("get_weather")}{{"city": "Par',
                    "",
                    [("get_weather", Cut('{"city": "Par'))],
                ),
            ]
            if not tags.pairs
            else []
        ),
        Sample("words in a block", f"{start}\nsome words\n{stop}", "some words"),
        Sample("an empty block", f"A{start}{stop}B", "AB"),
        Sample("an end that nothing began", f"A {stop} B", "A B"),
        Sample("two starts", f"{start}\n{paris}{tags.end}", "", [PARIS]),
        Sample("all ends are missing", paris, "", [PARIS]),
        Sample("all ends are missing before a call", f"{paris}{call('now')}", "", [PARIS, NOW]),
        Sample(
            "an end of a parameter is missing",
            f"{tags.begin('get_weather')}{tags.open('city', 'Paris')}{tags.end}",
            "",
            [PARIS],
        ),
        Sample(
            "words behind a parameter come after the call",
            f"{paris}It is.{tags.parameter('opt_unit', 'x')}{tags.end}",
            "It is.",
            [("get_weather", {"city": "Paris", "opt_unit": "x"})],
        )
        if tags.sure
        else Sample(
            "words before a parameter come after the call",
            f"{tags.begin('get_weather')}It is {tags.parameter('city', 'Paris')}{tags.end}",
            "It is",
            [PARIS],
        ),
    ]


def _cut(tags: Tags) -> list[Sample]:
    begin = tags.begin("get_weather")
    key = tags.parameter("city", "Paris")
    return [
        Sample("cut in a start", f"ok {tags.start[:-1]}", f"ok {shown(tags.start[:-1]).lstrip()}"),
        Sample("cut behind a start", f"ok {tags.start}", "ok"),
        Sample(
            "cut in a string",
            begin + key[: key.index("aris")],
            "",
            [("get_weather", Cut('{"city": "P'))],
        ),
        Sample(
            "cut in a number",
            begin + key + tags.open("opt_days", Data("1")),
            "",
            [("get_weather", Cut('{"city": "Paris", "opt_days": 1'))],
        ),
        Sample("cut in a key", begin + key + key[: key.index("ity")], "", [PARIS]),
        Sample("cut in the last end", (begin + key + tags.end)[:-1], "", [PARIS]),
    ]
