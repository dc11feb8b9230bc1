"""GigaChat 3 and 3.1: a marker, or a message of its own."""

from __future__ import annotations

from tests.text.golden.object_lists import NOW, PARIS, Layout
from tests.text.golden.samples import Sample

LAYOUT = Layout("<|function_call|>", "")
MESSAGE = "function call<|role_sep|>\n"
SAMPLES = [
    *LAYOUT.samples(),
    Sample("a call", f"<|function_call|>{LAYOUT.paris}", "", [PARIS]),
    Sample("text and a call", f"I ask.\n<|function_call|>{LAYOUT.now}", "I ask.", [NOW]),
    Sample("a message", f"{MESSAGE}{LAYOUT.paris}<|message_sep|>\n\n", "", [PARIS]),
    Sample(
        "text and a message", f"I ask.<|message_sep|>\n\n{MESSAGE}{LAYOUT.now}", "I ask.", [NOW]
    ),
    Sample("an empty text and a message", f"<|message_sep|>\n\n{MESSAGE}{LAYOUT.now}", "", [NOW]),
    Sample("the end of the text", f"<|function_call|>{LAYOUT.paris}</s>", "", [PARIS]),
    Sample("struck text", "<s>a</s>", "<s>a</s>"),
    Sample(
        "words of the marker", "a function call, function call", "a function call, function call"
    ),
]
PIECES = [*LAYOUT.pieces(), MESSAGE, "function call", "<|message_sep|>"]
LONG_CALLS = LAYOUT.long_calls()
TRIGGER = "Well.\n<|function_call|>"
TEMPLATES = [
    "{% if tools %}{{ 'function call' + role_sep }}{# <|role_sep|> <|message_sep|> #}",
    "{% if tools %}{{ 'function call' + '<|role_sep|>' }}{{ '<|function_call|><|message_sep|>' }}",
]
