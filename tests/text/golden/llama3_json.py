"""Llama 3.1 to 3.3."""

from __future__ import annotations

from tests.text import templates
from tests.text.golden.samples import Cut, Sample

PARIS = ("get_weather", {"city": "Paris"})
CALL = '{"name": "get_weather", "parameters": {"city": "Paris"}}'

SAMPLES = [
    Sample("no call", "Hello {you}.", "Hello {you}."),
    Sample("blank space before text", "\n\nHello", "\n\nHello"),
    Sample("one call", CALL, "", [PARIS]),
    Sample("blank space around", f"\n\n {CALL} \n", "", [PARIS]),
    Sample("after the tag", f"<|python_tag|>{CALL}", "", [PARIS]),
    Sample("text before the tag", f"I look. <|python_tag|>{CALL}", "I look.", [PARIS]),
    Sample("two calls", f"{CALL}; {CALL}", "", [PARIS, PARIS]),
    Sample("two calls without space", f"{CALL};{CALL}", "", [PARIS, PARIS]),
    Sample("two calls on lines", f"{CALL}\n{CALL}\n", "", [PARIS, PARIS]),
    Sample("two tags", f"<|python_tag|>{CALL}<|python_tag|>{CALL}", "", [PARIS, PARIS]),
    Sample("a semicolon at the end", f"{CALL};", "", [PARIS]),
    Sample("text after", f"{CALL} That is all.", "That is all.", [PARIS]),
    Sample("text after a semicolon", f"{CALL}; that is all.", "; that is all.", [PARIS]),
    Sample("arguments", CALL.replace("parameters", "arguments"), "", [PARIS]),
    Sample(
        "more keys",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        [PARIS],
    ),
    Sample(
        "parameters first",
        '{"parameters": {"city": "Paris"}, "name": "get_weather"}',
        "",
        [PARIS],
    ),
    Sample("no layout", '{"name":"now","parameters":{}}', "", [("now", {})]),
    Sample("CRLF", '{\r\n"name": "now",\r\n"parameters": {\r\n}\r\n}\r\n', "", [("now", {})]),
    Sample("parameters are null", '{"name": "now", "parameters": null}', "", [("now", {})]),
    Sample(
        "unicode, escapes and brackets",
        '{"name": "write_file", "parameters": {"path": "}{\\"", "content": "é\\n\\u00e9 😀 ; {"}}',
        "",
        [("write_file", {"path": '}{"', "content": "é\né 😀 ; {"})],
    ),
    Sample(
        "the tag in a string",
        '{"name": "write_file", "parameters": {"path": "p", "content": "<|python_tag|>"}}',
        "",
        [("write_file", {"path": "p", "content": "<|python_tag|>"})],
    ),
    Sample(
        "nested",
        '{"name": "plan", "parameters": {"steps": [], "opt_tree": {"label": "a", "children":'
        ' [{"label": "b"}]}, "opt_ratio": 0.5}}',
        "",
        [
            (
                "plan",
                {
                    "steps": [],
                    "opt_tree": {"label": "a", "children": [{"label": "b"}]},
                    "opt_ratio": 0.5,
                },
            )
        ],
    ),
    Sample(
        "an answer in JSON",
        '{"answer": {"city": "Paris"}, "sure": true}',
        '{"answer": {"city": "Paris"}, "sure": true}',
    ),
    Sample(
        "an answer in JSON with a name",
        '{"name": "Ada", "parameters": {"born": 1815}}',
        '{"name": "Ada", "parameters": {"born": 1815}}',
    ),
    Sample(
        "an answer in JSON that names a tool",
        '{"name": "get_weather", "kind": "tool"}',
        '{"name": "get_weather", "kind": "tool"}',
    ),
    Sample(
        "an unknown tool after the tag",
        '<|python_tag|>{"name": "fly", "parameters": {}}',
        "",
        [("fly", {})],
    ),
    Sample("no call after the tag", "<|python_tag|>print({1: 2})", "print({1: 2})"),
    Sample("code in braces", "{% if x %} {{ y }}", "{% if x %} {{ y }}"),
    Sample("looks like the tag", "a <|python_ta <|python|> <|", "a <|python_ta <|python|> <|"),
    Sample(
        "an unknown tool second",
        f'{CALL}; {{"name": "fly", "parameters": {{}}}}',
        '; {"name": "fly", "parameters": {}}',
        [PARIS],
    ),
    Sample("a call after text", f"Here is the result: {CALL}", "Here is the result:", [PARIS]),
    Sample("a call between texts", f"First.\n{CALL}\nThen.", "First.\nThen.", [PARIS]),
    Sample("other JSON, then a call", f'{{"a": {{}}}} and {CALL}', '{"a": {}} and', [PARIS]),
    Sample("an unknown call after text", 'Try {"name": "fly"}.', 'Try {"name": "fly"}.'),
    Sample("a bracket too many", f"{CALL}}}", "", [PARIS]),
    Sample("a bracket too few", CALL[:-1], "", [PARIS]),
    Sample("cut at once", "{", "{"),
    Sample("cut in the name", '{"name": "get_w', '{"name": "get_w'),
    Sample("cut after the name", '{"name": "now", "para', '{"name": "now", "para'),
    Sample(
        "cut after the tag and the name",
        '<|python_tag|>{"name": "now", "para',
        "",
        [("now", Cut(""))],
    ),
    Sample(
        "cut in the parameters",
        '{"name": "get_weather", "parameters": {"city": "Par',
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
    Sample("cut in the tag", "Hm <|pyth", "Hm <|pyth"),
    Sample("cut in the second tag", f"<|python_tag|>{CALL}\n<|pyth", "", [PARIS]),
    Sample(
        "arguments that are no object",
        '{"name": "now", "parameters": {none}}',
        '{"name": "now", "parameters": {none}}',
    ),
    Sample(
        "a call behind one that was broken off",
        '{"name": "now", "parameters": {{"name": "now", "parameters": {}}',
        '{"name": "now", "parameters": {',
        [("now", {})],
    ),
]

PIECES = ["<|python_tag|>", '{"name": "now", "parameters": ', '"name"', ";", "<|py"]
LONG_CALLS = {
    "call": '{"name": "now", "parameters": {"a": "%s"}}',
}
TRIGGER = "{"
TEMPLATES = [
    templates.LLAMA3,
    "{% if tools %}<|python_tag|>",
]
