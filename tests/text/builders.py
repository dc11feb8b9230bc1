"""Small tokenizers of every kind that models come with, built on the spot."""

from __future__ import annotations

import base64
import json
from functools import cache
from typing import TYPE_CHECKING

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from pdserve.text.tokenization.token_text_table import byte_level_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it?",
    "Größe, naïve café, 你好世界, 👍🏽 emoji and ünïcödé all over the place.",
    'def f(x):\n    return {"a": [1, 2, 3]}\n\n\tif x: pass',
]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


@cache
def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_tokens(
        ["▁<tool>", "<tool>", "<think 漢>"]
    )  # added but not special; the second not byte-level
    return raw


@cache
def llama_like() -> Tokenizer:
    """SentencePiece BPE with byte fallback and a space stripped at the start: Llama 2, Mistral."""
    raw = _byte_fallback_bpe()
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return raw


@cache
def gemma_like() -> Tokenizer:
    """The same without the strip."""
    raw = _byte_fallback_bpe()
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return raw


def _byte_fallback_bpe() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    trained.train_from_iterator(CORPUS[:1], trainer)
    base = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    learned = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocab = {token: index for index, token in enumerate([*base, *learned])}
    merges = [
        (token[:cut], token[cut:])
        for token in learned
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    raw = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    raw.add_special_tokens(["<unk>", *SPECIAL])
    raw.add_tokens([AddedToken("▁<tool>", normalized=False)])
    return raw


@cache
def metaspace() -> Tokenizer:
    """Unigram with a Metaspace decoder: T5."""
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return raw


@cache
def wordpiece() -> Tokenizer:
    """BERT, with its clean-up of spaces before punctuation."""
    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", *SPECIAL], show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return raw


@cache
def word_level() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    words = ["[UNK]", *SPECIAL, "hello", "world", "你好", ",", ".", "▁x"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens(SPECIAL)
    return raw


@cache
def word_suffix() -> Tokenizer:
    """GPT-1: a suffix ends a word, and becomes a space only when another token follows."""
    raw = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, end_of_word_suffix="</w>", special_tokens=SPECIAL, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return raw


@cache
def odd_byte_fallback() -> Tokenizer:
    """Byte fallback in an order that cannot be taken apart."""
    raw = _byte_fallback_bpe()
    raw.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Replace(Regex("▁+"), " "),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return raw


@cache
def odd_byte_level() -> Tokenizer:
    """Byte-level, then a strip of the whole."""
    raw = Tokenizer.from_str(byte_level().to_str())
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return raw


KINDS = {
    "byte_level": ("bytes", byte_level),
    "llama_like": ("pieces", llama_like),
    "gemma_like": ("pieces", gemma_like),
    "metaspace": ("pieces", metaspace),
    "wordpiece": ("pieces", wordpiece),
    "word_level": ("pieces", word_level),
    "word_suffix": ("window", word_suffix),
    "odd_byte_fallback": ("window", odd_byte_fallback),
    "odd_byte_level": ("window", odd_byte_level),
}
"""Name -> (the kind `token_text_table.py` must find, how to build it)."""


TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tekken_file(
    words: Sequence[bytes], named: Mapping[int, str], specials: int = 20, **changes: object
) -> bytes:
    """Content of a `tekken.json` with `words` by rank and some of its special tokens named."""
    content = {
        "config": {
            "pattern": TEKKEN_PATTERN,
            "num_vocab_tokens": len(words),
            "default_vocab_size": len(words) + specials,
            "default_num_special_tokens": specials,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for rank, word in enumerate(words)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in named.items()
        ],
    }
    return json.dumps(content | changes).encode()


@cache
def tekken_words() -> list[bytes]:
    """As training finds them: the bytes, then what merging makes of a corpus."""
    raw = byte_level()
    merged = sorted((id, token) for token, id in raw.get_vocab(with_added_tokens=False).items())
    found = [byte_level_bytes(token) for _, token in merged if token not in SPECIAL]
    single = [bytes([value]) for value in range(256)]
    return single + [word for word in found if len(word) > 1]
