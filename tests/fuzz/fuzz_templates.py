"""Fuzz target: chat templates that nobody vouches for.

    python -m tests.fuzz templates -max_total_time=60 -timeout=20

A template renders within its limits or is refused with words. What one built-in operation can do by
itself, the process around it ends (`text/chat/template_process.py`), and libFuzzer's own time limit
here.
"""

from __future__ import annotations

from typing import Any, Final

from pdserve.errors import InvalidRequest
from pdserve.text.chat.chat_template import ChatTemplate
from pdserve.text.chat.template_limits import TemplateLimits
from tests.fuzz.input import Input, look_at_refusal

__all__ = ["fuzz", "seeds"]

_LIMITS: Final = TemplateLimits(
    source_chars=4096, output_chars=1 << 16, work_chars=1 << 18, seconds=0.5
)
_MESSAGES: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
    },
    {"role": "user", "content": "v"},
]
_PIECES: Final = [
    "{{ messages }}",
    "{{ m.content }}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if m %}",
    "{% endif %}",
    "{% set x = ",
    " %}",
    "{{ ",
    " }}",
    "range(99999)",
    "x * 9999",
    "|join",
    "|tojson",
    "|length",
    "x ~ x",
    "namespace(a=1)",
    "loop.index",
    "|map(attribute='role')|list",
    "'%99s' % 1",
    "raise_exception('x')",
    "x.__class__",
    "|format",
    "{% macro f(n) %}",
    "{{ f(n) }}",
    "{% endmacro %}",
    "[1]*999",
    "|replace('a','aa')",
    "tools",
    "documents",
    "strftime_now('%Y')",
    "|sort",
    "| indent(99)",
]


def fuzz(data: bytes) -> None:
    """One input: pieces of templates by number, and text of its own between them."""
    source = Input(data)
    parts = []
    while source:
        number = source.number()
        if number < 0xC0:
            parts.append(_PIECES[number % len(_PIECES)])
        else:
            parts.append(source.bytes(number - 0xC0).decode(errors="replace"))
    text = "".join(parts)
    try:
        template = ChatTemplate(text, {"bos_token": "<s>"}, limits=_LIMITS)
        out = template.render(_MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
    except InvalidRequest as error:
        look_at_refusal(error)
        return
    assert len(out) <= _LIMITS.output_chars
    out.encode(errors="surrogatepass")


def seeds() -> list[bytes]:
    """Each piece by itself, and templates of several."""
    whole = bytes([2, 1, 3])
    text = b"{% for m in messages %}{{ m.role + ': ' }}{% endfor %}"
    macro = bytes([23, 24, 25])
    return [bytes([n]) for n in range(len(_PIECES))] + [
        whole,
        bytes([0xC0 + len(text)]) + text,
        macro,
    ]
