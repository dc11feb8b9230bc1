"""Functionary 3.1, and others that write `<function=NAME>` and an object."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS: Call = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})
WEATHER = '<function=get_weather>{"city": "Paris"}</function>'
CLOCK = "<function=now>{}</function>"

SAMPLES = [
    Sample("no call", "Mild {today}.", "Mild {today}."),
    Sample("one call", WEATHER, "", [PARIS]),
    Sample("two calls", WEATHER + CLOCK, "", [PARIS, NOW]),
    Sample("two calls on lines", f"{WEATHER}\n{CLOCK}\n", "", [PARIS, NOW]),
    Sample("text before", f"I ask.\n\n{WEATHER}", "I ask.", [PARIS]),
    Sample("text after", f"{CLOCK} Done.", "Done.", [NOW]),
    Sample("text around", f"One. {CLOCK}\nTwo.", "One.\nTwo.", [NOW]),
    Sample("layout", '<function=get_weather> {\n "city" : "Paris" } \n</function>', "", [PARIS]),
    Sample("CRLF", f"\r\n{CLOCK}\r\n{CLOCK}\r\n", "", [NOW, NOW]),
    Sample("no arguments", "<function=now></function>", "", [NOW]),
    Sample("an unknown tool", '<function=fly>{"to": 1}</function>', "", [("fly", {"to": 1})]),
    Sample(
        "unicode, escapes and markers in strings",
        '<function=write_file>{"path": "é\\u00fc😀", "content": "</function> }} <function=now>{}"}'
        "</function>",
        "",
        [("write_file", {"path": "éü😀", "content": "</function> }} <function=now>{}"})],
    ),
    Sample(
        "nested",
        '<function=plan>{"steps": [], "opt_tree": {"label": "a", "children": [[{}]]}}</function>',
        "",
        [("plan", {"steps": [], "opt_tree": {"label": "a", "children": [[{}]]}})],
    ),
    Sample("the end is missing", WEATHER[: -len("</function>")], "", [PARIS]),
    Sample("the end is missing before the next", f"<function=now>{{}}{WEATHER}", "", [NOW, PARIS]),
    Sample("a bracket too many", "<function=now>{}}</function>", "", [NOW]),
    Sample(
        "a bracket too few",
        '<function=now>{"a": [1</function> ok',
        "ok",
        [("now", {"a": [1]})],
    ),
    Sample("words for arguments", "<function=now>or so</function>", "now>or so"),
    Sample("no name", "<function=>{}</function>", ">{}"),
    Sample("an end alone", "a</function>b", "ab"),
    Sample("looks like a marker", "<function now> <functio", "<function now> <functio"),
    Sample("cut in the name", "<function=get_w", "get_w"),
    Sample("cut after the name", "<function=now>", "", [("now", Cut(""))]),
    Sample(
        "cut in the arguments",
        '<function=get_weather>{"city": "Par',
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
    Sample("cut in the end", "<function=now>{}</func", "", [NOW]),
]

PIECES = ["<function=", "</function>", "now>", "now", '{"a": 1}']
LONG_CALLS = {
    "call": '<function=now>{"a": "%s"}</function>',
    "content": "%s",
    "blank": f"{CLOCK}%s",
    "header": "<function=%s",
}
TRIGGER = "Well.\n<function="
TEMPLATES = [
    "{% if tools %}{{ '<function=' + name + '>' + arguments + '</function>' }}",
]
