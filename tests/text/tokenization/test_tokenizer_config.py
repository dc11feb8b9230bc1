"""Of tokenizer_config.json, what serving needs is read and the rest is left alone."""

from __future__ import annotations

import json

import pytest

from pdserve.errors import ConfigError
from pdserve.text.tokenization.tokenizer_config import (
    TokenizerConfig,
    parse_tokenizer_config,
    with_chat_templates,
    with_special_tokens,
)


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


def test_an_older_checkpoint_has_special_tokens_in_a_file_of_their_own():
    tokens = b'{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}'
    merged = parse_tokenizer_config(with_special_tokens(b'{"eos_token": "<end>", "x": 1}', tokens))
    assert merged.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    newer = b'{"eos_token": "<end>", "added_tokens_decoder": {}}'
    assert with_special_tokens(newer, tokens) == newer
    with pytest.raises(ConfigError, match=r"special_tokens_map\.json is not a JSON object"):
        with_special_tokens(b"{}", b"[]")


def test_templates_in_files_replace_all_but_the_default_one():
    own = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    content = json.dumps({"chat_template": own, "bos_token": "<s>"}).encode()
    found = parse_tokenizer_config(with_chat_templates(content, {"tool_use": "t"}))
    assert found.chat_templates == {"default": "d", "tool_use": "t"}
    assert found.special_tokens == {"bos_token": "<s>"}
    found = parse_tokenizer_config(with_chat_templates(b"{}", {"default": "file"}))
    assert found.chat_templates == {"default": "file"}
