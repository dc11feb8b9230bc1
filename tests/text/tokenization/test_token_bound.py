"""What is promised about a text's length in tokens holds for every text."""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from pdserve.text.tokenization.token_bound import chars_per_token, split_text
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.text import builders

if TYPE_CHECKING:
    from collections.abc import Callable

DECOMPOSED = unicodedata.normalize("NFD", "ᾧ")
BOUNDED = {
    "byte_level": builders.byte_level,
    "llama_like": builders.llama_like,
    "gemma_like": builders.gemma_like,
}


def bound_of(raw: RawTokenizer, **changes: Any) -> int | None:
    """The bound, with parts of the description changed."""
    described = json.loads(raw.to_str()) | changes
    content = json.dumps(described).encode()
    return chars_per_token(content, RawTokenizer.from_buffer(content))


def composed() -> RawTokenizer:
    raw = RawTokenizer.from_str(builders.byte_level().to_str())
    raw.normalizer = normalizers.NFC()
    return raw


PARTS = [*builders.CORPUS, *builders.SPECIAL, "<tool>", " ", DECOMPOSED]
texts = st.text() | st.sampled_from(PARTS).map(lambda part: part * 40)


@pytest.mark.parametrize("build", [*BOUNDED.values(), composed])
@given(text=texts)
def test_a_text_never_becomes_fewer_tokens_than_promised(
    build: Callable[[], RawTokenizer], text: str
) -> None:
    tokenizer = Tokenizer.from_bytes(build().to_str().encode())
    assert len(tokenizer.encode(text, False)) >= tokenizer.fewest_tokens(len(text))


@pytest.mark.parametrize("build", BOUNDED.values())
def test_a_long_text_is_promised_to_be_long(build: Callable[[], RawTokenizer]) -> None:
    tokenizer = Tokenizer.from_bytes(build().to_str().encode())
    assert tokenizer.fewest_tokens(1_000_000) > 10_000
    assert tokenizer.fewest_tokens(0) == 0


@pytest.mark.parametrize(
    "build",
    [builders.metaspace, builders.wordpiece, builders.word_level, builders.word_suffix],
)
def test_where_a_token_may_stand_for_any_length_nothing_is_promised(
    build: Callable[[], RawTokenizer],
) -> None:
    tokenizer = Tokenizer.from_bytes(build().to_str().encode())
    assert tokenizer.fewest_tokens(1_000_000) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": ""}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {"Regex": "\\s"},
                        "behavior": "Removed",
                        "invert": False,
                    },
                    {
                        "type": "ByteLevel",
                        "add_prefix_space": False,
                        "trim_offsets": True,
                        "use_regex": True,
                    },
                ],
            }
        },
    ],
)
def test_a_step_that_drops_text_ends_the_promise(changes: dict[str, Any]) -> None:
    assert bound_of(builders.byte_level()) is not None
    assert bound_of(builders.byte_level(), **changes) is None


def test_unknown_bytes_end_the_promise() -> None:
    described = json.loads(builders.byte_level().to_str())
    del described["model"]["vocab"]["!"]
    vocab = {token: index for index, token in enumerate(described["model"]["vocab"])}
    model = described["model"] | {"vocab": vocab, "merges": []}
    assert bound_of(builders.byte_level(), model=model, added_tokens=[]) is None


def test_a_token_that_takes_blanks_along_ends_the_promise() -> None:
    raw = RawTokenizer.from_str(builders.byte_level().to_str())
    raw.add_special_tokens([AddedToken("<end>", rstrip=True)])
    assert bound_of(raw) is None
    assert len(raw.encode("<end>" + " " * 1000).ids) == 1


def test_a_split_that_keeps_everything_keeps_the_promise() -> None:
    raw = RawTokenizer.from_str(builders.byte_level().to_str())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert bound_of(raw) == max(map(len, raw.get_vocab()))


@given(st.text("ab ", max_size=60), st.integers(1, 20))
def test_slices_are_the_text(text, size):
    parts = list(split_text(text, size))
    assert "".join(parts) == text
    assert all(0 < len(part) <= size for part in parts)


def test_slices_are_cut_between_words():
    assert list(split_text("some words here", 8)) == ["some", " words", " here"]
    assert list(split_text("x" * 10, 8)) == ["x" * 8, "xx"]
