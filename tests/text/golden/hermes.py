"""Hermes, Qwen 2.5, Qwen 3, QwQ."""

from __future__ import annotations

from tests.text import templates
from tests.text.golden.samples import Call, Cut, Sample

PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome"})
NOW: Call = ("now", {})

SAMPLES = [
    Sample("no call", "It is sunny in Paris.\n", "It is sunny in Paris.\n"),
    Sample("nothing", ""),
    Sample("blank space", " \n\n ", " \n\n "),
    Sample(
        "one call",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        calls=[PARIS],
    ),
    Sample(
        "text before",
        "Let me see.\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "Let me see.",
        [PARIS],
    ),
    Sample(
        "text after",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n\nI will know soon.',
        "I will know soon.",
        [NOW],
    ),
    Sample(
        "text on both sides keeps what sets it apart",
        'Before.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>After.',
        "Before.\nAfter.",
        [NOW],
    ),
    Sample(
        "two calls",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        calls=[PARIS, ROME],
    ),
    Sample(
        "two calls in one block",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        calls=[PARIS, ROME],
    ),
    Sample(
        "text between two calls",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call> and '
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "and",
        [NOW, NOW],
    ),
    Sample("no layout", '<tool_call>{"name":"now","arguments":{}}</tool_call>', calls=[NOW]),
    Sample(
        "much layout",
        '<tool_call> \n\t{\n  "name" : "get_weather" ,\n  "arguments" :\n'
        '  {\n    "city" : "Paris"\n  }\n }\n\n </tool_call>\n',
        calls=[PARIS],
    ),
    Sample(
        "CRLF",
        'Hm.\r\n<tool_call>\r\n{"name": "now", "arguments": {}}\r\n</tool_call>\r\n',
        "Hm.",
        [NOW],
    ),
    Sample(
        "arguments first",
        '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
        calls=[PARIS],
    ),
    Sample(
        "arguments as a string",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}\n'
        "</tool_call>",
        calls=[PARIS],
    ),
    Sample(
        "parameters for arguments, and other keys",
        '<tool_call>{"type": "function", "id": 7, "name": "get_weather", "tags": ["}", {}],'
        ' "parameters": {"city": "Paris"}, "x": null}</tool_call>',
        calls=[PARIS],
    ),
    Sample("no arguments", '<tool_call>{"name": "now"}</tool_call>', calls=[NOW]),
    Sample("null", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=[NOW]),
    Sample("an empty string", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [NOW]),
    Sample(
        "unicode and escapes",
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "C:\\\\tmp\\/ü.txt", "content":'
        ' "“日本語” \\ud83d\\ude00 😀\\n\\t\\"q\\" \\u00e9"}}\n</tool_call>',
        calls=[
            (
                "write_file",
                {"path": "C:\\tmp/ü.txt", "content": '“日本語” 😀 😀\n\t"q" é'},
            )
        ],
    ),
    Sample(
        "brackets and markers in strings",
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "}]{", "content":'
        ' "<tool_call>\\n{\\"name\\": 1}\\n</tool_call> }} ]"}}\n</tool_call>',
        calls=[
            (
                "write_file",
                {"path": "}]{", "content": '<tool_call>\n{"name": 1}\n</tool_call> }} ]'},
            )
        ],
    ),
    Sample(
        "nested",
        '<tool_call>\n{"name": "plan", "arguments": {"steps": ["a", "b"], "opt_tree": {"label":'
        ' "r", "children": [{"label": "c", "children": []}, []]}, "opt_ratio": -1.5e3,'
        ' "opt_note": null, "opt_any": [true, false]}}\n</tool_call>',
        calls=[
            (
                "plan",
                {
                    "steps": ["a", "b"],
                    "opt_tree": {"label": "r", "children": [{"label": "c", "children": []}, []]},
                    "opt_ratio": -1500.0,
                    "opt_note": None,
                    "opt_any": [True, False],
                },
            )
        ],
    ),
    Sample(
        "raw line breaks, and backslashes that escape nothing, in a string",
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "a\\d\\\'", "content": "x\n'
        '\ty\r\nz \\uzz \\\nw"}}\n</tool_call>',
        calls=[("write_file", {"path": "a\\d'", "content": "x\n\ty\r\nz \\uzz \nw"})],
    ),
    Sample(
        "JSON with other languages' words and quotes, and with commas too many and too few",
        '<tool_call>\n{"name": "plan", "arguments": {"steps": [\'a, "b"\', c d, , "e" "f",],'
        ' opt_any: {"x": True "y", "z": None}, "opt_ratio": NaN,}}\n</tool_call>',
        calls=[
            (
                "plan",
                {
                    "steps": ['a, "b"', "c d", "e", "f"],
                    "opt_any": {"x": True, "y": None, "z": None},
                    "opt_ratio": "NaN",
                },
            )
        ],
    ),
    Sample(
        "markup where a value, a colon and a name should be",
        '<tool_call>{"name": "now", "arguments": {"a": </tool_call>'
        '<tool_call>{"name": "now", "arguments": {"a"</tool_call>'
        '<tool_call>{"name": "now", </tool_call>',
        "",
        [("now", {"a": None}), ("now", {"a": None}), NOW],
    ),
    Sample(
        "a tool named like the marker",
        '<tool_call>\n{"name": "tool_call", "arguments": {"q": "tool_call"}}\n</tool_call>',
        calls=[("tool_call", {"q": "tool_call"})],
    ),
    Sample(
        "an unknown tool is the client's to refuse",
        '<tool_call>\n{"name": "fly", "arguments": {"to": 1}}\n</tool_call>',
        calls=[("fly", {"to": 1})],
    ),
    Sample(
        "looks like a marker",
        "if a <tool_cal: <tool_calls> </tool_cal <TOOL_CALL> < tool_call> <",
        "if a <tool_cal: <tool_calls> </tool_cal <TOOL_CALL> < tool_call> <",
    ),
    Sample("a word between markers", "Use <tool_call> tags </tool_call> so.", "Use tags so."),
    Sample("an end alone", "So </tool_call>.", "So ."),
    Sample("an empty block", "a<tool_call>\n</tool_call>b", "a\nb"),
    Sample(
        "the end is missing",
        '<tool_call>\n{"name": "now", "arguments": {}}\n',
        calls=[NOW],
    ),
    Sample(
        "the end is missing before the next",
        '<tool_call>\n{"name": "now", "arguments": {}}\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call>',
        calls=[NOW, NOW],
    ),
    Sample(
        "half an end",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_c',
        calls=[NOW],
    ),
    Sample(
        "a bracket too many",
        '<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>',
        calls=[NOW],
    ),
    Sample(
        "a bracket too few",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>',
        calls=[PARIS],
    ),
    Sample(
        "two brackets too few",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"\n</tool_call> ok',
        "ok",
        [PARIS],
    ),
    Sample(
        "a string that is never closed",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par\n</tool_call>\nok',
        "ok",
        [("get_weather", {"city": "Par"})],
    ),
    Sample("cut in the key", '<tool_call>\n{"na', '{"na'),
    Sample("cut in the name", '<tool_call>\n{"name": "get_w', '{"name": "get_w'),
    Sample("cut after the name", '<tool_call>\n{"name": "now", "arg', calls=[("now", Cut(""))]),
    Sample(
        "cut in the arguments",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "P\\u00',
        calls=[("get_weather", Cut('{"city": "P\\u00'))],
    ),
    Sample(
        "no JSON",
        "<tool_call>\n{'name': 'now', 'arguments': {}}\n</tool_call>",
        "{'name': 'now', 'arguments': {}}",
    ),
    Sample(
        "no name",
        'So: <tool_call>\n{"city": "Paris"}\n</tool_call>',
        'So:\n{"city": "Paris"}',
    ),
    Sample(
        "the name is no string",
        '<tool_call>{"name": ["now"], "arguments": {}}</tool_call>',
        '{"name": ["now"], "arguments": {}}',
    ),
    Sample(
        "arguments that are no object",
        '<tool_call>{"name": "now", "arguments": [1, 2]}</tool_call>',
        '{"name": "now", "arguments": [1, 2]}',
    ),
    Sample(
        "arguments with single quotes",
        '<tool_call>\n{"name": "now", "arguments": {\'a\': 1}}\n</tool_call>',
        '{"name": "now", "arguments": {\'a\': 1}}',
    ),
]

PIECES = ["<tool_call>", "</tool_call>", '{"name": "now", "arguments": ', '"name"', "</tool"]
LONG_CALLS = {
    "call": '<tool_call>\n{"name": "now", "arguments": {"a": "%s"}}\n</tool_call>',
    "arguments first": '<tool_call>{"arguments": {"a": "%s"}, "name": "now"}',
    "content": "%s",
    "blank": '<tool_call>{"name": "now", "arguments": {}}</tool_call>%s',
    "no call": '<tool_call>{"a": "%s"}',
}
TRIGGER = "Well.\n<tool_call>"
TEMPLATES = [
    templates.QWEN,
    '{% if tools %}<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>',
    r"{% if tools %}<tool_call>\n{\"name\": <name>, \"arguments\": <object>}",
    "{% if tools %}<tool_call>\n{'arguments': <args>, 'name': <name>}",
    "{% if tools %}{{ '<tool_call>' + tool_call.function | tojson }}",
]
