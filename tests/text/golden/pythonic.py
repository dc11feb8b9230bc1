"""Llama 3.2 (small) and 4, and others that were taught to write Python."""

from __future__ import annotations

from tests.text.golden.samples import Call, Sample

PARIS = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})

SAMPLES = [
    Sample("no call", "See [1] and f(x).", "See [1] and f(x)."),
    Sample("one call", '[get_weather(city="Paris")]', "", [PARIS]),
    Sample("single quotes", "[get_weather(city='Paris')]", "", [PARIS]),
    Sample("blank space around", "\n [ get_weather( city = 'Paris' ) ] \n", "", [PARIS]),
    Sample("no arguments", "[now()]", "", [NOW]),
    Sample("two calls", '[get_weather(city="Paris"), now()]', "", [PARIS, NOW]),
    Sample("two calls on lines", '[\n  get_weather(city="Paris"),\n  now(),\n]', "", [PARIS, NOW]),
    Sample("CRLF", "[now(),\r\nnow()]\r\n", "", [NOW, NOW]),
    Sample("a comma after the last argument", '[get_weather(city="Paris",)]', "", [PARIS]),
    Sample("between markers", "<|python_start|>[now()]<|python_end|>", "", [NOW]),
    Sample("text around markers", "So: <|python_start|>[now()]<|python_end|> ok", "So: ok", [NOW]),
    Sample("the end is missing", "<|python_start|>[now()]", "", [NOW]),
    Sample(
        "a name that is too long",
        f"<|python_start|>[{'n' * 300}()]<|python_end|>",
        f"[{'n' * 300}()]",
    ),
    Sample("half an end", "<|python_start|>[now()]\n<|python_e", "", [NOW]),
    Sample("text after", "[now()] is what I call.", "is what I call.", [NOW]),
    Sample(
        "literals",
        "[plan(steps=['a', \"b\"], opt_tree={'label': 'r', 'children': [{}, (), (1,)]},"
        " opt_ratio=-1.5e3, opt_note=None, opt_any=[True, False, -7, 0])]",
        "",
        [
            (
                "plan",
                {
                    "steps": ["a", "b"],
                    "opt_tree": {"label": "r", "children": [{}, [], [1]]},
                    "opt_ratio": -1500.0,
                    "opt_note": None,
                    "opt_any": [True, False, -7, 0],
                },
            )
        ],
    ),
    Sample(
        "words of JSON",
        "[plan(steps=[], opt_note=null, opt_any=[true, false])]",
        "",
        [("plan", {"steps": [], "opt_note": None, "opt_any": [True, False]})],
    ),
    Sample(
        "escapes",
        r"""[write_file(path='it\'s', content="a\n\t\"\\ \x41\u00e9\101 \d 'q' 日本 😀")]""",
        "",
        [("write_file", {"path": "it's", "content": 'a\n\t"\\ Aé' + "A \\d 'q' 日本 😀"})],
    ),
    Sample(
        "brackets and commas in strings",
        '[write_file(path="])},", content="a=1, (b) [c] {d} <|python_end|>")]',
        "",
        [("write_file", {"path": "])},", "content": "a=1, (b) [c] {d} <|python_end|>"})],
    ),
    Sample(
        "a raw line break in a string",
        '[write_file(path="a", content="x\ny\r\nz")]',
        "",
        [("write_file", {"path": "a", "content": "x\ny\r\nz"})],
    ),
    Sample(
        "names of arguments that Python would not take",
        '[get_weather(from="a", class=1, a-b=2, größe=3)]',
        "",
        [("get_weather", {"from": "a", "class": 1, "a-b": 2, "größe": 3})],
    ),
    Sample("strings that stand together", "[get_weather(city=\"Pa\" 'ris')]", "", [PARIS]),
    Sample("an answer that is a list", "[1, 2, 3]", "[1, 2, 3]"),
    Sample("an empty list", "[]", "[]"),
    Sample("a link", "[get_weather](https://x.y) is it", "[get_weather](https://x.y) is it"),
    Sample("an unknown tool", "[fly(to=1)]", "[fly(to=1)]"),
    Sample(
        "one between markers", "<|python_start|>[fly(to=1)]<|python_end|>", "", [("fly", {"to": 1})]
    ),
    Sample("an unknown tool second", "[now(), fly(to=1)]", "", [NOW, ("fly", {"to": 1})]),
    Sample("by position", '[get_weather("Paris")]', '[get_weather("Paris")]'),
    Sample("no literal", "[get_weather(city=f(1))]", "[get_weather(city=f(1))]"),
    Sample("an expression", "[get_weather(city='a' + 'b')]", "[get_weather(city='a' + 'b')]"),
    Sample("twice", "[get_weather(city='a', city='b')]", "[get_weather(city='a', city='b')]"),
    Sample("a formatted string", "[get_weather(city=f'{x}')]", "[get_weather(city=f'{x}')]"),
    Sample("infinite", "[plan(opt_ratio=1e999)]", "[plan(opt_ratio=1e999)]"),
    Sample("triple quotes", '[get_weather(city="""Paris""")]', '[get_weather(city="""Paris""")]'),
    Sample("the second is broken", "[now(), get_weather(1)]", "get_weather(1)]", [NOW]),
    Sample("text before", "I look: [get_weather(city='Paris')]", "I look:", [PARIS]),
    Sample("two lists", "[now()] and [now()], [fly(to=1)]", "and , [fly(to=1)]", [NOW, NOW]),
    Sample("brackets in text", "As in [1], [now] and [ now (.", "As in [1], [now] and [ now (."),
    Sample(
        "the first is no literal",
        "[get_weather(city=b'x'), now(), plan(opt_ratio=1e999), now()]",
        "get_weather(city=b'x')plan(opt_ratio=1e999)",
        [NOW, NOW],
    ),
    Sample(
        "no list after the markers",
        "<|python_start|>[now()]<|python_end|> [fly(to=1)]",
        "[fly(to=1)]",
        [NOW],
    ),
    Sample("code between markers", "<|python_start|>print(1)<|python_end|>", "print(1)"),
    Sample("looks like a marker", "<|python_st <|python_ends", "<|python_st <|python_ends"),
    Sample("an end alone", "a<|python_end|>b", "ab"),
    Sample(
        "a tool named like a marker",
        "[tool_call(q='<|python')]",
        "",
        [("tool_call", {"q": "<|python"})],
    ),
    Sample("cut at once", "[", "["),
    Sample("cut in a name", "[get_w", "[get_w"),
    Sample("cut in an argument", '[get_weather(city="Par', '[get_weather(city="Par'),
    Sample("cut in the second", '[now(), get_weather(city="Par', 'get_weather(city="Par', [NOW]),
    Sample("cut before the end", "[now()", "", [NOW]),
]

PIECES = ["<|python_start|>", "<|python_end|>", "[now(", "a=", "(", ")", "'", "=", "-1"]
LONG_CALLS = {
    "call": '[now(a="%s")]',
    "blank": "[now()%s, now()]",
    "list": "So: [%s",
}
TRIGGER = "["
TEMPLATES = [
    "{% if tools %}[func_name1(params_name1=params_value1)]",
    "{% if tools %}<|python_start|>",
]
WITHOUT_DEFINITIONS = True
"""Its grammars leave out definitions that nothing refers to."""
