"""Kimi K3: channels and calls in tags of special tokens."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample
from tests.text.golden.tagged import closers

PARIS: Call = ("get_weather", {"city": "Paris"})
ROME: Call = ("get_weather", {"city": "Rome"})
NOW: Call = ("now", {})


def argument(key: str, value: str, kind: str = "string") -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def call(name: str, *arguments: str, index: int = 1) -> str:
    head = f'<|open|>call tool="{name}" index="{index}"<|sep|>'
    return f"{head}{''.join(arguments)}<|close|>call<|sep|>"


def tools(*calls: str) -> str:
    return f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"


def response(text: str) -> str:
    return f"<|open|>response<|sep|>{text}<|close|>response<|sep|>"


SAMPLES = [
    Sample("plain text", "It is sunny.\n", "It is sunny.\n"),
    Sample("nothing", ""),
    Sample("blank space", " \n ", " \n "),
    Sample("an answer", response("It is sunny."), "It is sunny."),
    Sample("an answer that the prompt began", "Sunny.<|close|>response<|sep|>", "Sunny."),
    Sample("an answer without an end", "<|open|>response<|sep|>It is", "It is"),
    Sample("the end of a message", "Sunny.<|close|>message<|sep|><|end_of_msg|>", "Sunny."),
    Sample("an answer in lines", response("One.\n\nTwo."), "One.\n\nTwo."),
    Sample("one call", tools(call("get_weather", argument("city", "Paris"))), "", [PARIS]),
    Sample(
        "an answer and a call",
        response("I look.") + tools(call("get_weather", argument("city", "Paris"))),
        "I look.",
        [PARIS],
    ),
    Sample("an empty answer", response("") + tools(call("now")), "", [NOW]),
    Sample(
        "two calls",
        tools(
            call("get_weather", argument("city", "Paris")),
            call("get_weather", argument("city", "Rome"), index=2),
        ),
        "",
        [PARIS, ROME],
    ),
    Sample("no arguments", tools(call("now")), "", [NOW]),
    Sample(
        "every type",
        tools(
            call(
                "plan",
                argument("steps", '["a", "b"]', "array"),
                argument("opt_tree", '{"label": "x"}', "object"),
                argument("opt_ratio", "0.5", "number"),
                argument("opt_note", "null", "null"),
                argument("opt_any", "true", "boolean"),
            )
        ),
        "",
        [
            (
                "plan",
                {
                    "steps": ["a", "b"],
                    "opt_tree": {"label": "x"},
                    "opt_ratio": 0.5,
                    "opt_note": None,
                    "opt_any": True,
                },
            )
        ],
    ),
    Sample(
        "text that looks like a number",
        tools(call("get_weather", argument("city", "007"))),
        "",
        [("get_weather", {"city": "007"})],
    ),
    Sample(
        "a number written as text",
        tools(call("get_weather", argument("city", "x"), argument("opt_days", "3"))),
        "",
        [("get_weather", {"city": "x", "opt_days": 3})],
    ),
    Sample(
        "a value that is no JSON",
        tools(call("f", argument("n", "about 3", "number"))),
        "",
        [("f", {"n": "about 3"})],
    ),
    Sample(
        "quotes, lines and markup in text",
        tools(
            call("write_file", argument("path", 'a "b"'), argument("content", "<p>\n&amp;\\n</p>"))
        ),
        "",
        [("write_file", {"path": 'a "b"', "content": "<p>\n&amp;\\n</p>"})],
    ),
    Sample(
        "unicode",
        tools(call("get_weather", argument("city", "Zürich 😀"))),
        "",
        [("get_weather", {"city": "Zürich 😀"})],
    ),
    Sample(
        "escapes in a tag",
        tools(call("f", argument("a &quot;b&quot; &amp;amp;", "x"))),
        "",
        [("f", {'a "b" &amp;': "x"})],
    ),
    Sample(
        "an unknown tool",
        tools(call("nowhere.else", argument("a", "[1]", "array"))),
        "",
        [("nowhere.else", {"a": [1]})],
    ),
    Sample(
        "another tag in text",
        tools(call("get_weather", argument("city", "<|open|>x<|sep|>"))),
        "",
        [("get_weather", {"city": "<|open|>x<|sep|>"})],
        ["<|open|>", "<|sep|>"],
    ),
    Sample(
        "arguments as one object",
        tools(call("f", '<|open|>json type="object"<|sep|>{"a": [1]}<|close|>json<|sep|>')),
        "",
        [("f", {"a": [1]})],
    ),
    Sample(
        "no end of an argument",
        tools(
            '<|open|>call tool="write_file" index="1"<|sep|>'
            '<|open|>argument key="path" type="string"<|sep|>a'
            '<|open|>argument key="content" type="string"<|sep|>b<|close|>call<|sep|>'
        ),
        "",
        [("write_file", {"path": "a", "content": "b"})],
    ),
    Sample(
        "no end of a call",
        '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|>'
        '<|open|>call tool="now" index="2"<|sep|><|close|>tools<|sep|>',
        "",
        [NOW, NOW],
    ),
    Sample(
        "cut in a value",
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Par',
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
    Sample("a call without a name", tools('<|open|>call index="1"<|sep|><|close|>call<|sep|>'), ""),
    Sample("text between arguments", tools(call("now", " so ")), "so", [NOW]),
    Sample("text after calls", tools(call("now")) + "Done.", "Done.", [NOW]),
    Sample("a separator left out", "<|close|>think<|open|>response<|sep|>Yes.", "Yes."),
    Sample("a tag that is none", "<|open|>Hello, you two.", "Hello, you two."),
]

PIECES = [
    *("<|open|>", "<|close|>", "<|sep|>", "tools", "call", "think", "response", "argument"),
    *('<|open|>call tool="now" index="1"<|sep|>', "<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
    *('<|open|>argument key="a" type="number"<|sep|>', "<|close|>argument<|sep|>", "<|open|>tools"),
    *('<|open|>argument key="b" type="string"<|sep|>', "<|open|>json<|sep|>", "<|cl"),
]
LONG_CALLS = {
    "call": tools(call("now", argument("a", "%s"))),
    "number": tools(call("now", argument("a", "%s", "number"))),
    "content": response("%s"),
    "blank": tools(call("now", "%s")),
    "object": tools(call("now", '<|open|>json<|sep|>{"a": "%s"}<|close|>json<|sep|>')),
}
TRIGGER = "Well.\n<|open|>tools<|sep|>"
CLOSERS = closers("<|close|>argument<|sep|>")
TEMPLATES = ["{% if tools %}{{ '<|open|>tools<|sep|>' }}{{ '<|close|>tools' }}{{ m.tool_calls }}"]
