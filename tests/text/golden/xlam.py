"""xLAM 2: an answer that is a list of calls."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS: Call = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
CLOCK = '{"name": "now", "arguments": {}}'

SAMPLES = [
    Sample("no call", "Mild [1], [see](x).", "Mild [1], [see](x)."),
    Sample("one call", f"[{WEATHER}]", "", [PARIS]),
    Sample("two calls", f"[{WEATHER}, {CLOCK}]", "", [PARIS, NOW]),
    Sample("blank space around", f"\n [ {WEATHER} ,\n{CLOCK}\n] \n", "", [PARIS, NOW]),
    Sample("CRLF", f"[\r\n{CLOCK},\r\n{WEATHER}\r\n]\r\n", "", [NOW, PARIS]),
    Sample("text before", f"I ask.\n[{WEATHER}]", "I ask.", [PARIS]),
    Sample("text after", f"[{CLOCK}]\nDone.", "Done.", [NOW]),
    Sample("a block of code", f"I ask.\n```json\n[{WEATHER}]\n```", "I ask.", [PARIS]),
    Sample(
        "a block of no language", f"```\n[{WEATHER}, {CLOCK}]\n```\nDone.", "Done.", [PARIS, NOW]
    ),
    Sample("another family's marker", f"Hm. [TOOL_CALLS][{WEATHER}]", "Hm.", [PARIS]),
    Sample("another family's tags", f"<tool_call>[{CLOCK}]</tool_call>", "", [NOW]),
    Sample(
        "a call, then code", f"```json\n[{CLOCK}]\n```\n```sh\n`a`\n```", "```sh\n`a`\n```", [NOW]
    ),
    Sample("punctuation behind a list", f"[{CLOCK}]; and `so`, on", "; and `so`, on", [NOW]),
    Sample("parameters", f"[{WEATHER}]".replace("arguments", "parameters"), "", [PARIS]),
    Sample("other keys", f'[{{"id": 7, {CLOCK[1:-1]}, "x": []}}]', "", [NOW]),
    Sample("arguments first", '[{"arguments": {}, "name": "now"}]', "", [NOW]),
    Sample("an answer in JSON", "[1, {}, [2]]", "[1, {}, [2]]"),
    Sample(
        "an unknown tool",
        '[{"name": "Ada", "arguments": {}}]',
        '[{"name": "Ada", "arguments": {}}]',
    ),
    Sample(
        "an unknown tool behind a marker",
        '[TOOL_CALLS][{"name": "fly", "arguments": {}}]',
        "",
        [("fly", {})],
    ),
    Sample("a tool's name alone", '[{"name": "now"}]', '[{"name": "now"}]'),
    Sample("code", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```'),
    Sample("code in Python", "```python\nx[0]\n```", "```python\nx[0]\n```"),
    Sample("an empty list", "[]", "[]"),
    Sample("the second is broken", f"[{CLOCK}, {{1}}]", "{1}]", [NOW]),
    Sample("a bracket too few", f"[{WEATHER[:-1]}]", "", [PARIS]),
    Sample("a bracket too many", f"[{CLOCK}}}]", "", [NOW]),
    Sample("the end is missing", f"[{CLOCK}", "", [NOW]),
    Sample(
        "unicode, escapes and brackets in strings",
        '[{"name": "write_file", "arguments": {"path": "]}", "content": "é\\n😀 \\u00e9 ``` ["}}]',
        "",
        [("write_file", {"path": "]}", "content": "é\n😀 é ``` ["})],
    ),
    Sample(
        "nested",
        '[{"name": "plan", "arguments": {"steps": ["a"], "opt_tree": {"label": "b"}}}]',
        "",
        [("plan", {"steps": ["a"], "opt_tree": {"label": "b"}})],
    ),
    Sample("cut at once", "[", "["),
    Sample("cut in the fence", "``", "``"),
    Sample("cut in the name", '[{"name": "get_w', '[{"name": "get_w'),
    Sample(
        "cut in the arguments",
        '[{"name": "get_weather", "arguments": {"city": "Par',
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
]

PIECES = ["[TOOL_CALLS]", "<tool_call>", "</tool_call>", "```json", "```", '[{"name": "now", ']
LONG_CALLS = {
    "call": '[{"name": "now", "arguments": {"a": "%s"}}]',
    "content": "a %s",
    "blank": f"[{CLOCK}]%s",
}
TRIGGER = "["
TEMPLATES = [
    "{% if tools %}You are developed by Salesforce xLAM team.",
    '{% if tools %}[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]',
]
