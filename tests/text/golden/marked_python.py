"""Samples of Python calls between markers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.text.golden.samples import Call, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["python_samples"]

PARIS: Call = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})


def read(about: str, written: str, **arguments: object) -> tuple[str, str, Call]:
    return about, f"plan({written})", ("plan", dict(arguments))


VALUES = [
    read("no arguments", ""),
    read("all types", "a=1, b=-2.5, c=True, d=None, e='x', f=[1, (2,)], g={'k': {}}",
         a=1, b=-2.5, c=True, d=None, e="x", f=[1, [2]], g={"k": {}}),
    read("words of JSON", "a=null, b=true, c=[false]", a=None, b=True, c=[False]),
    read("a set", "a={'x', 'y'}", a=["x", "y"]),
    read("zeros before a number", "a=07, b=-05, c=0, d=100", a=7, b=-5, c=0, d=100),
    read("names that are reserved words", "from=1, class='a'", **{"from": 1, "class": "a"}),
    read("brackets and commas in a string", "a='f(x)[1], {2}'", a="f(x)[1], {2}"),
    read("quotes in a string", "a='sed -n '1,2p' f', b=\"say \"hi\" now\"",
         a="sed -n '1,2p' f", b='say "hi" now'),
    read("quotes and brackets in a string", "a='print('x') now', b=['c']",
         a="print('x') now", b=["c"]),
    read("escaped quotes", r"a='it\'s', b='\"b\"'", a="it's", b='"b"'),
    read("raw lines and control characters", "a='b\nc\r\nd\te\0f'", a="b\nc\r\nd\te\0f"),
    read("two strings in a row", "a='b' 'c'", a="bc"),
    read("unicode", "a='日本\u2028😀'", a="日本\u2028😀"),
    read("an empty string", "a='', b=''", a="", b=""),
]  # fmt: skip
BROKEN = ("plan(x=b'z')", "plan(1)", "plan(x=1e999)", "plan(x=f())")


def python_samples(start: str, end: str, block: Callable[[str], str], comma: str) -> list[Sample]:
    """`block`: calls in their block; `comma`: what stands between two."""
    city = 'get_weather(city="Paris")'
    return [
        *(Sample(about, block(text), "", [call]) for about, text, call in VALUES),
        Sample("no call", "Call f(x)[1] < 2.\n", "Call f(x)[1] < 2.\n"),
        Sample("one call", block(city), "", [PARIS]),
        Sample("text around", f"A\n{block(city)}\nB", "A\nB", [PARIS]),
        Sample("two calls", block(f"{city}{comma}now()"), "", [PARIS, NOW]),
        Sample("calls on lines", block(f"{city}\nnow()"), "", [PARIS, NOW]),
        Sample("two blocks", block(city) + block("now()"), "", [PARIS, NOW]),
        Sample("blank space in a block", f"{start} {block(city)[len(start) :]}", "", [PARIS]),
        Sample("a name with dots", block("a.b-c.d(x=1)"), "", [("a.b-c.d", {"x": 1})]),
        Sample("the end is missing", block(city)[: -len(end)], "", [PARIS]),
        Sample("half an end", block(city)[:-3], "", [PARIS]),
        Sample("an empty block", f"A{start}{end}B", "AB"),
        Sample("words in a block", f"{start}some (words)\n{end}", "some (words)"),
        *(
            Sample(f"{text} is no call", block(f"{text}{comma}{city}"), text, [PARIS])
            for text in BROKEN
            if comma == "\n"
        ),
        Sample("a call that is cut", f"{start}plan(x='a", "plan(x='a"),
        Sample("cut in a name", f"{start}pla", "pla"),
        Sample("an end that nothing began", f"A {end} B", "A B"),
        Sample(
            "JSON in a block",
            block('{"name": "get_weather", "arguments": {"city": "Paris"}}'),
            "",
            [PARIS],
        ),
    ]
