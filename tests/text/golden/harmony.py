"""GPT-OSS: messages on channels."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome"})
NOW: Call = ("now", {})


def call(name: str, arguments: str, between: str = " <|constrain|>json") -> str:
    return f"<|channel|>commentary to=functions.{name}{between}<|message|>{arguments}<|call|>"


def final(text: str) -> str:
    return f"<|channel|>final<|message|>{text}"


SAMPLES = [
    Sample("plain text", "It is sunny.\n", "It is sunny.\n"),
    Sample("nothing", ""),
    Sample("blank space", " \n ", " \n "),
    Sample("an answer", final("It is sunny."), "It is sunny."),
    Sample("an answer with its end", final("It is sunny.") + "<|return|>", "It is sunny."),
    Sample("an answer, constrained", "<|channel|>final <|constrain|>json<|message|>{}", "{}"),
    Sample("an answer in lines", final("One.\n\nTwo."), "One.\n\nTwo."),
    Sample("one call", call("get_weather", '{"city": "Paris"}'), calls=[PARIS]),
    Sample("the word json", call("get_weather", '{"city": "Paris"}', " json"), calls=[PARIS]),
    Sample("no constraint", call("get_weather", '{"city": "Paris"}', ""), calls=[PARIS]),
    Sample(
        "the recipient first",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        calls=[PARIS],
    ),
    Sample(
        "a whole header",
        "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}<|call|>",
        calls=[NOW],
    ),
    Sample(
        "a call on another channel",
        "<|channel|>analysis to=functions.now code<|message|>{}<|call|>",
        calls=[NOW],
    ),
    Sample("no prefix", "<|channel|>commentary to=now json<|message|>{}<|call|>", calls=[NOW]),
    Sample(
        "an unknown tool",
        call("nowhere.else", '{"a": [1, {"b": null}]}'),
        calls=[("nowhere.else", {"a": [1, {"b": None}]})],
    ),
    Sample(
        "a preamble",
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
        + call("now", "{}"),
        "I look it up.",
        [NOW],
    ),
    Sample(
        "two calls",
        call("get_weather", '{"city": "Paris"}')
        + "<|start|>assistant"
        + call("get_weather", '{"city": "Rome"}'),
        calls=[PARIS, ROME],
    ),
    Sample(
        "two calls, ended otherwise",
        "<|channel|>commentary to=functions.now<|message|>{}<|end|><|start|>assistant"
        + call("now", "{}"),
        calls=[NOW, NOW],
    ),
    Sample(
        "two messages",
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant" + final("Then."),
        "First.\nThen.",
    ),
    Sample("no arguments", call("now", ""), calls=[NOW]),
    Sample(
        "unicode",
        call("get_weather", '{"city": "Zürich 😀 \\u00e9"}'),
        calls=[("get_weather", {"city": "Zürich 😀 é"})],
    ),
    Sample(
        "markers in a string",
        call("get_weather", '{"city": "<|channel|>a<|end|>"}'),
        calls=[("get_weather", {"city": "<|channel|>a<|end|>"})],
    ),
    Sample(
        "a raw line break in a string",
        call("get_weather", '{"city": "a\nb"}'),
        calls=[("get_weather", {"city": "a\nb"})],
    ),
    Sample("layout", call("get_weather", '\n{\n  "city" : "Paris"\n}\n'), calls=[PARIS]),
    Sample(
        "arguments that are code",
        "<|channel|>commentary to=python code<|message|>print(1)<|call|>",
        calls=[("python", Cut('"print(1)"'))],
    ),
    Sample(
        "code for the only parameter",
        '<|channel|>commentary to=functions.tool_call code<|message|>print("a")\n<|call|>',
        calls=[("tool_call", {"q": 'print("a")\n'})],
    ),
    Sample(
        "cut in the arguments",
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>" + '{"a": "b',
        calls=[("now", Cut('{"a": "b'))],
    ),
    Sample(
        "a message that begins without an end",
        "<|channel|>commentary<|message|>Hm.<|channel|>final<|message|>So.",
        "Hm.\nSo.",
    ),
    Sample("a surplus bracket", call("now", "{}}"), calls=[NOW]),
    Sample(
        "words of headers between messages",
        call("now", "{}") + "commentary" + call("now", "{}") + "assistant" + final("Done."),
        "Done.",
        [NOW, NOW],
    ),
    Sample(
        "a header without its first marker",
        "<|channel|>commentary<|message|>I look.<|end|>assistant to=now<|message|>{}<|call|>",
        "I look.",
        [NOW],
    ),
    Sample("text between messages", final("So.") + "<|end|> finally", "So.\nfinally"),
    Sample(
        "a result made up",
        call("now", "{}") + "<|start|>functions.now to=assistant<|message|>12:00<|end|>",
        calls=[NOW],
    ),
    Sample("a header and no message", "<|channel|>final", ""),
    Sample("no header after a marker", "<|start|>Hello, you two.", "Hello, you two."),
    Sample("a stray end", "Yes.<|end|>", "Yes."),
]

PIECES = [
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    *("<|return|>", "assistant", "final", "commentary", " to=functions.now ", "json", "<|ch", "{}"),
]
LONG_CALLS = {
    "call": '<|channel|>commentary to=functions.now json<|message|>{"a": "%s"}<|call|>',
    "content": "<|channel|>final<|message|>%s",
    "blank": "<|channel|>commentary to=functions.now json<|message|>{}%s<|call|>",
    "words": "<|channel|>commentary to=functions.now<|message|>%s<|call|>",
    "no message": "<|channel|>%s",
}
TRIGGER = "<|channel|>commentary to=functions."
TEMPLATES = [
    '{% if tools %}{{ "<|start|>assistant<|channel|>commentary to=functions." + name }}<|message|>'
]
