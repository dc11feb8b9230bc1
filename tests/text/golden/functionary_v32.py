"""Functionary 3.2: parts of an answer, each for a recipient."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS: Call = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})
WEATHER = 'get_weather\n{"city": "Paris"}'
CLOCK = "now\n{}"

SAMPLES = [
    Sample("no call", "all\nMild {today}.\n", "Mild {today}.\n"),
    Sample("text for nobody", "Mild.\n\n>>> 1 + 1\n2", "Mild.\n\n>>> 1 + 1\n2"),
    Sample("one call", WEATHER, "", [PARIS]),
    Sample("with the mark", f">>>{WEATHER}", "", [PARIS]),
    Sample("two calls", f"{WEATHER}>>>{CLOCK}", "", [PARIS, NOW]),
    Sample("two calls on lines", f"{WEATHER}\n>>>{CLOCK}\n", "", [PARIS, NOW]),
    Sample("text before", f"all\nI ask.\n>>>{WEATHER}", "I ask.", [PARIS]),
    Sample(
        "text before, with marks", f">>>all\nI ask.>>>{CLOCK}>>>{WEATHER}", "I ask.", [NOW, PARIS]
    ),
    Sample("text after", f"{CLOCK}>>>all\nDone.", "Done.", [NOW]),
    Sample("text behind the object", f"{CLOCK}\nDone.", "Done.", [NOW]),
    Sample("layout", 'get_weather\n\n {\n "city" : "Paris"\n}\n', "", [PARIS]),
    Sample("CRLF", "all\r\nI ask.\r\n>>>now\r\n{\r\n}\r\n", "I ask.", [NOW]),
    Sample("an unknown tool", 'fly\n{"to": 1}', 'fly\n{"to": 1}'),
    Sample("an unknown tool second", f'{CLOCK}>>>fly\n{{"to": 1}}', '>>>fly\n{"to": 1}', [NOW]),
    Sample("a tool and text", "now\nit is late", "now\nit is late"),
    Sample("an object at once", '{"city": "Paris"}', '{"city": "Paris"}'),
    Sample(
        "unicode, escapes and marks in strings",
        'write_file\n{"path": "é\\u00fc😀", "content": ">>>all\\n>>>now\\n{}"}',
        "",
        [("write_file", {"path": "éü😀", "content": ">>>all\n>>>now\n{}"})],
    ),
    Sample(
        "nested",
        'plan\n{"steps": [["a"]], "opt_any": {"b": [{"c": -1.5}]}}',
        "",
        [("plan", {"steps": [["a"]], "opt_any": {"b": [{"c": -1.5}]}})],
    ),
    Sample("a bracket too many", "now\n{}}", "", [NOW]),
    Sample("marks in text", "all\na >> b >>> c", "a >> b >>> c"),
    Sample("a long first line", "x" * 300, "x" * 300),
    Sample(
        "a call behind a long first line",
        "x" * 300 + '>>>get_weather\n{"city": "Paris"}',
        "x" * 300,
        [("get_weather", {"city": "Paris"})],
    ),
    Sample("nothing behind the mark", "all\nHm.>>>", "Hm.>>>"),
    Sample("cut in the mark", "all\nHm.>>", "Hm.>>"),
    Sample("cut in the name", "get_w", "get_w"),
    Sample("cut after the name", "now\n", "now\n"),
    Sample(
        "cut in the arguments",
        'get_weather\n{"city": "Par',
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
]

PIECES = [">>>", "all\n", "now\n", "now", '{"a": 1}']
LONG_CALLS = {
    "call": 'now\n{"a": "%s"}',
    "content": "all\n%s",
    "blank": f"{CLOCK}%s",
    "line": "%s",
}
TRIGGER = "all\nWell.\n>>>"
TEMPLATES = [
    "{% if tools %}{{ '>>>all\\n' + content }}>>>{{ name }}",
]
