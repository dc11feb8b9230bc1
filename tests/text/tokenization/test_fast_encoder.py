"""The fast encoder gives the ids of `tokenizers`, or is not used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from pdserve.errors import InvalidRequest
from pdserve.text.tokenization import fast_encoder
from pdserve.text.tokenization.fast_encoder import FastEncoder, find_difference, uncovered
from pdserve.text.tokenization.probe_texts import PLAIN_TEXTS
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.seeds import is_long, number_for, run_seed
from tests.text import builders

EXAMPLES = 2000 if is_long() else 60
SEED = number_for(run_seed(), __name__)

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL]
QWEN = [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL]
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
TEKKEN = [builders.TEKKEN_PATTERN]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def described(raw: RawTokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(raw.to_str())
    return found


UNNORMALIZED = [
    token | {"normalized": False} for token in described(builders.byte_level())["added_tokens"]
]


def split(pattern: str) -> dict[str, Any]:
    kind = {"Regex": pattern}
    return {"type": "Split", "pattern": kind, "behavior": "Isolated", "invert": False}


def byte_level(*steps: dict[str, Any], **changes: Any) -> bytes:
    pre = {"type": "Sequence", "pretokenizers": [*steps]}
    return json.dumps(described(builders.byte_level()) | {"pre_tokenizer": pre} | changes).encode()


def bytes_after(patterns: list[str]) -> bytes:
    return byte_level(*map(split, patterns), BYTES)


COVERED = {
    "byte_level": builders.byte_level().to_str().encode(),
    "llama_like": builders.llama_like().to_str().encode(),
    "gemma_like": builders.gemma_like().to_str().encode(),
    "gpt2": byte_level(BYTES | {"use_regex": True}),
    "starcoder": byte_level(DIGITS, BYTES | {"use_regex": True}),
    "llama3": bytes_after(LLAMA_3),
    "qwen": byte_level(
        *(split(QWEN[0]), BYTES), normalizer={"type": "NFC"}, added_tokens=UNNORMALIZED
    ),
    "deepseek": bytes_after(DEEPSEEK),
    "tekken": bytes_after(TEKKEN),
}
WORDS = st.sampled_from(
    [
        *(
            "the quick",
            " fox",
            "It's",
            "isN'T",
            "'ſ",
            "ABCdef",
            "x1_y",
            "12345",
            "٣٤",
            "½",
            "()",
            "==",
        ),
        *(
            "\n",
            "\n\n",
            "\r\n",
            " ",
            "   ",
            "\t",
            "\u00a0",
            "\u2028",
            "\u3000",
            "\x00",
            "\x7f",
            "▁",
        ),
        *(
            "你好",
            "世界",
            "カナ",
            "한국어",
            "👍🏽",
            "👩‍👩‍👧",
            "e\u0301",
            "é",
            "İ",
            "K",
            "ﬁ",
            "\U0010ffff",
        ),
        *(
            "<s>",
            "</s>",
            "<|im_end|>",
            "<tool>",
            "▁<tool>",
            "<think 漢>",
            "<",
            "|>",
            "a" * 40,
            " " * 40,
        ),
        *('{"a": [1.5e-9]}', "def f(x):\n\treturn", "aGVsbG8gd29ybGQ+/w==", "https://a.b/c?d=%20"),
    ]
)
TEXTS = st.lists(WORDS | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join)


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[RawTokenizer, FastEncoder]]:
    return {
        name: (RawTokenizer.from_buffer(content), FastEncoder(content.decode()))
        for name, content in COVERED.items()
    }


@pytest.mark.parametrize("name", [*COVERED])
def test_covered_tokenizers_are_encoded_fast(name):
    choice = Tokenizer.from_bytes(COVERED[name]).choose_encoder()
    assert choice.fast, choice


@seed(SEED)
@settings(max_examples=EXAMPLES, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), special=st.booleans())
def test_ids_are_those_of_tokenizers(pairs, texts, special):
    for name, (raw, fast) in pairs.items():
        expected = [each.ids for each in raw.encode_batch_fast(texts, add_special_tokens=special)]
        assert [ids.tolist() for ids in fast.encode(texts, special)] == expected, name


@seed(SEED)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), text=TEXTS)
def test_any_order_of_merges_and_any_flags_of_added_tokens(data, text):
    file = json.loads(COVERED[data.draw(st.sampled_from([*COVERED]))])
    file["model"]["merges"] = data.draw(st.permutations(file["model"]["merges"]))
    file["model"]["ignore_merges"] = data.draw(st.booleans())
    for token in file["added_tokens"]:
        for flag in ("lstrip", "rstrip", "single_word", "normalized"):
            token[flag] = data.draw(st.booleans()) if data.draw(st.integers(0, 3)) == 0 else False
    content = json.dumps(file).encode()
    raw = RawTokenizer.from_buffer(content)
    if uncovered(content, raw):
        return
    (ids,) = FastEncoder(content.decode()).encode([text], False)
    assert ids.tolist() == raw.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["metaspace", "wordpiece", "word_level", "word_suffix"])
def test_uncovered_tokenizers_say_why_and_cache_segments(name):
    raw = builders.KINDS[name][1]()
    ours = Tokenizer.from_bytes(raw.to_str().encode())
    choice = ours.choose_encoder()
    assert not choice.fast
    assert choice.uncovered
    assert not choice.difference
    assert ours.segments is not None
    assert ours.encode("fox <s>", False) == raw.encode("fox <s>", add_special_tokens=False).ids


@pytest.mark.parametrize("flag", ["single_word", "normalized"])
def test_added_tokens_that_the_fast_library_finds_elsewhere_are_not_covered(flag):
    raw = RawTokenizer.from_str(builders.llama_like().to_str())
    raw.add_tokens([AddedToken("<new>", **{"normalized": False} | {flag: True})])
    assert "added token" in uncovered(raw.to_str().encode(), raw)


def test_added_tokens_that_overlap_are_not_covered():
    raw = RawTokenizer.from_str(builders.byte_level().to_str())
    assert not uncovered(raw.to_str().encode(), raw)
    raw.add_tokens([AddedToken("s>!", normalized=True)])  # <s> ends in its beginning
    assert "overlap" in uncovered(raw.to_str().encode(), raw)


class Shifted(FastEncoder):
    """Gives one wrong id in texts that have a marker."""

    marker = ""

    def encode(self, texts: Any, add_special_tokens: bool) -> list[memoryview]:
        found = super().encode(texts, add_special_tokens)
        for place, text in enumerate(texts):
            if self.marker in text:
                changed = found[place].tolist()
                changed[-1] += 1
                found[place] = memoryview(b"".join(i.to_bytes(4, "little") for i in changed)).cast(
                    "I"
                )
        return found


@pytest.mark.parametrize(
    "marker", ["你好", "👍🏽", "3.14159", "def f(", "\u2028", "<think 漢>", "'T", "नम"]
)
def test_a_planted_difference_is_noticed(monkeypatch, marker):
    monkeypatch.setattr(Shifted, "marker", marker)
    monkeypatch.setattr(fast_encoder, "FastEncoder", Shifted)
    ours = Tokenizer.from_bytes(COVERED["llama3"])
    choice = ours.choose_encoder()
    assert not choice.fast
    assert choice.difference
    raw = RawTokenizer.from_buffer(COVERED["llama3"])
    assert ours.encode(marker, False) == raw.encode(marker, add_special_tokens=False).ids


def test_a_failure_of_the_fast_library_ends_its_use(monkeypatch, caplog):
    ours = Tokenizer.from_bytes(COVERED["llama3"])
    assert ours.choose_encoder().fast
    expected = ours.encode("fox")

    def fails(*_: object) -> list[memoryview]:
        raise ValueError("limit of backtracking")

    monkeypatch.setattr(FastEncoder, "encode", fails)
    assert ours.encode("fox") == expected
    assert "limit of backtracking" in caplog.text


def test_half_a_surrogate_pair_is_the_clients_error():
    ours = Tokenizer.from_bytes(COVERED["llama3"])
    assert ours.choose_encoder().fast
    with pytest.raises(InvalidRequest):
        ours.encode("a\ud800")


def test_probe_texts_find_no_difference_and_are_short(pairs):
    assert sum(map(len, PLAIN_TEXTS)) < 10_000
    for raw, fast in pairs.values():
        assert not find_difference(raw, fast)
