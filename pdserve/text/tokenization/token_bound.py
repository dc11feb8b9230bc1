"""Computes the fewest tokens a text can have from its length, and splits texts for counting.

Encoding a text that is far too long costs seconds and gigabytes before it is refused. One token
covers a bounded stretch of text unless a step of the tokenizer shortens text without bound. This
file reads that from `tokenizer.json` and gives no bound where it is not certain. It encodes nothing
and knows no limit of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.text.tokenization.token_text_table import BYTE_LEVEL_ALPHABET

if TYPE_CHECKING:
    from collections.abc import Iterator

    import tokenizers

_NFC_SHRINKS = 4
"""Most characters that canonical composition joins to one."""
_KEEP_ALL = {"ByteLevel", "Digits", "Metaspace"}
"""Pre-tokenizers that split text or rewrite characters, but drop nothing."""


_NEAR = 4096
"""Characters at the end of a piece in which a blank is looked for."""


class _Model(msgspec.Struct):
    type: str | None = None
    byte_fallback: bool | None = None


class _File(msgspec.Struct):
    """The parts of `tokenizer.json` that matter for lengths."""

    model: _Model | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


def chars_per_token(tokenizer_json: bytes, raw: tokenizers.Tokenizer) -> int | None:
    """Most characters of text that one token can stand for; None if no bound is certain.

    Reads the whole vocabulary: some tenths of a second for a large one. `raw` is the tokenizer that
    the file describes, with all added tokens.
    """
    file = msgspec.json.decode(tokenizer_json, type=_File)
    factor = 1
    for step in _flatten(file.normalizer, "normalizers"):
        shrinks = _shrinks(step)
        if shrinks is None:
            return None
        factor *= shrinks
    cuts = _flatten(file.pre_tokenizer, "pretokenizers")
    if not all(_keeps_all(step) for step in cuts) or not _knows_every_byte(file, cuts, raw):
        return None
    if any(token.lstrip or token.rstrip for token in raw.get_added_tokens_decoder().values()):
        # Such a token absorbs any number of blanks.
        return None
    return factor * max(map(len, raw.get_vocab(with_added_tokens=True)), default=1)


def split_text(text: str, size: int) -> Iterator[str]:
    """Split `text` into pieces of at most `size` characters, before a blank if one is near, so that
    words keep their tokens."""
    begin = 0
    while begin < len(text):
        end = begin + size
        if end < len(text):
            blank = text.rfind(" ", max(begin + 1, end - _NEAR), end)
            end = blank if blank > 0 else end
        yield text[begin:end]
        begin = end


def _flatten(step: dict[str, Any] | None, children: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [leaf for child in step.get(children, ()) for leaf in _flatten(child, children)]


def _shrinks(normalizer: dict[str, Any]) -> int | None:
    """Most characters that the normalizer turns into one; None: any number."""
    match normalizer:
        case {"type": "Prepend" | "ByteLevel"}:
            return 1
        case {"type": "NFC"}:
            return _NFC_SHRINKS
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return 1 if len(content) >= len(pattern) else None
    return None


def _keeps_all(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer.get("type") in ("Split", "Punctuation"):
        return pre_tokenizer.get("behavior") != "Removed"
    return pre_tokenizer.get("type") in _KEEP_ALL


def _knows_every_byte(file: _File, cuts: list[dict[str, Any]], raw: tokenizers.Tokenizer) -> bool:
    """Whether every byte has a token. Otherwise one unknown token may stand for a text of any
    length, or such a text may have no token."""
    model = file.model
    if model is None or model.type != "BPE":
        return False
    steps = [*cuts, *_flatten(file.normalizer, "normalizers")]
    if any(step.get("type") == "ByteLevel" for step in steps):
        return all(raw.token_to_id(char) is not None for char in BYTE_LEVEL_ALPHABET)
    if not model.byte_fallback:
        return False
    return all(raw.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
