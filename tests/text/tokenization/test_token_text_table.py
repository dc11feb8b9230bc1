"""Decoders are told apart by their description; tables hold what the library would say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from pdserve.text.tokenization.token_text_table import (
    DecoderShape,
    TokenTextTable,
    byte_level_bytes,
    decoder_shape,
    json_escape,
)

REPLACE = decoders.Replace("▁", " ")
LLAMA = [REPLACE, decoders.ByteFallback(), decoders.Fuse()]


def shape_of(*steps: Any) -> DecoderShape:
    raw = RawTokenizer(models.BPE())
    if steps:
        raw.decoder = steps[0] if len(steps) == 1 else decoders.Sequence(list(steps))
    return decoder_shape(raw.to_str().encode())


@pytest.mark.parametrize(
    ("steps", "shape"),
    [
        ([], DecoderShape("pieces")),
        ([decoders.ByteLevel()], DecoderShape("bytes")),
        ([decoders.ByteLevel(), decoders.Fuse()], DecoderShape("bytes")),
        ([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)], DecoderShape("window")),
        ([decoders.Metaspace()], DecoderShape("pieces")),
        ([decoders.WordPiece()], DecoderShape("pieces")),
        (LLAMA, DecoderShape("pieces", True)),
        ([*LLAMA, decoders.Strip(" ", 1, 0)], DecoderShape("pieces", True, " ", 1)),
        ([*LLAMA, decoders.Strip(" ", 0, 1)], DecoderShape("window", True)),
        ([*LLAMA, decoders.Strip(" ", 1, 0), REPLACE], DecoderShape("window", True)),
        ([decoders.ByteFallback(), REPLACE], DecoderShape("window", True)),
        ([decoders.WordPiece(), decoders.ByteFallback()], DecoderShape("window", True)),
        ([REPLACE, decoders.Fuse()], DecoderShape("pieces")),
        ([decoders.Strip(" ", 1, 1), decoders.Fuse()], DecoderShape("pieces")),
        ([decoders.BPEDecoder()], DecoderShape("window")),
        ([decoders.CTC()], DecoderShape("window")),
    ],
)
def test_a_decoders_shape_is_read_from_its_description(steps, shape):
    assert shape_of(*steps) == shape


def test_a_regular_expression_may_see_more_than_a_token():
    step = {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "}
    assert decoder_shape(json.dumps({"decoder": step}).encode()).kind == "window"


def test_a_nested_sequence_is_one_sequence():
    inner = {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}
    outer = {"decoder": {"type": "Sequence", "decoders": [inner, {"type": "Fuse"}]}}
    assert decoder_shape(json.dumps(outer).encode()).kind == "bytes"


def test_a_decoder_that_changes_any_letter_is_taken_apart_by_nobody():
    raw = RawTokenizer(models.BPE())
    raw.decoder = decoders.Replace("a", "b")
    shape = decoder_shape(raw.to_str().encode())
    assert shape.kind == "pieces"
    assert TokenTextTable(raw, shape, 1, frozenset()).shape.kind == "window"


def test_every_byte_has_its_letter():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(byte_level_bytes(letter)[0] for letter in alphabet) == list(range(256))
    assert byte_level_bytes("Ġthe") == b" the"
    assert byte_level_bytes("<漢>") == "<漢>".encode()


@pytest.mark.parametrize("text", ["", "plain", 'a"b\\c', "\n\r\t\x00\x1f", "é漢👍\u2028\ufffd"])
def test_escaped_text_is_json_without_its_quotes(text):
    escaped = json_escape(text)
    assert json.loads(b'"' + escaped + b'"') == text
    assert not any(byte < 0x20 for byte in escaped)
