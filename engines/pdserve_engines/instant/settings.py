"""What the instant engine needs to know: its options, and the little it reads of a model.

Only `config.json` and `tokenizer.json` are opened, no weights. It knows nothing of streams.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.ids import Seconds, TokenId
    from pdserve.messages.engine import EngineSpec

__all__ = ["Options", "Vocabulary", "ordinary_ids", "parse_options", "read_vocabulary"]

_CYCLE = 64
"""How many different tokens an output consists of."""

_WORD_MARKS = ("\u0120", "\u2581", "##")  # a leading space as GPT-2 and SentencePiece write it


@dataclass(frozen=True, slots=True)
class Options:
    """`--engine-option name=value`."""

    tokens_per_second: float = 0.0
    """Of each stream; its tokens become due one by one, streams staggered. 0: as fast as read."""
    ttft: Seconds = 0.0
    """From submission to the first token; given as `ttft_ms`."""
    tokens: tuple[TokenId, ...] = ()
    """The ids to cycle through; empty: ordinary words of the model's tokenizer."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What outputs are made of, and how long they may become."""

    tokens: tuple[TokenId, ...]
    vocab_size: int
    max_model_len: int
    model_type: str
    eos_token_ids: tuple[TokenId, ...]


def parse_options(options: Mapping[str, str]) -> Options:
    """Raises `ConfigError` for unknown names and values that are no numbers."""
    unknown = options.keys() - {"tokens_per_second", "ttft_ms", "tokens"}
    if unknown:
        raise ConfigError(
            f"the instant engine has no option {', '.join(sorted(unknown))}; it has "
            "tokens_per_second, ttft_ms and tokens"
        )
    try:
        rate = float(options.get("tokens_per_second", "0"))
        ttft = float(options.get("ttft_ms", "0")) / 1000
        tokens = tuple(int(part) for part in options.get("tokens", "").split(",") if part)
    except ValueError as error:
        raise ConfigError(f"an option of the instant engine is no number: {error}") from error
    if not (0 <= rate < float("inf") and 0 <= ttft < float("inf")):
        raise ConfigError("tokens_per_second and ttft_ms must be finite and not negative")
    return Options(rate, ttft, tokens)


def read_vocabulary(spec: EngineSpec, options: Options) -> Vocabulary:
    """Read the model's directory. Raises `ConfigError` naming the file that does not serve."""
    directory = Path(spec.model)
    config = _read_json(directory / "config.json")
    text = config.get("text_config") or config
    limit = int(text.get("max_position_embeddings", 0) or 0) or 1 << 20
    if spec.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len of {spec.max_model_len} is over the checkpoint's limit of {limit} "
            "tokens"
        )
    tokens = options.tokens or _from_tokenizer(directory / "tokenizer.json")
    vocab_size = int(text.get("vocab_size", 0) or 0) or max(tokens) + 1
    if not all(0 <= token < vocab_size for token in tokens):
        raise ConfigError(f"the instant engine's tokens lie outside the vocabulary ({vocab_size})")
    return Vocabulary(
        tokens=tokens,
        vocab_size=vocab_size,
        max_model_len=spec.max_model_len or limit,
        model_type=str(config.get("model_type", "")),
        eos_token_ids=_ids(text.get("eos_token_id")),
    )


def ordinary_ids(tokenizer: Mapping[str, Any]) -> tuple[TokenId, ...]:
    """Up to 64 ids of plain words in the content of a `tokenizer.json`, spread over the vocabulary;
    letters where there are no words. Empty if there are none either."""
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
    tokens = ordinary_ids(_read_json(path))
    if not tokens:
        raise ConfigError(f"{path} has no plain words: give --engine-option tokens=ID,ID,...")
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content


def _ids(value: object) -> tuple[TokenId, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else ()
