"""DeepSeek V3 and R1: the kind of the tool, its name, and the arguments as a block of code."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def call(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


WEATHER = call("get_weather", '{"city": "Paris"}')
CLOCK = call("now", "{}")

SAMPLES = [
    Sample("no call", "It rains.\n```json\n{}\n```", "It rains.\n```json\n{}\n```"),
    Sample("one call", f"{BEGIN}{WEATHER}{END}", "", [PARIS]),
    Sample("two calls", f"{BEGIN}{WEATHER}{CLOCK}{END}", "", [PARIS, NOW]),
    Sample("two calls on lines", f"{BEGIN}{WEATHER}\n{CLOCK}{END}", "", [PARIS, NOW]),
    Sample("text before", f"I ask.\n\n{BEGIN}{WEATHER}{END}", "I ask.", [PARIS]),
    Sample("text after", f"{BEGIN}{CLOCK}{END}\nWait.", "Wait.", [NOW]),
    Sample("the end of the turn", f"Ok.{BEGIN}{CLOCK}{END}<｜end▁of▁sentence｜>", "Ok.", [NOW]),
    Sample("CRLF", f"{BEGIN}{CLOCK}{END}".replace("\n", "\r\n"), "", [NOW]),
    Sample(
        "no code",
        f'{BEGIN}{CALL}function{SEP}get_weather\n{{"city": "Paris"}}{CALL_END}{END}',
        "",
        [PARIS],
    ),
    Sample("a block of no language", f"{BEGIN}{CLOCK}{END}".replace("json", ""), "", [NOW]),
    Sample(
        "a section as distilled models write it",
        f"<｜tool▁calls｜>{CLOCK[len(CALL) :]}{END}",
        "",
        [NOW],
    ),
    Sample("another spelling", f"Hm.<｜tool\\_calls\\_begin｜>{CLOCK}{END}", "Hm.", [NOW]),
    Sample("no kind", f"{BEGIN}{CLOCK}{END}".replace("function", ""), "", [NOW]),
    Sample("the call's marker is missing", f"{BEGIN}{CLOCK[len(CALL) :]}{END}", "", [NOW]),
    Sample("the section's marker is missing", f"Hm. {CLOCK}", "Hm.", [NOW]),
    Sample("the section's end is missing", f"{BEGIN}{CLOCK}", "", [NOW]),
    Sample("the call's end is missing", f"{BEGIN}{CLOCK[: -len(CALL_END)]}{END}", "", [NOW]),
    Sample("both are missing", f"{BEGIN}{CLOCK[: -len(CALL_END)]}", "", [NOW]),
    Sample("an unknown tool", BEGIN + call("fly", '{"to": 1}'), "", [("fly", {"to": 1})]),
    Sample("no arguments", f"{BEGIN}{CALL}function{SEP}now\n{CALL_END}{END}", "", [NOW]),
    Sample(
        "much layout",
        BEGIN + call("get_weather", '{\n  "city" :\n    "Paris"\n}') + "\n" + END,
        "",
        [PARIS],
    ),
    Sample(
        "raw line breaks in a string",
        BEGIN + call("write_file", '{"path": "a", "content": "x\n  y\n```\nz"}') + END,
        "",
        [("write_file", {"path": "a", "content": "x\n  y\n```\nz"})],
    ),
    Sample(
        "unicode, escapes and markers in strings",
        BEGIN + call("write_file", f'{{"path": "é\\"\\u00fc😀", "content": "{CALL_END}}}{SEP}"}}'),
        "",
        [("write_file", {"path": 'é"ü😀', "content": f"{CALL_END}}}{SEP}"})],
    ),
    Sample(
        "nested",
        BEGIN + call("plan", '{"steps": ["a"], "opt_tree": {"label": "b", "children": [{}]}}'),
        "",
        [("plan", {"steps": ["a"], "opt_tree": {"label": "b", "children": [{}]}})],
    ),
    Sample(
        "a bracket too few",
        f"{BEGIN}" + call("get_weather", '{"city": "Paris"') + END,
        "",
        [PARIS],
    ),
    Sample("a bracket too many", BEGIN + call("now", "{}}") + END, "", [NOW]),
    Sample(
        "no separator", f"{BEGIN}{CALL}function now {{}}{CALL_END}{END} ok", "function now {} ok"
    ),
    Sample("words in the section", f"{BEGIN}what now{END}", "what now"),
    Sample("an empty section", f"{BEGIN}{END}a", "a"),
    Sample("an end alone", f"a{END}b", "ab"),
    Sample(
        "looks like a marker",
        "<｜tool▁calls <｜tool <|tool▁sep|>",
        "<｜tool▁calls <｜tool <|tool▁sep|>",
    ),
    Sample("cut in a marker", "a <｜tool▁ca", "a <｜tool▁ca"),
    Sample("cut in the kind", f"{BEGIN}{CALL}func", "func"),
    Sample("cut in the separator", f"{BEGIN}{CALL}function<｜tool▁s", "function"),
    Sample("cut in the name", f"{BEGIN}{CALL}function{SEP}get_w", "functionget_w"),
    Sample("cut after the name", f"{BEGIN}{CALL}function{SEP}now\n```js", "", [("now", Cut(""))]),
    Sample(
        "cut in the arguments",
        f'{BEGIN}{CALL}function{SEP}get_weather\n```json\n{{"city": "Par',
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
]

PIECES = [BEGIN, END, CALL, SEP, CALL_END, "function", "now", "\n```json\n", "\n```"]
LONG_CALLS = {
    "call": f'{BEGIN}{CALL}function{SEP}now\n```json\n{{"a": "%s"}}\n```{CALL_END}',
    "blank": f"{BEGIN}{CLOCK}%s",
    "header": f"{BEGIN}{CALL}%s",
}
TRIGGER = f"Well.\n{BEGIN}"
TEMPLATES = [
    f"{{% if tools %}}{BEGIN}{CALL}{{{{ tool.type }}}}{SEP}{{{{ name }}}}\\n```json\\n",
]
