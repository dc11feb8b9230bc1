"""Command R and R+: a list in a block of code."""

from __future__ import annotations

from tests.text.golden.samples import Call, Cut, Sample

PARIS: Call = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})
WEATHER = '{\n        "tool_name": "get_weather",\n        "parameters": {"city": "Paris"}\n    }'
CLOCK = '{"tool_name": "now", "parameters": {}}'
START = "Action:\n```json"

SAMPLES = [
    Sample("no call", "Mild. Action: none.", "Mild. Action: none."),
    Sample("one call", f"{START}\n[\n    {WEATHER}\n]\n```", "", [PARIS]),
    Sample("two calls", f"{START}\n[\n    {WEATHER},\n    {CLOCK}\n]\n```", "", [PARIS, NOW]),
    Sample("in one line", f"Action: ```json\n[{CLOCK}]```", "", [NOW]),
    Sample("no space", f"Action:```json[{CLOCK},{CLOCK}]```", "", [NOW, NOW]),
    Sample("no action", f"```json\n[{CLOCK}]\n```", "", [NOW]),
    Sample("no list", f"{START}\n{CLOCK}\n```", "", [NOW]),
    Sample("text before", f"I ask.\n{START}\n[{CLOCK}]\n```", "I ask.", [NOW]),
    Sample("text after", f"{START}\n[{CLOCK}]\n```\nDone.", "Done.", [NOW]),
    Sample(
        "markers of a turn",
        f"<|CHATBOT_TOKEN|>{START}\n[{CLOCK}]\n```<|END_OF_TURN_TOKEN|>",
        "",
        [NOW],
    ),
    Sample("text between markers", "<|CHATBOT_TOKEN|>Mild.<|END_OF_TURN_TOKEN|>", "Mild."),
    Sample("CRLF", f"{START}\n[{CLOCK}]\n```".replace("\n[", "\r\n["), "", [NOW]),
    Sample("name", f"{START}\n[{CLOCK}]\n```".replace("tool_name", "name"), "", [NOW]),
    Sample(
        "an unknown tool",
        f'{START}\n[{{"tool_name": "fly", "parameters": {{}}}}]\n```',
        f'{START}\n[{{"tool_name": "fly", "parameters": {{}}}}]\n```',
    ),
    Sample("code", "```json\n[1, 2]\n```", "```json\n[1, 2]\n```"),
    Sample("no name", f'{START}\n[{{"a": 1}}]\n```', f'{START}\n[{{"a": 1}}]\n```'),
    Sample(
        "unicode, escapes and fences in strings",
        f'{START}\n[{{"tool_name": "write_file", "parameters": {{"path": "é\\u00fc",'
        ' "content": "``` ]}"}}]\n```',
        "",
        [("write_file", {"path": "éü", "content": "``` ]}"})],
    ),
    Sample(
        "nested",
        f'{START}\n[{{"tool_name": "plan", "parameters": {{"steps": [["a"]], "opt_any": {{}}}}}}]',
        "",
        [("plan", {"steps": [["a"]], "opt_any": {}})],
    ),
    Sample("a bracket too few", f"{START}\n[{CLOCK[:-1]}]\n```", "", [NOW]),
    Sample("a bracket too many", f"{START}\n[{CLOCK}}}]\n```", "", [NOW]),
    Sample("the second is broken", f"{START}\n[{CLOCK}, {{1}}]", "{1}]", [NOW]),
    Sample("the end is missing", f"{START}\n[{CLOCK}", "", [NOW]),
    Sample("cut in the start", "Hm. Action:\n``", "Hm. Action:\n``"),
    Sample(
        "cut in the arguments",
        f'{START}\n[{{"tool_name": "get_weather", "parameters": {{"city": "Par',
        "",
        [("get_weather", Cut('{"city": "Par'))],
    ),
]

PIECES = [START, "Action:", "```json", "```", '{"tool_name": "now", ', "<|CHATBOT_TOKEN|>"]
LONG_CALLS = {
    "call": f'{START}\n[{{"tool_name": "now", "parameters": {{"a": "%s"}}}}]',
    "content": "%s",
    "blank": f"{START}\n[{CLOCK}]%s",
}
TRIGGER = f"Well.\n{START}"
CLOSERS = ("\n]",)
TEMPLATES = [
    '{% if tools %}Use the `directly-answer` tool.\\nAction:\\n```json\\n[ {"tool_name": ...}',
]
