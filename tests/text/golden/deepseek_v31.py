"""DeepSeek V3.1: the name, and the arguments behind a separator."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def call(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEP}{arguments}{CALL_END}"


WEATHER = call("get_weather", '{"city": "Paris"}')
CLOCK = call("now", "{}")

SAMPLES = [
    Sample("no call", "Snow is likely.", "Snow is likely."),
    Sample("one call", f"{BEGIN}{WEATHER}{END}", "", [PARIS]),
    Sample("two calls", f"{BEGIN}{WEATHER}{CLOCK}{END}", "", [PARIS, NOW]),
    Sample("text before", f"I ask.{BEGIN}{WEATHER}{END}", "I ask.", [PARIS]),
    Sample("text after", f"a {BEGIN}{CLOCK}{END} b", "a b", [NOW]),
    Sample("the end of the turn", f"{BEGIN}{CLOCK}{END}<｜end▁of▁sentence｜>", "", [NOW]),
    Sample("layout", f"{BEGIN}\n{CALL} now {SEP} {{ }} {CALL_END}\n{END}\n", "", [NOW]),
    Sample("CRLF", f"{BEGIN}\r\n{CLOCK}\r\n{END}\r\n", "", [NOW]),
    Sample(
        "arguments as a block of code",
        BEGIN + call("get_weather", '\n```json\n{"city": "Paris"}\n```') + END,
        "",
        [PARIS],
    ),
    Sample("no arguments", BEGIN + call("now", "") + END, "", [NOW]),
    Sample("an unknown tool", BEGIN + call("fly", '{"to": [1]}') + END, "", [("fly", {"to": [1]})]),
    Sample(
        "raw line breaks",
        BEGIN + call("write_file", '{"path":\n "a", "content": "b\n c"}') + END,
        "",
        [("write_file", {"path": "a", "content": "b\n c"})],
    ),
    Sample(
        "unicode, escapes and markers in strings",
        BEGIN + call("write_file", f'{{"path": "日\\n\\u00df😀", "content": "{END}]}}"}}') + END,
        "",
        [("write_file", {"path": "日\nß😀", "content": f"{END}]}}"})],
    ),
    Sample(
        "nested",
        BEGIN + call("plan", '{"steps": [["a"]], "opt_any": {"b": {"c": [true, -1e3]}}}') + END,
        "",
        [("plan", {"steps": [["a"]], "opt_any": {"b": {"c": [True, -1000.0]}}})],
    ),
    Sample("the section's marker is missing", f"Hm. {CLOCK}", "Hm.", [NOW]),
    Sample("the section's end is missing", f"{BEGIN}{CLOCK}", "", [NOW]),
    Sample("the call's end is missing", f"{BEGIN}{CALL}now{SEP}{{}}{END}", "", [NOW]),
    Sample(
        "the call's end is missing before the next",
        f"{BEGIN}{CALL}now{SEP}{{}}{WEATHER}{END}",
        "",
        [NOW, PARIS],
    ),
    Sample(
        "the call's marker is missing", f"a{BEGIN}now{SEP}{{}}{END}", "a now{}".replace(" ", "")
    ),
    Sample(
        "a bracket too few",
        BEGIN + call("now", '{"a": {"b": 1}'),
        "",
        [("now", {"a": {"b": 1}})],
    ),
    Sample("a bracket too many", BEGIN + call("now", "{}}"), "", [NOW]),
    Sample("no separator", f"{BEGIN}{CALL}now{{}}{CALL_END}{END}", "now{}"),
    Sample("no name", f"{BEGIN}{CALL}{SEP}{{}}{CALL_END}{END}", "{}"),
    Sample("words in the section", f"{BEGIN}or{END}", "or"),
    Sample(
        "looks like a marker",
        "a <｜tool▁call <｜tool▁calls▁begin|>",
        "a <｜tool▁call <｜tool▁calls▁begin|>",
    ),
    Sample("cut in a marker", f"a{BEGIN}<｜tool▁", "a"),
    Sample("cut in the name", f"{BEGIN}{CALL}get_w", "get_w"),
    Sample("cut in the separator", f"{BEGIN}{CALL}now<｜tool▁s", "now"),
    Sample("cut after the separator", f"{BEGIN}{CALL}now{SEP}", "", [("now", Cut(""))]),
    Sample(
        "cut in the arguments",
        f'{BEGIN}{CALL}get_weather{SEP}{{"city": "P',
        "",
        [("get_weather", Cut('{"city": "P'))],
    ),
]

PIECES = [BEGIN, END, CALL, SEP, CALL_END, "now", '{"a": 1}']
LONG_CALLS = {
    "call": f'{BEGIN}{CALL}now{SEP}{{"a": "%s"}}{CALL_END}',
    "blank": f"{BEGIN}{CLOCK}%s",
    "header": f"{BEGIN}{CALL}%s",
}
TRIGGER = f"Well.\n{BEGIN}"
TEMPLATES = [
    f"{{% if tools %}}{BEGIN}{CALL}{{{{ name }}}}{SEP}{{{{ arguments }}}}{CALL_END}",
]
