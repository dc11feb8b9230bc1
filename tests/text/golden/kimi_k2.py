"""Kimi K2: an id with the tool's name, then the arguments, in a section."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})
PLACE = '{"city": "Paris"}'
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, SEP, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def call(id: str, arguments: str) -> str:
    return f"{CALL}{id}{SEP}{arguments}{CALL_END}"


WEATHER = call("functions.get_weather:0", '{"city": "Paris"}')
CLOCK = call("functions.now:1", "{}")

SAMPLES = [
    Sample("no call", "Clear skies today.\n", "Clear skies today.\n"),
    Sample("one call", f"{BEGIN}{WEATHER}{END}", "", [PARIS]),
    Sample("two calls", f"{BEGIN}{WEATHER}{CLOCK}{END}", "", [PARIS, NOW]),
    Sample("two calls on lines", f"{BEGIN}\n{WEATHER}\n{CLOCK}\n{END}\n", "", [PARIS, NOW]),
    Sample("text before", f"I look it up.\n\n{BEGIN}{WEATHER}{END}", "I look it up.", [PARIS]),
    Sample("text after", f"{BEGIN}{CLOCK}{END} Done.", "Done.", [NOW]),
    Sample("text around", f"First. {BEGIN}{CLOCK}{END} Then.", "First. Then.", [NOW]),
    Sample(
        "space around all parts",
        f'{BEGIN} {CALL} functions.get_weather:0 {SEP} {{"city" : "Paris"}} {CALL_END} {END}',
        "",
        [PARIS],
    ),
    Sample("CRLF", f"Hm.\r\n{BEGIN}\r\n{CLOCK}\r\n{END}\r\n", "Hm.", [NOW]),
    Sample("no prefix", f"{BEGIN}{call('now:12', '{}')}{END}", "", [NOW]),
    Sample("no index, a tool's name", f"{BEGIN}{call('functions.now', '{}')}{END}", "", [NOW]),
    Sample("an unknown tool", f"{BEGIN}{call('functions.fly:0', '{}')}{END}", "", [("fly", {})]),
    Sample(
        "a name with dots and dashes",
        f"{BEGIN}{call('functions.a.b-c:3', '{}')}{END}",
        "",
        [("a.b-c", {})],
    ),
    Sample(
        "a number, and arguments of one tool",
        f"{BEGIN}{call('7', PLACE)}{call('call_x1', PLACE)}{END}",
        "",
        [PARIS, PARIS],
    ),
    Sample(
        "an id without a name, and arguments of no tool",
        f"{BEGIN}{call('call_x1', '{1}')}{call('x@2', PLACE[:-1] + ', 1: 2}')}{CLOCK}{END}",
        f"call_x1{{1}}x@2{PLACE[:-1]}, 1: 2}}",
        [NOW],
    ),
    Sample(
        "an id without a name, and arguments cut short",
        f"{BEGIN}{CALL}7{SEP}{PLACE[:-1]}",
        f"7{PLACE[:-1]}",
    ),
    Sample("a number, and no arguments", f"{BEGIN}{call('7', '{}')}{END} ok", "ok", [NOW]),
    Sample("no id", f"{BEGIN}{call('', '{}')}{END}", "{}"),
    Sample("no arguments", f"{BEGIN}{call('functions.now:0', '')}{END}", "", [NOW]),
    Sample("no separator", f"{BEGIN}{CALL}functions.now:0{{}}{CALL_END}{END}", "", [NOW]),
    Sample("no section", f"So {CLOCK}", "So", [NOW]),
    Sample(
        "the section's other spelling",
        f"<|tool_call_section_begin|>{CLOCK}<|tool_call_section_end|>",
        "",
        [NOW],
    ),
    Sample("the section's end is missing", f"{BEGIN}{WEATHER}", "", [PARIS]),
    Sample(
        "the call's end is missing",
        f"{BEGIN}{CLOCK[: -len(CALL_END)]}{WEATHER}{END}",
        "",
        [NOW, PARIS],
    ),
    Sample("a bracket too many", f"{BEGIN}{call('functions.now:0', '{}}')}{END}", "", [NOW]),
    Sample(
        "a bracket too few",
        f"{BEGIN}{call('functions.get_weather:0', '{1: 1')}{CLOCK}",
        "",
        [("get_weather", {"1": 1}), NOW],
    ),
    Sample(
        "unicode, escapes and markers in strings",
        BEGIN
        + call(
            "functions.write_file:0",
            '{"path": "ü\\t😀\\u00e9", "content": "<|tool_call_end|> }} '
            '<|tool_calls_section_end|>"}',
        ),
        "",
        [
            (
                "write_file",
                {"path": "ü\t😀é", "content": "<|tool_call_end|> }} <|tool_calls_section_end|>"},
            )
        ],
    ),
    Sample(
        "nested",
        BEGIN + call("functions.plan:0", '{"steps": [], "opt_any": [{"a": {"b": [1.5, null]}}]}'),
        "",
        [("plan", {"steps": [], "opt_any": [{"a": {"b": [1.5, None]}}]})],
    ),
    Sample("an empty section", f"So.{BEGIN}{END}", "So."),
    Sample("words in the section", f"a {BEGIN} or so {END}", "a or so"),
    Sample("words for a call", f"{BEGIN}{CALL}what now?{CALL_END}{END}", "what now?"),
    Sample("an end alone", f"a{END}b", "ab"),
    Sample(
        "looks like a marker",
        "<|tool_calls_section <|tool_call| <| tool_call_begin|>",
        "<|tool_calls_section <|tool_call| <| tool_call_begin|>",
    ),
    Sample("a header that never ends", f"{CALL}{'x' * 600}", "x" * 600),
    Sample("cut in the section's marker", "Hm <|tool_calls_sec", "Hm <|tool_calls_sec"),
    Sample("cut in the id", f"{BEGIN}{CALL}functions.get_w", "functions.get_w"),
    Sample(
        "cut in the separator",
        f"{BEGIN}{CALL}functions.now:0<|tool_call_arg",
        "",
        [("now", Cut(""))],
    ),
    Sample(
        "cut before the arguments", f"{BEGIN}{CALL}functions.now:0{SEP}", "", [("now", Cut(""))]
    ),
    Sample(
        "cut in the arguments",
        f'{BEGIN}{CALL}functions.get_weather:0{SEP}{{"city": "Par',
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
    Sample("cut in the call's end", f"{BEGIN}{CLOCK[:-4]}", "", [NOW]),
]

PIECES = [BEGIN, END, CALL, SEP, CALL_END, "functions.now:0", "now", "<|tool_call"]
LONG_CALLS = {
    "call": f'{BEGIN}{CALL}functions.now:0{SEP}{{"a": "%s"}}{CALL_END}',
    "content": "%s",
    "blank": f"{BEGIN}{CLOCK}%s",
    "header": f"{BEGIN}{CALL}%s",
}
TRIGGER = f"Well.\n{BEGIN}"
TEMPLATES = [
    f"{{% if tools %}}{BEGIN}{{% for call in calls %}}{CALL}{{{{ call.id }}}}{SEP}",
]
