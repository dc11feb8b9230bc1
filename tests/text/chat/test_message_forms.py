"""The forms that a template expects are found by rendering test chats."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.text.chat.chat_messages import ToolCallForm
from pdserve.text.chat.chat_template import ChatTemplate
from pdserve.text.chat.message_forms import ProbedForms
from tests.text import templates

EACH = "{% for m in messages %}"
END = "{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}"
OBJECT = CALLS + "{{ c.function.arguments | tojson }}" + END


def forms_of(source: str) -> ProbedForms:
    """The forms of a template that sees messages alone."""
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return ProbedForms(template._probe)


@pytest.mark.parametrize(
    ("source", "takes_text", "takes_parts"),
    [
        (EACH + "{{ m.content }}" + END, True, False),
        (EACH + "{{ m.content | tojson }}" + END, True, False),
        (EACH + "{% for p in m.content %}{{ p.text }}{% endfor %}" + END, False, True),
        (  # only the last part comes through
            EACH + "{{ m.content if m.content is string else m.content[-1].text }}" + END,
            True,
            False,
        ),
        (  # the loop is in a macro
            "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}"
            "{% endfor %}{% endif %}{% endmacro %}" + EACH + "{{ show(m.get('content')) }}" + END,
            True,
            True,
        ),
        ("{{ raise_exception('no') }}", True, False),
        ("nothing of the chat", True, False),
    ],
)
def test_content_may_be_text_or_parts(source, takes_text, takes_parts):
    forms = forms_of(source)
    assert forms.takes_text is takes_text
    assert forms.takes_parts("user") is takes_parts
    assert forms.takes_parts("user") is takes_parts
    assert forms.takes_parts("nobody") is False


def test_each_role_is_asked_for_itself():
    """Some templates take a list behind a call for several results."""
    forms = forms_of(
        EACH + "{% for p in ([m.content] if m.content is string else m.content or []) %}"
        "{{ p if p is string or m.role == 'tool' else p.text }}{% endfor %}" + OBJECT + END
    )
    takes = {role: forms.takes_parts(role) for role in ("system", "developer", "assistant", "tool")}
    assert takes == {"system": True, "developer": True, "assistant": True, "tool": False}


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (EACH + "{{ m.content }}" + OBJECT + END, ToolCallForm("absent")),
        (EACH + "{{ m['content'] + '' }}" + OBJECT + END, ToolCallForm("empty")),
        (  # only the last message may be without content
            EACH + "{% if not loop.last %}{{ m['content'] + '' }}{% endif %}" + OBJECT + END,
            ToolCallForm("empty"),
        ),
        (  # no other message may be
            EACH + "{% if loop.last %}{{ m['content'] + '' }}{% endif %}" + OBJECT + END,
            ToolCallForm("empty"),
        ),
        (  # `None` would be printed
            EACH + "{{ m['content'] ~ '' if 'content' in m else m.nothing.at_all }}" + OBJECT + END,
            ToolCallForm("empty"),
        ),
        (
            EACH + "{% if m['content'] is none %}" + OBJECT + "{% else %}{{ m['content'] + '' }}"
            "{% endif %}" + END,
            ToolCallForm("none", takes_empty=False),
        ),
        (
            EACH + CALLS + "{{ c.function.arguments + '' }}" + END + END,
            ToolCallForm("absent", "string"),
        ),
        (EACH + CALLS + "{{ c.function.arguments }}" + END + END, ToolCallForm("absent", "string")),
        (EACH + "{{ m.content }}" + END, ToolCallForm("empty")),
        ("{{ raise_exception('no calls') }}", ToolCallForm("empty")),
    ],
)
def test_the_form_of_calls_is_the_first_that_comes_through(source, form):
    assert forms_of(source).tool_calls(reasons=False) == form


def test_calls_with_reasoning_may_have_another_form():
    forms = forms_of(
        EACH + "{% if m.content is string and m.reasoning_content %}{{ m.reasoning_content }}"
        "{% endif %}" + OBJECT + END
    )
    assert forms.tool_calls(reasons=False) == ToolCallForm("absent")
    assert forms.tool_calls(reasons=True) == ToolCallForm("empty")


@pytest.mark.parametrize("family", templates.ALL)
def test_a_form_is_found_once(family):
    rendered: list[Any] = []

    def render(chat: list[dict[str, Any]]) -> str:
        rendered.append(chat)
        return ChatTemplate(templates.ALL[family])._probe(chat)

    forms = ProbedForms(render)
    found = (forms.takes_text, forms.takes_parts("tool"), forms.tool_calls(False))
    before = len(rendered)
    assert before < 20
    assert (forms.takes_text, forms.takes_parts("tool"), forms.tool_calls(False)) == found
    assert len(rendered) == before
