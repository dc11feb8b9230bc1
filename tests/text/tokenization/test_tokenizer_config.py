"""Of tokenizer_config.json, what serving needs is read and the rest is left alone."""

from __future__ import annotations

import json

import pytest

from pdserve.errors import ConfigError
from pdserve.text.tokenization.tokenizer_config import TokenizerConfig, parse_tokenizer_config


def parsed(**fields: object) -> TokenizerConfig:
    return parse_tokenizer_config(json.dumps(fields).encode())


def test_an_empty_file_says_nothing():
    assert parse_tokenizer_config(b"") == parse_tokenizer_config(b"{}") == TokenizerConfig()


def test_special_tokens_are_read_in_both_spellings():
    config = parsed(
        bos_token="<s>",
        eos_token={"content": "</s>", "lstrip": False},
        unk_token=None,
        pad_token="",
        model_max_length=1e30,
    )
    assert config.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_further_special_tokens_come_as_lists_or_by_name():
    config = parsed(
        additional_special_tokens=["<a>", {"content": "<b>"}, "<a>"],
        extra_special_tokens={"image_token": "<i>"},
    )
    assert config.extra_special_tokens == ("<a>", "<b>")
    assert config.special_tokens == {"image_token": "<i>"}


def test_a_model_may_have_special_tokens_with_names_of_its_own():
    config = parsed(
        image_token="<i>",
        add_bos_token=True,
        model_specific_special_tokens={"audio_token": {"content": "<a>"}},
    )
    assert config.special_tokens == {"image_token": "<i>", "audio_token": "<a>"}


def test_added_tokens_are_in_the_order_of_their_ids():
    config = parsed(added_tokens_decoder={"10": {"content": "<b>"}, "9": {"content": "<a>"}})
    assert [(token["id"], token["content"]) for token in config.added_tokens] == [
        (9, "<a>"),
        (10, "<b>"),
    ]


@pytest.mark.parametrize(
    ("value", "templates"),
    [
        (None, {}),
        ("{{ x }}", {"default": "{{ x }}"}),
        ([{"name": "a", "template": "1"}, {"name": "b", "template": "2"}], {"a": "1", "b": "2"}),
    ],
)
def test_templates_come_alone_or_by_name(value, templates):
    assert parsed(chat_template=value).chat_templates == templates


@pytest.mark.parametrize("value", [1, ["x"], [{"name": "a"}], [{"name": 1, "template": "x"}]])
def test_templates_of_another_form_are_refused(value):
    with pytest.raises(ConfigError, match="chat_template"):
        parsed(chat_template=value)
