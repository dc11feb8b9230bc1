"""Templates render as transformers renders them, and every failure is the request's own."""

from __future__ import annotations

import json
import warnings
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError, InvalidRequest
from pdserve.messages.card import ModelCard
from pdserve.text.chat.chat_messages import MAX_NESTING
from pdserve.text.chat.chat_template import ChatTemplate, ChatTemplates
from pdserve.text.chat.template_limits import TemplateLimits
from tests.support.seeds import is_long, number_for, run_seed
from tests.text import builders, templates

EXAMPLES = 400 if is_long() else 40
SEED = number_for(run_seed(), __name__)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

USER = {"role": "user", "content": "Is 1 < 2 & \"é\" > 'e'?  "}
SYSTEM = {"role": "system", "content": " Be brief. "}
ASSISTANT = {"role": "assistant", "content": "Yes.\n"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "<b>Météo</b>",
        "parameters": {"type": "object"},
    },
}
TOOL_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ASSISTANT, USER],
    "long": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, {"role": "user", "content": ""}],
    "thought": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo."}, USER],
    "reasoning": [USER, {"role": "assistant", "content": "So.", "reasoning_content": "hm"}],
    "tools": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ],
}


def reference(source: str, **arguments: Any) -> str:
    """What transformers makes of it."""
    text: str = _transformers().apply_chat_template(
        tokenize=False, chat_template=source, **arguments
    )
    return text


@cache
def _transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=builders.byte_level(), **SPECIAL)


@cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL)


def both(source: str, messages: list[dict[str, Any]], **options: Any) -> tuple[str, str]:
    """Our text (or the words it was refused with) and transformers'."""
    kwargs = options.pop("template_kwargs", {})
    try:
        ours = compiled(source).render(messages, template_kwargs=kwargs, **options)
    except InvalidRequest as error:
        ours = error.message
    try:
        theirs = reference(source, conversation=messages, **options, **kwargs)
    except (jinja2.TemplateError, TypeError) as error:
        theirs = str(error)
    return ours, theirs


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", templates.ALL)
def test_templates_render_as_transformers_renders_them(family, conversation, generation):
    options = {
        "add_generation_prompt": generation,
        "tools": [TOOL] if conversation == "tools" else None,
        "documents": [{"title": "A", "text": "b"}] if family == "rag" else None,
        "template_kwargs": {"enable_thinking": False},
    }
    ours, theirs = both(templates.ALL[family], CONVERSATIONS[conversation], **options)
    assert theirs in ours if ours.startswith("the chat template refused: ") else ours == theirs


@seed(SEED)
@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=5))
def test_any_text_renders_as_transformers_renders_it(texts):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    for family in ("qwen", "gemma"):
        ours, theirs = both(templates.ALL[family], messages, add_generation_prompt=True)
        assert ours == theirs


@pytest.mark.parametrize("content", ["Sure, ", "Sure,", " Sure  ", "one\ntwo"])
@pytest.mark.parametrize("family", ["qwen", "mistral", "gemma", "llama3"])
def test_a_final_message_is_continued_as_in_transformers(family, content):
    messages = [USER, {"role": "assistant", "content": content}]
    ours, theirs = both(
        templates.ALL[family], messages, continue_final_message=True, add_generation_prompt=False
    )
    assert ours == theirs
    assert ours.endswith((content.strip(), content))


def test_continuing_and_a_generation_prompt_exclude_each_other():
    with pytest.raises(InvalidRequest, match="exclude"):
        ChatTemplate(templates.QWEN).render([USER], continue_final_message=True)


def test_a_final_message_that_the_template_drops_cannot_be_continued():
    template = ChatTemplate("{{ messages[0].content }}")
    messages = [USER, ASSISTANT]
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template.render(messages, continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(InvalidRequest, match="no content"):
        template.render(
            [USER, {"role": "user", "content": None}],
            continue_final_message=True,
            add_generation_prompt=False,
        )


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% include 'other' %}", "loader"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
        ("{{ {}['x']|tojson(indent=3.5) }}", "TypeError"),
    ],
)
def test_what_a_template_raises_refuses_the_request(source, words):
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        ChatTemplate(source).render([USER])
    assert words in caught.value.message
    assert caught.value.http_status == 400


def test_a_template_that_is_none_is_refused_with_its_line():
    with pytest.raises(InvalidRequest, match=r"line 2") as caught:
        ChatTemplate("fine\n{% for %}")
    assert caught.value.param == "chat_template"


def test_no_messages_is_refused():
    with pytest.raises(InvalidRequest, match="empty"):
        ChatTemplate("x").render([])


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize"])
def test_template_kwargs_cannot_replace_what_the_request_says_elsewhere(name):
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("x").render([USER], template_kwargs={name: "y"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_only_json_reaches_a_template():
    with pytest.raises(InvalidRequest, match="not JSON"):
        ChatTemplate("x").render([USER], template_kwargs={"f": open})
    deep: Any = "leaf"
    for _ in range(MAX_NESTING + 1):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="deeply"):
        ChatTemplate("x").render([{"role": "user", "content": "x", "extra": deep}])


def test_the_rendered_prompt_has_a_bound():
    limits = TemplateLimits(output_chars=100)
    template = ChatTemplate("{{ messages[0].content }}", limits=limits)
    assert template.render([{"role": "user", "content": "x" * 100}]) == "x" * 100
    with pytest.raises(InvalidRequest, match="longer than 100"):
        template.render([{"role": "user", "content": "x" * 101}])


# ---------------------------------------------------------------- content


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (templates.LLAMA3, "string"),
        (templates.QWEN, "string"),
        (templates.MISTRAL, "string"),
        (templates.GEMMA, "either"),
        (templates.PARTS_ONLY, "parts"),
        (
            "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}"
            "{{ p['text'] }}{% endfor %}{% endfor %}",
            "parts",
        ),
        (
            "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
            "{% for p in content %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "either",
        ),
        (  # loops over letters, not parts
            "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
            "string",
        ),
    ],
)
def test_the_form_of_content_is_found(source, found):
    assert ChatTemplate(source, SPECIAL).content_format == found


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def test_text_parts_become_what_the_template_takes():
    messages = [{"role": "user", "content": PARTS}]
    assert "\none\ntwo<|im_end|>" in ChatTemplate(templates.QWEN).render(messages)
    assert "user\nonetwo<end_of_turn>" in ChatTemplate(templates.GEMMA, SPECIAL).render(messages)
    assert ChatTemplate(templates.PARTS_ONLY).render(messages) == "user:onetwo;assistant:"
    assert ChatTemplate(templates.PARTS_ONLY).render([USER]).startswith("user:Is 1 < 2")


def test_other_parts_are_refused_by_name():
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(InvalidRequest, match="'image_url'") as caught:
        ChatTemplate(templates.GEMMA).render([USER, {"role": "user", "content": [PARTS[0], image]}])
    assert caught.value.param == "messages[1].content[1].type"


@pytest.mark.parametrize("content", [5, {"text": "x"}, [{"type": "text"}], [7]])
def test_content_of_no_known_form_is_refused(content):
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content"):
        ChatTemplate(templates.QWEN).render([{"role": "user", "content": content}])


@pytest.mark.parametrize("family", ["llama3", "qwen"])
def test_arguments_reach_a_template_that_prints_objects(family):
    function = {"name": "f", "arguments": '{"a":1}'}
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
    ]
    assert '{"a": 1}' in ChatTemplate(templates.ALL[family], SPECIAL).render(messages)


def test_the_ids_of_calls_reach_a_template_that_looks_at_them():
    call = {"id": "abcdefghi", "type": "function", "function": TOOL_CALL["function"]}
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
    ]
    text = ChatTemplate(templates.MISTRAL_TOOLS, SPECIAL).render(messages, tools=[TOOL])
    assert '"arguments": {"city": "Köln", "days": [1, 2]}, "id": "abcdefghi"}]</s>' in text
    assert text.endswith('[TOOL_RESULTS]{"content": sunny, "call_id": "abcdefghi"}[/TOOL_RESULTS]')


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_reaches_a_template_by_each_of_its_names(name):
    said = {"role": "assistant", "content": "So.", name: "hm"}
    for looked_for in ("reasoning", "reasoning_content", "thinking"):
        template = ChatTemplate("{{ messages[0]." + looked_for + " }}")
        assert template.render([said]) == "hm"


def test_arguments_reach_a_template_that_takes_text():
    function: dict[str, Any] = {"name": "f", "arguments": '{"a":1}'}
    call: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": function}],
    }
    text = ChatTemplate(templates.DEEPSEEK, SPECIAL).render([USER, call])
    assert text.endswith('<|call|>f<|sep|>{"a":1}<|end|><|Assistant|>')
    with_content = ChatTemplate(templates.DEEPSEEK, SPECIAL).render([USER, call | {"content": "I"}])
    assert 'I<|call|>f<|sep|>{"a":1}' in with_content


RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"}
READS_EARLIER_CONTENT = (
    "{% for m in messages %}{% if not loop.last or m.role != 'assistant' %}"
    "{{ '\\n' + m.role + ':' + m.content }}{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}"
)
LEAVES_CALLS_OUT = "{% for m in messages %}{{ '\\n' + m.role + ':' + m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [READS_EARLIER_CONTENT, LEAVES_CALLS_OUT])
@pytest.mark.parametrize("extra", [{}, {"content": None}, {"content": ""}])
def test_a_call_without_content_renders_in_any_turn(template: str, extra: dict[str, Any]):
    call = {"role": "assistant", "tool_calls": [TOOL_CALL | {"id": "abcdefghi"}], **extra}
    for messages in ([USER, call], [USER, call, RESULT], [USER, call, RESULT, USER]):
        text = ChatTemplate(template).render(messages)
        assert ("Köln" in text) == (template is READS_EARLIER_CONTENT)
        assert "None" not in text


@pytest.mark.parametrize(
    "template", [*templates.ALL.values(), READS_EARLIER_CONTENT, LEAVES_CALLS_OUT]
)
@pytest.mark.parametrize("extra", [{}, {"content": None}, {"content": ""}])
def test_an_earlier_answer_may_be_reasoning_alone(template: str, extra: dict[str, Any]):
    thought = {"role": "assistant", "reasoning": "hm", **extra}
    text = ChatTemplate(template, SPECIAL).render([USER, thought, USER], documents=[])
    assert "None" not in text


def test_reasoning_alone_can_be_gone_on_with():
    last = {"role": "assistant", "reasoning_content": "I think"}
    text = ChatTemplate(templates.QWEN, SPECIAL).render(
        [USER, last], continue_final_message=True, add_generation_prompt=False
    )
    assert text.endswith("<think>\nI think")


def test_calls_of_a_form_no_template_knows_are_the_templates_to_judge():
    calls = {"role": "assistant", "tool_calls": "none of that"}
    with pytest.raises(InvalidRequest, match="refused"):
        ChatTemplate(templates.DEEPSEEK, SPECIAL).render([USER, calls])
    assert ChatTemplate("{{ messages[0].tool_calls }}").render([calls]) == "none of that"


def test_messages_are_not_changed():
    messages = [{"role": "assistant", "content": "a", "tool_calls": [TOOL_CALL]}]
    before = json.dumps(messages)
    ChatTemplate("{{ messages }}").render(
        messages, continue_final_message=True, add_generation_prompt=False
    )
    assert json.dumps(messages) == before


def test_the_date_comes_from_the_given_clock():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render([USER]) == "26 Jul 2024"


# ---------------------------------------------------------------- several templates


def card(template: str | None, config: dict[str, Any]) -> ModelCard:
    return ModelCard(
        name="m",
        max_model_len=10,
        vocab_size=10,
        block_size=4,
        tokenizer_json=b"",
        tokenizer_config_json=json.dumps(config).encode(),
        chat_template=template,
    )


NAMED = [
    {"name": "default", "template": "plain"},
    {"name": "tool_use", "template": "tools {{ bos_token }}"},
]


def test_a_named_template_is_chosen_by_name_or_by_tools():
    config = {"bos_token": {"content": "<s>"}, "chat_template": NAMED}
    several = ChatTemplates.from_card(card(None, config))
    assert several.names == ("default", "tool_use")
    assert several.select().render([USER]) == "plain"
    assert several.select(tools=True).render([USER]) == "tools <s>"
    assert several.select("tool_use").render([USER]) == "tools <s>"
    with pytest.raises(InvalidRequest, match="default, tool_use"):
        several.select("other")


def test_the_cards_own_template_comes_first():
    several = ChatTemplates.from_card(card("own", {"chat_template": "in the config"}))
    assert several.select(tools=True).render([USER]) == "own"


def test_a_model_without_a_template_refuses_chats():
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplates.from_card(card(None, {})).select()


def test_a_models_broken_template_is_the_operators_mistake():
    with pytest.raises(ConfigError, match=r"^the model's chat template does not compile"):
        ChatTemplates.from_card(card("{% if %}", {}))


def test_a_requests_template_sees_the_models_special_tokens():
    several = ChatTemplates.from_card(card("x", {"bos_token": "<s>"}))
    assert several.compile("{{ bos_token }}!").render([USER]) == "<s>!"
    with pytest.raises(InvalidRequest):
        several.compile("{% if %}")
