"""Mistral: the list of older tokenizers, the names of newer ones."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'

SAMPLES = [
    Sample("no call", "Hello [you].", "Hello [you]."),
    Sample("one call", f"[TOOL_CALLS][{CALL}]", "", [PARIS]),
    Sample("with space", f"[TOOL_CALLS] [{CALL}]\n", "", [PARIS]),
    Sample("text before", f"I look.\n[TOOL_CALLS][{CALL}]", "I look.", [PARIS]),
    Sample("text after", f"[TOOL_CALLS][{CALL}] That is all.", "That is all.", [PARIS]),
    Sample("two calls", f"[TOOL_CALLS][{CALL}, {CALL}]", "", [PARIS, PARIS]),
    Sample("two calls without space", f"[TOOL_CALLS][{CALL},{CALL}]", "", [PARIS, PARIS]),
    Sample("two markers", f"[TOOL_CALLS][{CALL}][TOOL_CALLS][{CALL}]", "", [PARIS, PARIS]),
    Sample("CRLF", f"[TOOL_CALLS]\r\n[\r\n{CALL}\r\n]\r\n", "", [PARIS]),
    Sample("no list", f"[TOOL_CALLS]{CALL}", "", [PARIS]),
    Sample(
        "arguments first, and an id",
        '[TOOL_CALLS][{"id": "abcdefghi", "arguments": {"city": "Paris"}, "name": "get_weather"}]',
        "",
        [PARIS],
    ),
    Sample("an empty object", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', "", [NOW]),
    Sample(
        "arguments as a string",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}]',
        "",
        [PARIS],
    ),
    Sample(
        "unicode, escapes, brackets and markers in strings",
        '[TOOL_CALLS][{"name": "write_file", "arguments": {"path": "]}[{", "content":'
        ' "é\\n😀 \\u00e9 [TOOL_CALLS][{\\"name\\"]"}}]',
        "",
        [("write_file", {"path": "]}[{", "content": 'é\n😀 é [TOOL_CALLS][{"name"]'})],
    ),
    Sample(
        "nested",
        '[TOOL_CALLS]plan[ARGS]{"steps": [["T"], []], "opt_tree": {"label": "a", "children":'
        " [[[1]]]}}",
        "",
        [("plan", {"steps": [["T"], []], "opt_tree": {"label": "a", "children": [[[1]]]}})],
    ),
    Sample("by name", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [PARIS]),
    Sample("by name alone", '[TOOL_CALLS]get_weather{"city": "Paris"}', "", [PARIS]),
    Sample(
        "by name with an id",
        '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}',
        "",
        [PARIS],
    ),
    Sample(
        "two by name",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        "",
        [PARIS, NOW],
    ),
    Sample(
        "by name, spaced out",
        'Hm.\n[TOOL_CALLS] get_weather [ARGS] {\n"city" : "Paris"\n}\n',
        "Hm.",
        [PARIS],
    ),
    Sample("an unknown tool", '[TOOL_CALLS]fly[ARGS]{"to": 1}', "", [("fly", {"to": 1})]),
    Sample(
        "a tool named like a marker",
        '[TOOL_CALLS]tool_call{"q": "[ARGS]"}',
        "",
        [("tool_call", {"q": "[ARGS]"})],
    ),
    Sample(
        "looks like a marker",
        "Usage: x [OPTIONS] [ARGS] [TOOL_CALL] [TOOL_CALLS [",
        "Usage: x [OPTIONS] [ARGS] [TOOL_CALL] [TOOL_CALLS [",
        literal=["[ARGS]"],
    ),
    Sample("words after the marker", "See [TOOL_CALLS] for more.", "See for more."),
    Sample("a list of something else", "[TOOL_CALLS][1, 2]", "[1, 2]"),
    Sample("an empty list", "[TOOL_CALLS][]", "[]"),
    Sample("an object without a name", '[TOOL_CALLS][{"city": 1}]', '[{"city": 1}]'),
    Sample("the second is broken", f"[TOOL_CALLS][{CALL}, {{1}}]", "{1}]", [PARIS]),
    Sample("a bracket too few", f"[TOOL_CALLS][{CALL[:-1]}]", "", [PARIS]),
    Sample("a bracket too many", f"[TOOL_CALLS][{CALL}}}]", "", [PARIS]),
    Sample("the end is missing", f"[TOOL_CALLS][{CALL}", "", [PARIS]),
    Sample(
        "a marker ends arguments that are not whole",
        '[TOOL_CALLS]plan[ARGS]{"steps": [[TOOL_CALLS]now[ARGS]{}',
        "",
        [("plan", {"steps": []}), NOW],
    ),
    Sample("cut in the marker", "Hm [TOOL_", "Hm [TOOL_"),
    Sample("cut in the list", "[TOOL_CALLS][", "["),
    Sample("cut in a key", '[TOOL_CALLS][{"na', '[{"na'),
    Sample("cut in a name", "[TOOL_CALLS]get_w", "get_w"),
    Sample("cut in the arguments' marker", "[TOOL_CALLS]now[AR", "", [NOW]),
    Sample("only the name of a tool", "[TOOL_CALLS]now", "", [NOW]),
    Sample("only names of tools", "[TOOL_CALLS]now[TOOL_CALLS]now", "", [NOW, NOW]),
    Sample("only another name", "[TOOL_CALLS]nowhere", "nowhere"),
    Sample("a list without the marker", f"So: [{CALL},\n{CALL}]\nDone.", "So:\nDone.", [PARIS] * 2),
    Sample("words before the list", f"[TOOL_CALLS] well [{CALL}]", "well", [PARIS]),
    Sample(
        "a list of other objects",
        f"[{CALL.replace('get_weather', 'paint')}, {{}}] [ {{}} ]",
        f"[{CALL.replace('get_weather', 'paint')}, {{}}] [ {{}} ]",
    ),
    Sample("cut before the arguments", "[TOOL_CALLS]now[ARGS]", "", [("now", Cut(""))]),
    Sample(
        "cut in the arguments",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Par',
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
    Sample("cut in the next marker", "[TOOL_CALLS]now[ARGS]{}[TOOL", "", [NOW]),
]

PIECES = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "now", '{"name": "now", "arguments": ']
LONG_CALLS = {
    "call": '[TOOL_CALLS]now[ARGS]{"a": "%s"}',
    "blank": "[TOOL_CALLS]%s",
    "list": '[{"name": "now", "arguments": {"a": "%s"}}]',
    "brackets": "[%s",
}
TRIGGER = "Well.\n[TOOL_CALLS]"
TEMPLATES = [
    "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]",
]
