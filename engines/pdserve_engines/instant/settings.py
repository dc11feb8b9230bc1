"""Resolves the instant engine's options and reads what it needs of a model.

Only `config.json` and `tokenizer.json` are opened, no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.engine_core.kit import ModelLimits, check_options, read_json, read_model_limits
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.ids import Seconds, TokenId
    from pdserve.messages.engine import EngineSpec

__all__ = [
    "InstantOptions",
    "InstantVocabulary",
    "ordinary_ids",
    "parse_options",
    "read_vocabulary",
]

_CYCLE = 64
"""Number of different tokens in an output."""

# The first two are a leading space in GPT-2 and SentencePiece; WordPiece continues words by ##.
_WORD_MARKS = ("\u0120", "\u2581", "##")


@dataclass(frozen=True, slots=True)
class InstantOptions:
    """The instant engine's options, from `--engine-option name=value`."""

    tokens_per_second: float = 0.0
    """Rate of each stream, whose tokens become due one by one. 0: as fast as they are read."""
    ttft: Seconds = 0.0
    """Seconds from submission to the first token; the option is `ttft_ms`."""
    tokens: tuple[TokenId, ...] = ()
    """Token ids that outputs cycle through; empty: ordinary words of the model's tokenizer."""


@dataclass(frozen=True, slots=True)
class InstantVocabulary:
    """The tokens of outputs, and how long sequences may become."""

    tokens: tuple[TokenId, ...]
    vocab_size: int
    max_model_len: int
    model_type: str
    eos_token_ids: tuple[TokenId, ...]

    @property
    def limits(self) -> ModelLimits:
        """The part that goes into the engine's capabilities."""
        return ModelLimits(self.model_type, self.vocab_size, self.max_model_len, self.eos_token_ids)


def parse_options(options: Mapping[str, str]) -> InstantOptions:
    """Parse the engine's options. Raises `ConfigError` for an unknown name or a value that is no
    number."""
    check_options("instant", options, ("tokens_per_second", "ttft_ms", "tokens"))
    try:
        rate = float(options.get("tokens_per_second", "0"))
        ttft = float(options.get("ttft_ms", "0")) / 1000
        tokens = tuple(int(part) for part in options.get("tokens", "").split(",") if part)
    except ValueError as error:
        raise ConfigError(f"an option of the instant engine is not a number: {error}") from error
    if not (0 <= rate < float("inf") and 0 <= ttft < float("inf")):
        raise ConfigError("tokens_per_second and ttft_ms must be finite and not negative")
    return InstantOptions(rate, ttft, tokens)


def read_vocabulary(
    spec: EngineSpec, options: InstantOptions, *, longer: str = ""
) -> InstantVocabulary:
    """Read the model's directory. Raises `ConfigError`, which names the unusable file; `longer`
    says how to allow longer sequences."""
    limits = read_model_limits(spec, longer=longer)
    tokens = options.tokens or _from_tokenizer(Path(spec.model) / "tokenizer.json")
    vocab_size = limits.vocab_size or max(tokens) + 1
    if not all(0 <= token < vocab_size for token in tokens):
        raise ConfigError(f"the instant engine's tokens are outside the vocabulary ({vocab_size})")
    return InstantVocabulary(
        tokens=tokens,
        vocab_size=vocab_size,
        max_model_len=limits.max_model_len,
        model_type=limits.model_type,
        eos_token_ids=limits.eos_token_ids,
    )


def ordinary_ids(tokenizer: Mapping[str, Any]) -> tuple[TokenId, ...]:
    """Up to 64 ids of plain words in the content of a `tokenizer.json`, spread over the vocabulary;
    letters if there are no words. Empty if there is neither."""
    added = {entry["id"] for entry in tokenizer.get("added_tokens", ())}
    vocab = tokenizer.get("model", {}).get("vocab", {})
    pairs: Iterable[tuple[str, int]] = (
        vocab.items()
        if isinstance(vocab, dict)
        else ((entry[0], index) for index, entry in enumerate(vocab))
    )
    plain = [(_bare(text), index) for text, index in pairs if index not in added]
    letters = sorted(index for text, index in plain if text.isascii() and text.isalpha())
    lengths = {index: len(text) for text, index in plain}
    words = [index for index in letters if 2 <= lengths[index] <= 8]
    chosen = words or letters
    return tuple(chosen[:: max(1, len(chosen) // _CYCLE)][:_CYCLE])


def _bare(text: str) -> str:
    for mark in _WORD_MARKS:
        text = text.removeprefix(mark)
    return text


def _from_tokenizer(path: Path) -> tuple[TokenId, ...]:
    tokens = ordinary_ids(read_json(path))
    if not tokens:
        raise ConfigError(f"{path} has no plain words: give --engine-option tokens=ID,ID,...")
    return tokens
