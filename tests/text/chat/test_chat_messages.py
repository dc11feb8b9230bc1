"""The API's messages take the form that a template is written for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.text.chat.chat_messages import (
    FixedForms,
    ToolCallForm,
    copy_plain_json,
    cut_at_mark,
    mark_final,
    prepare_messages,
)


def arguments_in(form: ToolCallForm, given: Any) -> Any:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}
    return form.apply(call)["tool_calls"][0]["function"]["arguments"]


def test_arguments_of_tool_calls_become_objects_or_text():
    forms = ['{"a": 1}', "", "not json", "[1]", {"a": "é"}]
    objects = [arguments_in(ToolCallForm(arguments="object"), given) for given in forms]
    assert objects == [{"a": 1}, {}, "not json", "[1]", {"a": "é"}]
    texts = [arguments_in(ToolCallForm(arguments="string"), given) for given in forms]
    assert texts == ['{"a": 1}', "", "not json", "[1]", '{"a": "é"}']


def test_a_call_has_the_order_of_the_api():
    """Some templates print a whole call."""
    call = {"function": {"name": "f", "arguments": "{}"}, "index": 0, "type": "function", "id": "a"}
    formed = ToolCallForm().apply({"role": "assistant", "tool_calls": [call]})
    assert [list(each) for each in formed["tool_calls"]] == [["id", "type", "function", "index"]]


def test_null_fields_vanish_and_reasoning_is_found_under_each_name():
    [message] = prepare_messages(
        [{"role": "assistant", "content": None, "reasoning": "hm"}], FixedForms()
    )
    assert message == {
        "role": "assistant",
        "content": "",
        "reasoning": "hm",
        "thinking": "hm",
        "reasoning_content": "hm",
    }


def test_an_empty_list_of_calls_vanishes():
    message = {"role": "assistant", "content": "So.", "tool_calls": []}
    assert prepare_messages([message], FixedForms()) == [{"role": "assistant", "content": "So."}]


@pytest.mark.parametrize(
    ("forms", "empty"),
    [
        (FixedForms(), ""),
        (FixedForms(parts=True), ""),
        (FixedForms(takes_text=False), [{"type": "text", "text": ""}]),
    ],
)
def test_an_answer_without_content_and_calls_has_an_empty_content(forms, empty):
    """A user's message without content stays wrong."""
    chat: list[dict[str, Any]] = [{"role": "assistant"}, {"role": "user"}]
    assert [message.get("content") for message in prepare_messages(chat, forms)] == [empty, None]


CALLS: list[Any] = [{"function": {"name": "f", "arguments": "{}"}}]


def contents(form: ToolCallForm, *given: dict[str, Any]) -> list[Any]:
    """The content of messages with calls in this form; "gone" if there is none."""
    chat = [{"role": "assistant", "tool_calls": CALLS, **each} for each in given]
    prepared = prepare_messages(chat, FixedForms(calls=form))
    return [message.get("content", "gone") for message in prepared]


@pytest.mark.parametrize(("form", "missing"), [("absent", "gone"), ("none", None), ("empty", "")])
def test_missing_content_takes_its_form_only_where_it_is_missing(form, missing):
    given: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": "x"}]
    kept = ToolCallForm(missing_content=form)
    assert contents(kept, *given) == [missing, missing, "", "x"]
    assert contents(replace(kept, takes_empty=False), *given) == [missing, missing, missing, "x"]


def test_missing_content_is_a_part_where_content_has_to_be_parts():
    forms = FixedForms(takes_text=False, calls=ToolCallForm("empty"))
    [message] = prepare_messages([{"role": "assistant", "tool_calls": CALLS}], forms)
    assert message["content"] == [{"type": "text", "text": ""}]


PARTS: list[Any] = [{"type": "text", "text": "one"}, "two"]


BOTH = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("forms", "text", "parts"),
    [
        (FixedForms(), "x", "one\ntwo"),
        (FixedForms(parts=True), "x", BOTH),
        (FixedForms(takes_text=False), [{"type": "text", "text": "x"}], BOTH),
    ],
)
def test_content_takes_the_form_that_is_wanted(forms, text, parts):
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "user", "content": PARTS},
    ]
    assert [message["content"] for message in prepare_messages(messages, forms)] == [text, parts]


def test_a_copy_shares_nothing_with_its_original():
    value = {"a": [{"b": 1}], "t": (1, 2.5, True, None)}
    copy = copy_plain_json(value, "x")
    assert copy == {"a": [{"b": 1}], "t": [1, 2.5, True, None]}
    copy["a"][0]["b"] = 2
    assert value["a"] == [{"b": 1}]


def test_subclasses_of_plain_types_do_not_pass():
    class Text(str):
        pass

    with pytest.raises(InvalidRequest, match="Text"):
        copy_plain_json({"a": Text("x")}, "options")


@pytest.mark.parametrize("content", ["open ", [{"type": "text", "text": "open "}]])
def test_the_text_ends_where_the_final_message_does(content):
    chat = [{"role": "assistant", "content": content}]
    final = mark_final(chat)
    marked = chat[0]["content"]
    text = marked if isinstance(marked, str) else marked[0]["text"]
    assert final == "open "
    assert cut_at_mark(f"<a>{text}</a>", final) == "<a>open "
    assert cut_at_mark(f"<a>{text.strip()}</a>", final) == "<a>open"
    with pytest.raises(InvalidRequest, match="continued"):
        cut_at_mark("<a></a>", final)


@pytest.mark.parametrize(
    "blank", [{}, {"content": ""}, {"content": [{"type": "text", "text": ""}]}]
)
def test_reasoning_is_marked_where_there_is_no_text(blank):
    chat: list[dict[str, Any]] = [{"role": "assistant", "reasoning_content": "hm", **blank}]
    assert mark_final(chat) == "hm"
    assert chat[0]["reasoning_content"].startswith("hm")
    assert len(chat[0]["reasoning_content"]) > 2
    assert chat[0]["content"] == blank.get("content", "")


@pytest.mark.parametrize("deep", ["[" * 60_000, '{"a":' * 60_000])
def test_arguments_that_are_nested_too_deeply_stay_text(deep):
    assert arguments_in(ToolCallForm(arguments="object"), deep) == deep
