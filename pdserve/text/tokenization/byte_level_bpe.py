"""Reads tokenizers of the kind byte-level BPE, as GPT-2, Llama 3, Qwen and DeepSeek have it.

`read_byte_level_bpe` takes a `tokenizer.json` and returns what the extension's `BpeEncoder` is made
of. For tokenizers of another kind, or with a step that the extension lacks, it says which. This
file does not encode, and does not know `tokenizers`.
"""

from __future__ import annotations

from array import array
from codecs import charmap_build, charmap_encode
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.text.tokenization.split_pattern import SplitProgram, UncoveredPattern, compile_pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["AddedTokenFlags", "ByteLevelBpe", "Uncovered", "read_byte_level_bpe"]

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the step `ByteLevel` splits at, unless told otherwise."""


_LONGEST: Final = 1024
"""Most characters of an added token: each place of a text may be compared with it."""
_MOST_STEPS: Final = 32
"""Most expressions that cut text; the extension applies each within the one before it."""


class Uncovered(Exception):
    """A tokenizer has a part that the extension does not know; the message names it."""


class AddedTokenFlags(msgspec.Struct, frozen=True):
    """An added token, and how it is found in a text."""

    content: str
    id: int
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class _Model(msgspec.Struct):
    type: str | None = None
    vocab: Any = None
    merges: Any = None
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    ignore_merges: bool = False


class _File(msgspec.Struct):
    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ByteLevelBpe:
    """What the extension needs to encode a tokenizer's texts."""

    patterns: list[tuple[SplitProgram, bool]]
    """Expressions that cut text, one after the other; whether text between two matches stays."""
    merges: bytes
    """Three ids of 32 bits for each merge: left, right, merged."""
    byte_ids: list[int]
    """The id of each single byte."""
    added: list[tuple[bytes, int]]
    whole: list[tuple[bytes, int]]
    """Pieces that are a token whatever the merges say."""
    normalized: bool
    """Texts are brought to Unicode's form NFC first."""


def read_byte_level_bpe(tokenizer_json: bytes, added: Sequence[AddedTokenFlags]) -> ByteLevelBpe:
    """Read a tokenizer; `added` are all its added tokens. Raises `Uncovered`."""
    try:
        file = msgspec.json.decode(tokenizer_json, type=_File)
    except msgspec.MsgspecError as error:
        raise Uncovered(f"its description: {error}") from None
    _refuse_model(file.model)
    normalized = _is_nfc(file.normalizer)
    _refuse_tokens(added, normalized=normalized)
    letters = _byte_letters()
    return ByteLevelBpe(
        patterns=_patterns(file.pre_tokenizer),
        merges=_merges(file.model),
        byte_ids=_single_bytes(file.model.vocab, letters),
        added=[(token.content.encode(), token.id) for token in added],
        whole=_whole(file.model.vocab, letters) if file.model.ignore_merges else [],
        normalized=normalized,
    )


def _refuse_model(model: _Model) -> None:
    if model.type != "BPE":
        raise Uncovered(f"a model of type {model.type}")
    if model.dropout:
        raise Uncovered("a model with dropout")
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        raise Uncovered("a model that marks the parts of words")


def _is_nfc(normalizer: Mapping[str, Any] | None) -> bool:
    kinds = [step.get("type") for step in _flat(normalizer, "normalizers")]
    for kind in kinds:
        if kind != "NFC":
            raise Uncovered(f"the step {kind}")
    return bool(kinds)


def _flat(step: Mapping[str, Any] | None, children: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a sequence, of which some may be sequences themselves."""
    if step is None:
        return
    if step.get("type") != "Sequence":
        yield step
        return
    for child in step.get(children) or ():
        yield from _flat(child, children)


def _patterns(pre_tokenizer: Mapping[str, Any] | None) -> list[tuple[SplitProgram, bool]]:
    *splits, last = [*_flat(pre_tokenizer, "pretokenizers")] or [{}]
    if last.get("type") != "ByteLevel":
        raise Uncovered("text that is not turned into bytes")
    if last.get("add_prefix_space", True):
        raise Uncovered("a blank before each text")
    if len(splits) >= _MOST_STEPS:
        raise Uncovered(f"{len(splits)} steps before the last one")
    found = [_pattern(step) for step in splits]
    if last.get("use_regex", True):
        found.append((_GPT2, True))
    try:
        return [(compile_pattern(pattern), gaps) for pattern, gaps in found]
    except UncoveredPattern as error:
        raise Uncovered(f"an expression that splits text: {error}") from None


def _pattern(step: Mapping[str, Any]) -> tuple[str, bool]:
    kind = step.get("type")
    if kind == "Digits":
        return (r"\p{N}" if step.get("individual_digits") else r"\p{N}+"), True
    pattern = step.get("pattern")
    if kind != "Split" or not isinstance(pattern, dict) or "Regex" not in pattern:
        raise Uncovered(f"the step {kind}")
    how = step.get("behavior"), step.get("invert", False)
    if how not in (("Isolated", False), ("Removed", True)):
        raise Uncovered(f"a split of another kind: {how[0]}")
    return str(pattern["Regex"]), how[0] == "Isolated"


def _merges(model: _Model) -> bytes:
    vocab = model.vocab
    pairs: Iterable[Sequence[str]] = (
        each.split(" ") if isinstance(each, str) else each for each in model.merges or ()
    )
    try:
        ids = ((vocab[left], vocab[right], vocab[left + right]) for left, right in pairs)
        return array("I", chain.from_iterable(ids)).tobytes()
    except (KeyError, ValueError, TypeError, OverflowError):
        raise Uncovered("its merges") from None


def _single_bytes(vocab: Mapping[str, int], letters: Sequence[str]) -> list[int]:
    try:
        return [vocab[letter] for letter in letters]
    except KeyError:
        raise Uncovered("a vocabulary without all bytes") from None


def _whole(vocab: Mapping[str, int], letters: Sequence[str]) -> list[tuple[bytes, int]]:
    table = charmap_build("".join(letters))
    pairs = ((_bytes_of(token, table), token_id) for token, token_id in vocab.items())
    return [(piece, token_id) for piece, token_id in pairs if piece]


def _bytes_of(token: str, table: Any) -> bytes | None:
    """The bytes that a token's letters stand for; None if it has other characters."""
    try:
        return charmap_encode(token, "strict", table)[0]
    except UnicodeEncodeError:
        return None


def _byte_letters() -> list[str]:
    """The letter that stands for each byte: itself if it can be seen, or one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]


def _refuse_tokens(tokens: Sequence[AddedTokenFlags], *, normalized: bool) -> None:
    for token in tokens:
        if token.single_word:
            raise Uncovered("an added token that must be a whole word")
        if token.lstrip or token.rstrip:
            raise Uncovered("an added token that takes blanks")
        if token.normalized and normalized:
            raise Uncovered("an added token in normalised text")
        if len(token.content) > _LONGEST:
            raise Uncovered(f"an added token of {len(token.content)} characters")
    late = {token.content for token in tokens if token.normalized}
    early = {token.content for token in tokens if not token.normalized}
    if _may_overlap(late, early):
        raise Uncovered("added tokens that overlap")


def _may_overlap(some: set[str], others: set[str]) -> bool:
    """Returns True if one of `some` and one of `others` can share characters of a text."""
    if not some or not others:
        return False
    return (
        _has_inside(some, others)
        or _has_inside(others, some)
        or _ends_as_begins(some, others)
        or _ends_as_begins(others, some)
    )


def _has_inside(words: set[str], parts: set[str]) -> bool:
    """Whether one of `words` contains one of `parts`."""
    lengths = sorted(set(map(len, parts)))
    return any(
        word[begin : begin + length] in parts
        for word in words
        for length in lengths
        for begin in range(len(word) - length + 1)
    )


def _ends_as_begins(words: set[str], others: set[str]) -> bool:
    """Whether one of `words` ends with what one of `others` begins with."""
    begins = {word[:end] for word in others for end in range(1, len(word) + 1)}
    return any(word[begin:] in begins for word in words for begin in range(len(word)))
