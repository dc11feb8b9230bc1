"""Hunyuan's dense models: a name before a block of code."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS: Call = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})
BEGIN, END, CALL, CALL_END = "<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>"


def call(name: str, arguments: str) -> str:
    return f"{CALL}{name}\n```json\n{arguments}\n```{CALL_END}"


WEATHER = call("get_weather", '{"city": "Paris"}')
CLOCK = call("now", "{}")

SAMPLES = [
    Sample("no call", "Mild.\n```json\n{}\n```", "Mild.\n```json\n{}\n```"),
    Sample("one call", f"{BEGIN}{WEATHER}{END}", "", [PARIS]),
    Sample("two calls", f"{BEGIN}{WEATHER}\n{CLOCK}{END}", "", [PARIS, NOW]),
    Sample("text before", f"I ask.\n{BEGIN}{WEATHER}{END}", "I ask.", [PARIS]),
    Sample("text after", f"{BEGIN}{CLOCK}{END}\nDone.", "Done.", [NOW]),
    Sample("in an answer", f"<answer>\nI ask.\n{BEGIN}{CLOCK}{END}\n</answer>", "I ask.", [NOW]),
    Sample("layout", f"{BEGIN}\n{WEATHER}\n{END}".replace("get", " get"), "", [PARIS]),
    Sample("CRLF", f"{BEGIN}{WEATHER}{END}".replace("\n", "\r\n"), "", [PARIS]),
    Sample("no language", f"{BEGIN}{CLOCK}{END}".replace("json", ""), "", [NOW]),
    Sample("no code", f"{BEGIN}{CALL}now\n{{}}{CALL_END}{END}", "", [NOW]),
    Sample("no section", WEATHER, "", [PARIS]),
    Sample("an unknown tool", f"{BEGIN}{call('fly', chr(123) + chr(125))}{END}", "", [("fly", {})]),
    Sample("no arguments", f"{BEGIN}{CALL}now{CALL_END}{END}", "", [NOW]),
    Sample(
        "unicode, escapes and markers in strings",
        BEGIN
        + call("write_file", f'{{"path": "é\\u00fc", "content": "{CALL_END}```{END}"}}')
        + END,
        "",
        [("write_file", {"path": "éü", "content": f"{CALL_END}```{END}"})],
    ),
    Sample(
        "nested",
        BEGIN + call("plan", '{"steps": ["a"], "opt_any": {"b": [1, {"c": null}]}}') + END,
        "",
        [("plan", {"steps": ["a"], "opt_any": {"b": [1, {"c": None}]}})],
    ),
    Sample("the section's end is missing", f"{BEGIN}{CLOCK}", "", [NOW]),
    Sample(
        "the call's end is missing",
        f"{BEGIN}{CLOCK[: -len(CALL_END)]}{WEATHER}{END}",
        "",
        [NOW, PARIS],
    ),
    Sample("a bracket too many", f"{BEGIN}{call('now', '{}}')}{END}", "", [NOW]),
    Sample(
        "a bracket too few",
        f"{BEGIN}{call('now', '{1: {}')}{END}",
        "",
        [("now", {"1": {}})],
    ),
    Sample("words for a call", f"{BEGIN}{CALL}what now?{CALL_END}{END}", "what now?"),
    Sample("an empty section", f"a{BEGIN}{END}b", "ab"),
    Sample("looks like a marker", "<tool_cal <answers>", "<tool_cal <answers>"),
    Sample("cut in the name", f"{BEGIN}{CALL}get_w", "get_w"),
    Sample("cut after the name", f"{BEGIN}{CALL}now\n``", "", [("now", Cut(""))]),
    Sample(
        "cut in the arguments",
        f'{BEGIN}{CALL}get_weather\n```json\n{{"city": "Par',
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
]

PIECES = [BEGIN, END, CALL, CALL_END, "now", "\n```json\n", "\n```"]
LONG_CALLS = {
    "call": f'{BEGIN}{CALL}now\n```json\n{{"a": "%s"}}\n```{CALL_END}',
    "blank": f"{BEGIN}{CLOCK}%s",
    "header": f"{BEGIN}{CALL}%s",
}
TRIGGER = f"Well.\n{BEGIN}"
TEMPLATES = [
    f"{{% if tools %}}{BEGIN}{CALL}{{{{ name }}}}\\n```json\\n{{{{ args }}}}{CALL_END}{END}",
]
