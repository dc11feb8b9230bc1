"""Which tokenizers are read, and why others are not."""

from __future__ import annotations

import json
import tracemalloc
from array import array
from typing import Any

import pytest

from pdserve.text.tokenization.byte_level_bpe import (
    AddedTokenFlags,
    Uncovered,
    read_byte_level_bpe,
)
from tests.text import builders

FILE = json.loads(builders.byte_level().to_str())
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": False}


def read(*added: AddedTokenFlags, model: dict[str, Any] | None = None, **changes: Any) -> Any:
    file = FILE | changes | {"model": FILE["model"] | (model or {})}
    return read_byte_level_bpe(json.dumps(file).encode(), added)


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [*steps]}


def test_merges_and_bytes_are_ids():
    found = read()
    vocab, merges = FILE["model"]["vocab"], array("I", found.merges)
    left, right = FILE["model"]["merges"][0]
    assert [*merges[:3]] == [vocab[left], vocab[right], vocab[left + right]]
    assert len(merges) == 3 * len(FILE["model"]["merges"])
    assert found.byte_ids[ord("a")] == vocab["a"]
    assert found.byte_ids[0] == vocab["\u0100"]
    assert sorted(found.byte_ids) == sorted(set(found.byte_ids))
    assert not found.whole


def test_merges_may_be_written_as_one_string():
    written = [" ".join(pair) for pair in FILE["model"]["merges"]]
    assert read(model={"merges": written}).merges == read().merges


def test_whole_pieces_are_the_vocabulary_in_bytes():
    found = dict(read(model={"ignore_merges": True}).whole)
    assert found[b"\n"] == FILE["model"]["vocab"]["\u010a"]
    assert found["é".encode()[:1]] == FILE["model"]["vocab"]["Ã"]
    assert "<think 漢>".encode() not in found


def test_a_token_with_another_character_is_no_whole_piece():
    vocab = FILE["model"]["vocab"]
    odd = {"a b": len(vocab), "\u010aa": len(vocab) + 1, "漢": len(vocab) + 2, "": len(vocab) + 3}
    found = read(model={"ignore_merges": True, "vocab": vocab | odd}).whole
    assert (b"\na", len(vocab) + 1) in found
    assert {token_id for _, token_id in found}.isdisjoint({odd["a b"], odd["漢"], odd[""]})


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model": {"type": "Unigram"}}, "a model of type Unigram"),
        ({"model": {"dropout": 0.1}}, "dropout"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "parts of words"),
        ({"model": {"continuing_subword_prefix": "##"}}, "parts of words"),
        ({"model": {"vocab": {"a": 1}}}, "merges"),
        ({"model": {"vocab": {"a": 1}, "merges": []}}, "without all bytes"),
        ({"model": {"merges": [["a"]]}}, "merges"),
        ({"normalizer": {"type": "NFKC"}}, "the step NFKC"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}}, "Lowercase"),
        ({"pre_tokenizer": None}, "not turned into bytes"),
        ({"pre_tokenizer": BYTES | {"add_prefix_space": True}}, "a blank before"),
        ({"pre_tokenizer": sequence(BYTES, SPLIT)}, "not turned into bytes"),
        ({"pre_tokenizer": sequence(SPLIT | {"behavior": "Contiguous"}, BYTES)}, "Contiguous"),
        ({"pre_tokenizer": sequence(SPLIT | {"invert": True}, BYTES)}, "another kind"),
        ({"pre_tokenizer": sequence(SPLIT | {"pattern": {"String": " "}}, BYTES)}, "Split"),
        ({"pre_tokenizer": sequence({"type": "Metaspace"}, BYTES)}, "Metaspace"),
        ({"pre_tokenizer": sequence(*[SPLIT] * 40, BYTES)}, "40 steps"),
        (
            {"pre_tokenizer": sequence(SPLIT | {"pattern": {"Regex": r"\w"}}, BYTES)},
            "an expression",
        ),
    ],
)
def test_others_are_named(changes, part):
    with pytest.raises(Uncovered, match=part):
        read(**changes)


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip"])
def test_added_tokens_that_look_around_are_refused(flag):
    with pytest.raises(Uncovered, match="an added token"):
        read(AddedTokenFlags("<new>", 1, **{flag: True}))


def test_added_tokens_in_normalised_text_are_refused():
    token = AddedTokenFlags("<new>", 1, normalized=True)
    assert read(token).added == [(b"<new>", 1)]
    with pytest.raises(Uncovered, match="normalised"):
        read(token, normalizer={"type": "NFC"})


@pytest.mark.parametrize("late", ["s>!", "a<s", "s", "x<s>x"])
def test_added_tokens_that_overlap_are_refused(late):
    tokens = AddedTokenFlags("<s>", 1), AddedTokenFlags(late, 2, normalized=True)
    with pytest.raises(Uncovered, match="overlap"):
        read(*tokens)


def test_a_very_long_added_token_is_refused():
    with pytest.raises(Uncovered, match="5000 characters"):
        read(AddedTokenFlags("a" * 5000, 1))


def test_many_added_tokens_are_compared_in_little_memory():
    tokens = [AddedTokenFlags(f"<{place:0500}>", place) for place in range(300)]
    late = [AddedTokenFlags(f"[{place:0500}]", place, normalized=True) for place in range(300, 600)]
    tracemalloc.start()
    try:
        read(*tokens, *late)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 128 << 20


def test_a_file_of_another_form_is_refused():
    with pytest.raises(Uncovered, match="description"):
        read_byte_level_bpe(b"[]", [])
