"""Gemma 4: calls with quotes of their own."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome"})
NOW: Call = ("now", {})


def call(name: str, arguments: str) -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def quoted(text: str) -> str:
    return f'<|"|>{text}<|"|>'


SAMPLES = [
    Sample("no call", "It is sunny.\n", "It is sunny.\n"),
    Sample("nothing", ""),
    Sample("blank space", " \n ", " \n "),
    Sample("one call", call("get_weather", f"city:{quoted('Paris')}"), calls=[PARIS]),
    Sample(
        "text before",
        "Let me see.\n" + call("get_weather", f"city:{quoted('Paris')}"),
        "Let me see.",
        [PARIS],
    ),
    Sample("text after", call("now", "") + "\nSoon.", "Soon.", [NOW]),
    Sample(
        "two calls",
        call("get_weather", f"city:{quoted('Paris')}")
        + call("get_weather", f"city:{quoted('Rome')}"),
        calls=[PARIS, ROME],
    ),
    Sample(
        "numbers by the schema",
        call("get_weather", f"city:{quoted('Paris')},opt_days:3"),
        calls=[("get_weather", {"city": "Paris", "opt_days": 3})],
    ),
    Sample(
        "a bare word where a string is due",
        call("get_weather", "city:Paris,opt_days:3"),
        calls=[("get_weather", {"city": "Paris", "opt_days": 3})],
    ),
    Sample(
        "a bare number where a string is due",
        call("get_weather", "city:75001"),
        calls=[("get_weather", {"city": "75001"})],
    ),
    Sample(
        "types without a schema",
        call("other", f"a:1,b:-2.5e3,c:true,d:null,e:word,f:{quoted('1')}"),
        calls=[("other", {"a": 1, "b": -2500.0, "c": True, "d": None, "e": "word", "f": "1"})],
    ),
    Sample(
        "lists and objects",
        call(
            "plan",
            f"steps:[{quoted('a')},{quoted('b, c')}],opt_tree:{{label:{quoted('x')},n:[1,{{}}]}}",
        ),
        calls=[("plan", {"steps": ["a", "b, c"], "opt_tree": {"label": "x", "n": [1, {}]}})],
    ),
    Sample(
        "any value by its look",
        call("plan", "steps:[],opt_any:[1,true,null,word]"),
        calls=[("plan", {"steps": [], "opt_any": [1, True, None, "word"]})],
    ),
    Sample(
        "quotes, brackets and lines in a string",
        call("write_file", f"path:{quoted('a')},content:" + quoted('{["x", \\n\n}]')),
        calls=[("write_file", {"path": "a", "content": '{["x", \\n\n}]'})],
    ),
    Sample(
        "a string with JSON's quotes, and backslashes that escape nothing",
        call("get_weather", 'city:"a\\n\\u00e9\\u12 \\q\n\\""'),
        calls=[("get_weather", {"city": 'a\né\\u12 \\q\n"'})],
    ),
    Sample(
        "markers in a string",
        call("get_weather", f"city:{quoted('<tool_call|> <|tool_call>')}"),
        calls=[("get_weather", {"city": "<tool_call|> <|tool_call>"})],
    ),
    Sample(
        "unicode",
        call("get_weather", f"city:{quoted('Zürich 😀')}"),
        calls=[("get_weather", {"city": "Zürich 😀"})],
    ),
    Sample(
        "quoted keys",
        call("get_weather", f"{quoted('city')}:{quoted('Paris')}"),
        calls=[PARIS],
    ),
    Sample(
        "strings of JSON",
        call("get_weather", '"city": "Par\\"is"'),
        calls=[("get_weather", {"city": 'Par"is'})],
    ),
    Sample(
        "layout",
        "<|tool_call> call:get_weather{\n  city : "
        + quoted("Paris")
        + " ,\n opt_days: 3 }\n<tool_call|>",
        calls=[("get_weather", {"city": "Paris", "opt_days": 3})],
    ),
    Sample("the prefix left out", "<|tool_call>:now{}<tool_call|>", calls=[NOW]),
    Sample("round brackets", "<|tool_call>call:now()<tool_call|>", calls=[NOW]),
    Sample("no brackets", "<|tool_call>call:now<tool_call|>", calls=[NOW]),
    Sample("an unknown tool", call("nowhere", ""), calls=[("nowhere", {})]),
    Sample(
        "no end",
        f"<|tool_call>call:get_weather{{city:{quoted('Paris')}",
        calls=[("get_weather", Cut('{"city": "Paris"'))],
    ),
    Sample(
        "a bracket left out",
        f"<|tool_call>call:plan{{steps:[{quoted('a')}<tool_call|>",
        calls=[("plan", {"steps": ["a"]})],
    ),
    Sample(
        "the turn ends the call",
        f"<|tool_call>call:get_weather{{city:{quoted('Paris')}}}<turn|>",
        calls=[PARIS],
    ),
    Sample("a result is awaited", call("now", "") + "<|tool_response>", calls=[NOW]),
    Sample(
        "cut in a string",
        '<|tool_call>call:get_weather{city:<|"|>Par',
        calls=[("get_weather", Cut('{"city": "Par'))],
    ),
    Sample(
        "bare words of Python",
        call("other", "a:None,b:True,c:nil,d:7.,e:NULL"),
        calls=[("other", {"a": None, "b": True, "c": None, "d": 7.0, "e": None})],
    ),
    Sample("words that are no arguments", call("now", "at once"), calls=[NOW]),
    Sample(
        "words among arguments",
        call(
            "plan", f"so, steps:[{quoted('a')}], then, opt_tree:{{well, label:1, n}}, opt_ratio:2"
        ),
        calls=[("plan", {"steps": ["a"], "opt_tree": {"label": 1}, "opt_ratio": 2})],
    ),
    Sample("two prefixes", "<|tool_call>:call:now{}<tool_call|>", calls=[NOW]),
    Sample(
        "the marker left out",
        f"Hm.\ncall:get_weather{{city:{quoted('Paris')}}}",
        "Hm.",
        [PARIS],
    ),
    Sample("a marker in pieces", "<call>now{}", calls=[NOW]),
    Sample("a call that is talked about", "call:f{} and call:now", "call:f{} and call:now"),
    Sample("a stray end", "So.<tool_call|>", "So."),
    Sample("no name", "<|tool_call>{}<tool_call|>", "{}"),
]

PIECES = [
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<turn|>", "call:now{"),
    *("<call>", "call:", "now"),
    *("city:", "steps:[", "}", "]", ",", "true", "<|to", "<turn"),
]
LONG_CALLS = {
    "call": '<|tool_call>call:now{a:<|"|>%s<|"|>}<tool_call|>',
    "content": "%s",
    "blank": '<|tool_call>call:now{a:<|"|>x<|"|>%s}<tool_call|>',
    "items": '<|tool_call>call:now{a:[<|"|>x<|"|>%s]}<tool_call|>',
}
TRIGGER = "Well.<|tool_call>"
TEMPLATES = ["""{% if tools %}{{ '<|tool_call>call:' + name }}{{ '<|"|>' + value + '<|"|>' }}"""]
CLOSERS = ['<|"|>']
WITHOUT_DEFINITIONS = True
"""Its grammars leave out definitions that nothing refers to."""
