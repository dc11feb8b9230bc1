"""Qwen3-Coder."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

NOW: Call = ("now", {})


def call(name: str, **values: str) -> str:
    """As the template shows the model."""
    told = "".join(f"<parameter={key}>\n{each}\n</parameter>\n" for key, each in values.items())
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


SAMPLES = [
    Sample("no call", "Use f(x) < g(y).\n", "Use f(x) < g(y).\n"),
    Sample("one call", call("get_weather", city="Paris"), "", [("get_weather", {"city": "Paris"})]),
    Sample(
        "text before",
        "I look it up.\n\n" + call("get_weather", city="Paris"),
        "I look it up.",
        [("get_weather", {"city": "Paris"})],
    ),
    Sample("text after", call("now") + "\nDone.", "Done.", [NOW]),
    Sample("no parameters", call("now"), "", [NOW]),
    Sample("two calls", call("now") + "\n" + call("now"), "", [NOW, NOW]),
    Sample(
        "types",
        call("get_weather", city="5", opt_days="5", opt_unit="celsius"),
        "",
        [("get_weather", {"city": "5", "opt_days": 5, "opt_unit": "celsius"})],
    ),
    Sample(
        "types of an array, an object by reference, a number, a union, and anything",
        call(
            "plan",
            steps='["a", "b\\n"]',
            opt_tree='{"label": "</b>", "children": [{}]}',
            opt_ratio="-1.50",
            opt_note="null",
            opt_any="7",
        ),
        "",
        [
            (
                "plan",
                {
                    "steps": ["a", "b\n"],
                    "opt_tree": {"label": "</b>", "children": [{}]},
                    "opt_ratio": -1.5,
                    "opt_note": None,
                    "opt_any": "7",
                },
            )
        ],
    ),
    Sample(
        "booleans and null as Python writes them",
        call("write_file", path="p", content="null", opt_mode="None", opt_executable="True"),
        "",
        [
            (
                "write_file",
                {"path": "p", "content": "null", "opt_mode": None, "opt_executable": True},
            )
        ],
    ),
    Sample(
        "an array as Python writes it",
        call("plan", steps="['a', \"b\"]"),
        "",
        [("plan", {"steps": ["a", "b"]})],
    ),
    Sample(
        "what is not of its type is a string",
        call("plan", steps="first a, then b", opt_ratio="half"),
        "",
        [("plan", {"steps": "first a, then b", "opt_ratio": "half"})],
    ),
    Sample(
        "many lines, blank ones and indents",
        call("write_file", path="a.py", content="\ndef f():\n    return 1\n\n\nf()\n"),
        "",
        [("write_file", {"path": "a.py", "content": "\ndef f():\n    return 1\n\n\nf()\n"})],
    ),
    Sample(
        "quotes, backslashes, unicode",
        call("write_file", path='C:\\x "y"', content="日本\u2028😀\t\x07\\n"),
        "",
        [("write_file", {"path": 'C:\\x "y"', "content": "日本\u2028😀\t\x07\\n"})],
    ),
    Sample("an empty value", call("get_weather", city=""), "", [("get_weather", {"city": ""})]),
    Sample(
        "values that look like markup",
        call(
            "write_file",
            path="<parameter=x>",
            content="<a></parameter>\n<b></function>\n<tool_call>\n</tool_call> </parameter",
        ),
        "",
        [
            (
                "write_file",
                {
                    "path": "<parameter=x>",
                    "content": "<a></parameter>\n<b></function>\n<tool_call>\n</tool_call>"
                    " </parameter",
                },
            )
        ],
    ),
    Sample(
        "no layout",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
        "",
        [("get_weather", {"city": "Paris"})],
    ),
    Sample(
        "CRLF",
        call("get_weather", city="Paris\n\nx").replace("\n", "\r\n") + "\r\n",
        "",
        [("get_weather", {"city": "Paris\r\n\r\nx"})],
    ),
    Sample(
        "the block's start is missing",
        "Well:\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
        "</tool_call>",
        "Well:",
        [("get_weather", {"city": "Paris"})],
    ),
    Sample(
        "a function that is only talked about",
        "Write <function=example> and </function>.",
        "Write <function=example> and </function>.",
    ),
    Sample("an unknown tool", call("fly", to="1"), "", [("fly", {"to": "1"})]),
    Sample(
        "a tool named like the marker", call("tool_call", q="x"), "", [("tool_call", {"q": "x"})]
    ),
    Sample(
        "an end of a parameter is missing",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=opt_days>\n3\n"
        "</function>\n</tool_call>",
        "",
        [("get_weather", {"city": "Paris", "opt_days": 3})],
    ),
    Sample(
        "an end with another name is text, as it is for other servers",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter1>\n</function>\n"
        "</tool_call>",
        "",
        [("get_weather", {"city": "Paris\n</parameter1>"})],
    ),
    Sample(
        "the function's end is missing",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>\n"
        + call("now"),
        "",
        [("get_weather", {"city": "Paris"}), NOW],
    ),
    Sample(
        "all ends are missing",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n",
        "",
        [("get_weather", {"city": "Paris"})],
    ),
    Sample(
        "words between parameters come after the call",
        "<tool_call>\n<function=get_weather>\nThe city:\n<parameter=city>\nParis\n</parameter>\n"
        "</function>\n</tool_call>",
        "The city:",
        [("get_weather", {"city": "Paris"})],
    ),
    Sample(
        "JSON in the block",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        [("get_weather", {"city": "Paris"})],
    ),
    Sample("words in the block", "<tool_call>\nwords\n</tool_call>", "words"),
    Sample("a broken name", "<tool_call>\n<function=no\nname>\n</tool_call>", "no\nname>"),
    Sample("no name", "<tool_call>\n<function=>\n</tool_call>", ">"),
    Sample("cut in the block's start", "ok <tool_", "ok <tool_"),
    Sample("cut in the function's start", "ok <tool_call>\n<func", "ok"),
    Sample("cut in the name", "<tool_call>\n<function=get_w", "get_w"),
    Sample("cut after the name", "<tool_call>\n<function=now>\n", "", [("now", Cut(""))]),
    Sample("cut in a key", "<tool_call>\n<function=now>\n<parameter=a", "", [("now", Cut(""))]),
    Sample(
        "cut in a string",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
    Sample(
        "cut in a number",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nx\n</parameter>\n"
        "<parameter=opt_days>\n1",
        "",
        [("get_weather", Cut('{"city": "x", "opt_days": 1'))],
    ),
    Sample(
        "cut in a parameter's end",
        "<tool_call>\n<function=now>\n<parameter=x>\ny\n</parameter>\n</func",
        "",
        [("now", {"x": "y"})],
    ),
]

PIECES = [
    *("<tool_call>", "</tool_call>", "<function=", "now>", "</function>", "<parameter="),
    *("city>", "opt_days>", "</parameter>", "\n<", "</", '{"name": "now", "arguments": '),
]
LONG_CALLS = {
    "call": "<tool_call>\n<function=now>\n<parameter=a>\n%s\n</parameter>\n</function>",
    "blank": "<tool_call>\n<function=now>\n%s</function>",
    "junk": "<tool_call>\n<function=now>\nx%s</function>",
}
TRIGGER = "Well.\n<tool_call>"
TEMPLATES = [
    "{% if tools %}<tool_call>\n<function=f>\n<parameter=p>",
]
UNIONS_AS_TEXT = True
