"""Apertus: the arguments stand under the tool's name."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS: Call = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})
BEGIN, END = "<|tools_prefix|>", "<|tools_suffix|>"
WEATHER = '{"get_weather": {"city": "Paris"}}'
CLOCK = '{"now": {}}'

SAMPLES = [
    Sample("no call", "It is mild [1].", "It is mild [1]."),
    Sample("one call", f"{BEGIN}[{WEATHER}]{END}", "", [PARIS]),
    Sample("two calls", f"{BEGIN}[{WEATHER}, {CLOCK}]{END}", "", [PARIS, NOW]),
    Sample("without space", f"{BEGIN}[{WEATHER},{CLOCK}]{END}".replace(" ", ""), "", [PARIS, NOW]),
    Sample(
        "two names in one object", f"{BEGIN}[{WEATHER[:-1]}, {CLOCK[1:]}]{END}", "", [PARIS, NOW]
    ),
    Sample("text before", f"I ask.\n{BEGIN}[{WEATHER}]{END}", "I ask.", [PARIS]),
    Sample("text after", f"{BEGIN}[{CLOCK}]{END} Done.", "Done.", [NOW]),
    Sample("text around", f"One. {BEGIN}[{CLOCK}]{END}\nTwo.", "One.\nTwo.", [NOW]),
    Sample("no list", f"{BEGIN}{CLOCK}{END}", "", [NOW]),
    Sample("layout", f'{BEGIN} [\n {{ "now" : {{\n}}\n }} ,\n {WEATHER} ] {END}', "", [NOW, PARIS]),
    Sample("CRLF", f"{BEGIN}[\r\n{CLOCK},\r\n{WEATHER}\r\n]{END}\r\n", "", [NOW, PARIS]),
    Sample("null", f'{BEGIN}[{{"now": null}}]{END}', "", [NOW]),
    Sample("an unknown tool", f'{BEGIN}[{{"fly": {{"to": 1}}}}]{END}', "", [("fly", {"to": 1})]),
    Sample(
        "unicode, escapes and markers in strings",
        f'{BEGIN}[{{"write_file": {{"path": "é\\\\\\u00fc😀", "content": "{END}]}} {BEGIN}"}}}}]',
        "",
        [("write_file", {"path": "é\\ü😀", "content": f"{END}]}} {BEGIN}"})],
    ),
    Sample(
        "nested",
        f'{BEGIN}[{{"plan": {{"steps": [], "opt_any": [{{"a": [1, null]}}, -1e2]}}}}]{END}',
        "",
        [("plan", {"steps": [], "opt_any": [{"a": [1, None]}, -100.0]})],
    ),
    Sample("an escape in a name", f'{BEGIN}[{{"n\\u006fw": {{}}}}]{END}', "", [NOW]),
    Sample("an empty list", f"a{BEGIN}[]{END}b", "ab"),
    Sample("the end is missing", f"{BEGIN}[{WEATHER}]", "", [PARIS]),
    Sample("the bracket is missing", f"{BEGIN}[{WEATHER}{END} ok", "ok", [PARIS]),
    Sample("a bracket too few", f"{BEGIN}[{WEATHER[:-1]}]{END}", "", [PARIS]),
    Sample("a bracket too many", f"{BEGIN}[{CLOCK}}}]{END}", "", [NOW]),
    Sample("an empty object", f"{BEGIN}[{{}}]{END}", "[{}]"),
    Sample("no object for arguments", f'{BEGIN}[{{"now": 1}}]{END}', '[{"now": 1}]'),
    Sample("the second is broken", f"{BEGIN}[{CLOCK}, {{1}}]{END}", "{1}]", [NOW]),
    Sample("words in the list", f"{BEGIN}[or so]{END}", "[or so]"),
    Sample("words for a list", f"So {BEGIN} or so {END}.", "So or so ."),
    Sample("looks like a marker", "<|tools_pre <tools_prefix>", "<|tools_pre <tools_prefix>"),
    Sample("cut in the start", "Hm <|tools", "Hm <|tools"),
    Sample("cut in the name", f'{BEGIN}[{{"get_w', '[{"get_w'),
    Sample("cut after the name", f'{BEGIN}[{{"now":', '[{"now":'),
    Sample(
        "cut in the arguments",
        f'{BEGIN}[{{"get_weather": {{"city": "Par',
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
    Sample("cut before the end", f"{BEGIN}[{CLOCK}]<|tools_suf", "", [NOW]),
]

PIECES = [BEGIN, END, '{"now": ', '"now"', ":", "null"]
LONG_CALLS = {
    "call": f'{BEGIN}[{{"now": {{"a": "%s"}}}}]{END}',
    "content": "%s",
    "blank": f"{BEGIN}[{CLOCK}]{END}%s",
    "no call": f'{BEGIN}[{{"a": "%s"}}]',
}
TRIGGER = f"Well.\n{BEGIN}"
TEMPLATES = [
    f"{{% if tools %}}{BEGIN}[{{{{ calls }}}}]{END}",
]
