"""A text put together from memory has the ids of the text as a whole."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from pdserve.text.tokenization import tokenization_cache
from pdserve.text.tokenization.tokenization_cache import TokenizationCache, plan_cuts
from pdserve.token_ids import TokenIds, token_ids
from tests.support.seeds import is_long, number_for, run_seed
from tests.text import builders

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLES = 1000 if is_long() else 80
SEED = number_for(run_seed(), __name__)
BUILDERS = (
    builders.byte_level,
    builders.gemma_like,
    builders.llama_like,
    builders.odd_byte_fallback,
    builders.odd_byte_level,
    builders.word_level,
    builders.word_suffix,
    builders.wordpiece,
)

FRAGMENTS = st.sampled_from([
    *builders.CORPUS, *builders.SPECIAL, "<s", "<|im_", "end|>", "<tool>", "▁<tool>", " ", "\n",
    "x", "", "word " * 30, "<s></s>", "é", "👍🏽", "<think 漢>", "  <s>  ",
])  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


def copy_of(raw: RawTokenizer) -> RawTokenizer:
    return RawTokenizer.from_str(raw.to_str())


def cached(raw: RawTokenizer, max_tokens: int = 10_000) -> tuple[TokenizationCache, list[str]]:
    """A cache over the tokenizer's cuts, and what it has been asked to encode."""
    cuts = plan_cuts(raw)
    assert cuts is not None
    return TokenizationCache(cuts, max_tokens), []


def whole(raw: RawTokenizer, text: str) -> TokenIds:
    return token_ids(raw.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("build", BUILDERS)
def test_ids_are_those_of_the_whole_cold_and_warm(build):
    raw = build()
    if plan_cuts(raw) is None:
        pytest.skip("this tokenizer cannot be cut")
    cache, _ = cached(raw, max_tokens=300)

    def encode(pieces: Sequence[str]) -> list[TokenIds]:
        return [whole(raw, piece) for piece in pieces]

    @seed(SEED)
    @settings(max_examples=EXAMPLES, deadline=None)
    @given(st.lists(TEXTS, min_size=1, max_size=4))
    def same(texts):
        for text in (*texts, *texts):
            assert cache.encode(text, encode) == whole(raw, text)
        assert len(cache) <= 300

    same()


def test_a_turn_that_was_seen_is_not_encoded_again():
    raw = builders.byte_level()
    cache, asked = cached(raw)

    def encode(pieces: Sequence[str]) -> list[TokenIds]:
        asked.extend(pieces)
        return [whole(raw, piece) for piece in pieces]

    system, turn, answer = ("system " * 20, "question " * 20, "answer " * 20)
    first = f"<s>{system}</s><s>{turn}</s>"
    cache.encode(first, encode)
    assert asked == [system, turn]
    cache.encode(f"{first}<s>{answer}</s><s>{turn}</s>", encode)
    assert asked == [system, turn, answer]
    assert cache.hits == len(system) + 2 * len(turn)


def test_what_was_not_used_for_longest_is_forgotten_first():
    raw = builders.byte_level()
    texts = [f"{letter} " * 50 for letter in "abc"]
    size = max(len(whole(raw, text)) for text in texts)
    cache, asked = cached(raw, max_tokens=2 * size)

    def encode(pieces: Sequence[str]) -> list[TokenIds]:
        asked.extend(pieces)
        return [whole(raw, piece) for piece in pieces]

    for text in (texts[0], texts[1], texts[0], texts[2]):  # the second one goes
        cache.encode(text, encode)
    asked.clear()
    for text in (texts[0], texts[1]):
        cache.encode(text, encode)
    assert asked == [texts[1]]


def test_a_piece_larger_than_the_memory_and_short_ones_are_not_kept():
    raw = builders.byte_level()
    cache, _ = cached(raw, max_tokens=20)
    for text in ("long " * 100, "short"):
        assert cache.encode(text, lambda ps: [whole(raw, p) for p in ps]) == whole(raw, text)
    assert len(cache) == 0


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_look_beside_themselves_forbid_cuts(option):
    raw = copy_of(builders.byte_level())
    raw.add_special_tokens([AddedToken("<mask>", **{option: True})])
    assert plan_cuts(raw) is None


def test_a_pre_tokenizer_that_knows_where_a_text_begins_forbids_cuts():
    raw = copy_of(builders.byte_level())
    for scheme, fine in (("first", False), ("always", True), ("never", True)):
        raw.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme=scheme)]
        )
        assert (plan_cuts(raw) is not None) is fine


def test_a_model_that_leaves_merges_out_forbids_cuts():
    raw = copy_of(builders.byte_level())
    assert plan_cuts(raw) is not None
    raw.model.dropout = 0.5
    assert plan_cuts(raw) is None
    raw.model.dropout = None
    raw.pre_tokenizer = None
    assert plan_cuts(raw) is not None


@pytest.mark.parametrize("build", BUILDERS)
def test_the_pre_tokenizer_is_described_as_in_the_file(build):
    raw = build()
    assert tokenization_cache._pre_tokenizer(raw) == json.loads(raw.to_str())["pre_tokenizer"]


def test_threads_share_one_memory():
    raw = builders.byte_level()
    cache, _ = cached(raw, max_tokens=400)
    texts = [f"<s>{'word ' * n}</s>{'other ' * n}" for n in range(10, 40)]
    wrong: list[str] = []

    def work() -> None:
        for text in texts * 5:
            ids = cache.encode(text, lambda ps: [whole(raw, p) for p in ps])
            if ids != whole(raw, text):
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(cache) <= 400


def test_a_piece_is_known_under_its_own_salt_only():
    raw = builders.byte_level()
    cache, asked = cached(raw)

    def encode(pieces: Sequence[str]) -> list[TokenIds]:
        asked.extend(pieces)
        return [whole(raw, piece) for piece in pieces]

    piece = "what one tenant sent " * 10
    for salt, times in (("a", 1), ("b", 2), ("a", 2), ("", 3), ("b", 3)):
        assert cache.encode(piece, encode, salt) == whole(raw, piece)
        assert len(asked) == times
    assert cache.hits == 2 * len(piece)


def test_pieces_that_become_no_tokens_are_bounded_too():
    cache = TokenizationCache({"<s>": 0}, max_tokens=100, max_entries=50)
    for number in range(1000):
        cache.encode(f"{number:0100}", lambda pieces: [token_ids() for _ in pieces])
        assert cache.entries <= 50
        assert cache._chars == sum(len(text) for _, text in cache._known) <= 1600
    assert len(cache) == 0
    assert cache.entries == 16
