"""MiniMax M3: elements in elements, each tag with a mark."""

from __future__ import annotations

from typing import Any

from tests.text.golden.samples import Call, Cut, Sample

MARK = "]<]minimax[>["
START, END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
NOW: Call = ("now", {})
PARIS: Call = ("get_weather", {"city": "Paris"})


def element(name: str, *inner: str) -> str:
    return f"{MARK}<{name}>{''.join(inner)}{MARK}</{name}>"


def invoke(name: str, *inner: str) -> str:
    return f'{MARK}<invoke name="{name}">{"".join(inner)}{MARK}</invoke>\n'


def block(*calls: str) -> str:
    return f"{START}\n{''.join(calls)}{END}"


def plan(*inner: str, **values: Any) -> Sample:
    steps = element("steps", element("item", "a"))
    return Sample(
        "", block(invoke("plan", steps, *inner)), "", [("plan", {"steps": ["a"]} | values)]
    )


def named(about: str, sample: Sample) -> Sample:
    return Sample(about, sample.text, sample.content, sample.calls)


ONE = invoke("get_weather", element("city", "Paris"))
SAMPLES = [
    Sample("no call", "Use f(x)[1] < g(y)] <b>.\n", "Use f(x)[1] < g(y)] <b>.\n"),
    Sample("one call", block(ONE), "", [PARIS]),
    Sample("no arguments", block(invoke("now")), "", [NOW]),
    Sample("text around", f"A\n\n{block(ONE)}\nB", "A\nB", [PARIS]),
    Sample("two calls in a block", block(ONE, invoke("now")), "", [PARIS, NOW]),
    Sample("two blocks", f"{block(ONE)}\n{block(invoke('now'))}", "", [PARIS, NOW]),
    Sample("an unknown tool", block(invoke("fly", element("to", "1"))), "", [("fly", {"to": "1"})]),
    Sample(
        "scalars",
        block(
            invoke(
                "write_file",
                element("path", "5"),
                element("content", ""),
                element("opt_mode", "7"),
                element("opt_executable", "true"),
            )
        ),
        "",
        [("write_file", {"path": "5", "content": "", "opt_mode": 7, "opt_executable": True})],
    ),
    named("an array", plan()),
    named("a number", plan(element("opt_ratio", "-1.5"), opt_ratio=-1.5)),
    named("null", plan(element("opt_note", "null"), opt_note=None)),
    named(
        "an object by reference",
        plan(
            element("opt_tree", element("label", "1"), element("children", "[{}]")),
            opt_tree={"label": "1", "children": [{}]},
        ),
    ),
    named(
        "what no schema describes",
        plan(
            element("opt_any", element("a", "1"), element("b", "x"), element("b", "y")),
            opt_any={"a": "1", "b": ["x", "y"]},
        ),
    ),
    named(
        "text beside elements",
        plan(element("x", "t", element("a", "1")), x={"a": "1", "$text": "t"}),
    ),
    named("an argument twice", plan(element("x", "1"), element("x", "2"), x=["1", "2"])),
    named(
        "JSON as the text of an object",
        plan(element("opt_tree", '{"label": "l"}'), opt_tree={"label": "l"}),
    ),
    named("an empty object", plan(element("opt_tree"), opt_tree={})),
    Sample(
        "an empty array", block(invoke("plan", element("steps"))), "", [("plan", {"steps": []})]
    ),
    Sample(
        "many lines, quotes, unicode, markup without a mark",
        block(
            invoke(
                "write_file",
                element("path", 'a "b"\\n'),
                element("content", "\n日本 </path>\n]<]\n"),
            )
        ),
        "",
        [("write_file", {"path": 'a "b"\\n', "content": "\n日本 </path>\n]<]\n"})],
    ),
    Sample(
        "tags in a string",
        block(invoke("get_weather", element("city", "a", element("b", "c")))),
        "",
        [("get_weather", {"city": "a<b>c</b>"})],
    ),
    Sample("no block", f"Well: {ONE}", "Well:", [PARIS]),
    Sample(
        "a call that is only talked about",
        f'Write:{MARK}<invoke name="x"> here.',
        'Write:<invoke name="x"> here.',
    ),
    Sample("words in a block", f"{START}\nsome words\n{END}", "some words"),
    Sample("a mark alone", f"A {MARK} B", "A B"),
    Sample(
        "words between arguments",
        block(invoke("get_weather", "It is ", element("city", "Paris"))),
        "It is",
        [PARIS],
    ),
    Sample(
        "ends are missing",
        f'{START}\n{MARK}<invoke name="get_weather">{MARK}<city>Paris{END}',
        "",
        [PARIS],
    ),
    Sample(
        "ends of elements are missing",
        f'{START}{MARK}<invoke name="plan">{MARK}<steps>{MARK}<item>a{MARK}</steps>{END}',
        "",
        [("plan", {"steps": ["a"]})],
    ),
    Sample(
        "an end too many",
        block(invoke("get_weather", element("city", "Paris"), f"{MARK}</x>")),
        "",
        [PARIS],
    ),
    Sample("all ends are missing", f"{START}\n{ONE}", "", [PARIS]),
    Sample("cut in a mark", f"ok {MARK[:5]}", f"ok {MARK[:5]}"),
    Sample("cut behind the name", f'{START}\n{MARK}<invoke name="now">', "", [("now", Cut(""))]),
    Sample(
        "cut in a string",
        f'{START}\n{MARK}<invoke name="get_weather">{MARK}<city>Par{MARK[:4]}',
        "",
        [("get_weather", Cut('{"city": "Par' + MARK[:4]))],
    ),
    Sample(
        "cut in a number",
        f'{START}\n{MARK}<invoke name="get_weather">{element("city", "Paris")}{MARK}<opt_days>1',
        "",
        [("get_weather", Cut('{"city": "Paris"'))],
    ),
    Sample(
        "cut in a tag", f"{START}\n{ONE[: ONE.index('>Paris')]}", "", [("get_weather", Cut(""))]
    ),
]
PIECES = [
    *(START, END, MARK, "<tool_call>", f'{MARK}<invoke name="now">', f"{MARK}</invoke>"),
    *(f"{MARK}<a>", f"{MARK}</a>", f"{MARK}<b>", f"{MARK}</b>", "]<", "]<]mini", "</a>"),
]
LONG_CALLS = {
    "call": f'{START}{MARK}<invoke name="now">{MARK}<a>%s{MARK}</a>{MARK}</invoke>',
    "blank": f'{START}{MARK}<invoke name="now">%s{MARK}</invoke>',
    "junk": f'{START}{MARK}<invoke name="now">x%s{MARK}</invoke>',
}
TRIGGER = f"Well.\n{START}"
TEMPLATES = [
    "{% set ns = ']<]minimax[>[' %}{% if tools %}{{ ns ~ '<tool_call>' }}{{ ns ~ '<invoke' }}"
]
CLOSERS = (f"\n{MARK}</", '"', "}", f"{MARK}</", "]")
WITHOUT_DEFINITIONS = True
