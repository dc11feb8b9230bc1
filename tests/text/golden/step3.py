"""Step 3."""

from __future__ import annotations

from tests.text.golden.samples import Sample
from tests.text.golden.tagged import NOW, PARIS, Tags, closers, common_samples

TAGS = Tags(
    begin=lambda name: f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">',
    parameter=lambda key, value: f'<steptml:parameter name="{key}">{value}</steptml:parameter>',
    end="</steptml:invoke><｜tool_call_end｜>",
    parameter_end="</steptml:parameter>",
    start="<｜tool_call_begin｜>",
    stop="<｜tool_call_end｜>",
)
TWO = f"{TAGS.call('now')}\n{TAGS.call('get_weather', city='Paris')}"
SAMPLES = [
    *common_samples(TAGS),
    Sample(
        "a block around calls",
        f"So:\n<｜tool_calls_begin｜>\n{TWO}\n<｜tool_calls_end｜>\nDone.",
        "So:\nDone.",
        [NOW, PARIS],
    ),
    Sample(
        "a start with a slip of the template",
        TWO.replace("<｜tool_call_begin｜>", "<｜tool_call_begin>｜>\n"),
        "",
        [NOW, PARIS],
    ),
    Sample(
        "the name before the tag, too",
        TWO.replace("<｜tool_sep｜>", "<｜tool_sep｜>name\n"),
        "",
        [NOW, PARIS],
    ),
    Sample("a separator between calls", TWO.replace("\n", "<｜tool_sep｜>"), "", [NOW, PARIS]),
    Sample("no separator", TWO.replace("function<｜tool_sep｜>", ""), "", [NOW, PARIS]),
    Sample(
        "a call that is only talked about",
        'Write <steptml:invoke name="x"> here.',
        'Write <steptml:invoke name="x"> here.',
    ),
]
PIECES = [
    *("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "function<｜tool_sep｜>", "function"),
    *('<steptml:invoke name="now">', '<steptml:parameter name="a">', "</steptml:parameter>"),
    *("</steptml:invoke>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>", "<steptml:", "</"),
]
LONG_CALLS = {
    "call": '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">'
    '<steptml:parameter name="a">%s</steptml:parameter></steptml:invoke>',
    "blank": '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">%s'
    "</steptml:invoke>",
}
TRIGGER = "Well.\n<｜tool_calls_begin｜>"
TEMPLATES = ['{% if tools %}<｜tool_calls_begin｜>\n<steptml:invoke name="{{ f }}">']
UNIONS_AS_TEXT = True
CLOSERS = closers("</steptml:parameter>")
