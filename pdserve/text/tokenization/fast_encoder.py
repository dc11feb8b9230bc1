"""Encodes text with `fastokens`, many times faster than `tokenizers`, where both give the same ids.

`uncovered` says which tokenizers it does not take: `fastokens` lacks some steps, and differs from
`tokenizers` in others. `find_difference` compares both over a fixed set of texts (`probe_texts.py`)
and all added tokens. `choose_encoder` does both. This file knows no model card.

Threads: any number may encode at once; the interpreter lock is released meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.text.tokenization.probe_texts import PLAIN_TEXTS, texts_with
from pdserve.text.tokenization.token_text_table import is_panic

try:
    import fastokens
except ImportError:  # no wheel for this machine
    fastokens = None

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import tokenizers

__all__ = ["SLOW", "EncoderChoice", "FastEncoder", "choose_encoder", "find_difference", "uncovered"]

_NORMALIZERS: Final = {"NFC", "Prepend", "Replace"}
_PRE_TOKENIZERS: Final = {"ByteLevel", "Digits", "Split"}
_NO_CACHE: Final = 0
_SHOWN: Final = 60
"""Characters of a text that a log line shows."""


class _Model(msgspec.Struct):
    type: str | None = None
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _File(msgspec.Struct):
    """The parts of `tokenizer.json` that decide what is covered."""

    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class EncoderChoice:
    """Which library encodes a tokenizer's texts, and why not the faster one."""

    fast: bool
    uncovered: str = ""
    """What `fastokens` does not cover; empty if it covers everything."""
    difference: str = ""
    """A text to which it gives other ids, or its error; empty if there is none."""


SLOW: Final = EncoderChoice(fast=False)
"""The choice of a tokenizer before `choose_encoder`."""


class FastEncoder:
    """Encodes texts for one tokenizer."""

    def __init__(self, tokenizer_json: str) -> None:
        """Errors: `ValueError` for a tokenizer that `fastokens` cannot read.

        Takes a second for a vocabulary of a hundred thousand.
        """
        self._raw = fastokens.Tokenizer.from_json_str(tokenizer_json)
        self._raw.no_padding()
        self._raw.no_truncation()
        # An environment variable can turn this cache on. Response times would then tell one tenant
        # what another one has sent.
        self._raw.enable_segment_cache(_NO_CACHE)

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[memoryview]:
        """Return the ids of each text as a view of unsigned 32-bit integers.

        Errors: `UnicodeEncodeError` for a lone surrogate.
        """
        packed, ends = self._raw.encode_batch_flat(list(texts), add_special_tokens)
        ids, places = memoryview(packed).cast("I"), memoryview(ends).cast("Q")
        return [ids[places[at] : places[at + 1]] for at in range(len(texts))]


def choose_encoder(
    tokenizer_json: bytes, raw: tokenizers.Tokenizer, own_tokens: bool
) -> tuple[EncoderChoice, FastEncoder | None]:
    """Return the fast encoder of a tokenizer if it has one, and the reason if it has none.

    `raw` is the tokenizer that the file describes, with all added tokens; `own_tokens`: some
    of them are not in the file. Takes up to seconds.
    """
    reason = uncovered(tokenizer_json, raw)
    if reason:
        return EncoderChoice(fast=False, uncovered=reason), None
    try:
        # Writing the tokenizer out holds the interpreter lock for tenths of a second.
        fast = FastEncoder(raw.to_str() if own_tokens else tokenizer_json.decode())
        difference = find_difference(raw, fast)
    except BaseException as error:
        if not (is_panic(error) or isinstance(error, ValueError)):
            raise
        difference = f"{type(error).__name__}: {error}"
    if difference:
        return EncoderChoice(fast=False, difference=difference), None
    return EncoderChoice(fast=True), fast


def uncovered(tokenizer_json: bytes, raw: tokenizers.Tokenizer) -> str:
    """Why a tokenizer cannot be encoded by `FastEncoder`; empty if it can.

    `raw` is the tokenizer that the file describes, with all added tokens.
    """
    if fastokens is None:
        return "fastokens is not installed"
    try:
        file = msgspec.json.decode(tokenizer_json, type=_File)
    except msgspec.MsgspecError as error:
        return f"its description: {error}"
    steps = [
        *_outside(file.normalizer, "normalizers", _NORMALIZERS),
        *_outside(file.pre_tokenizer, "pretokenizers", _PRE_TOKENIZERS),
    ]
    if steps:
        return f"the step {steps[0]}"
    return _odd_model(file.model) or _odd_tokens(
        raw.get_added_tokens_decoder().values(), has_normalizer=_has_steps(file.normalizer)
    )


def find_difference(raw: tokenizers.Tokenizer, fast: FastEncoder) -> str:
    """The beginning of a text to which the two give different ids; empty if there is none."""
    added = [token.content for token in raw.get_added_tokens_decoder().values()]
    texts = [*PLAIN_TEXTS, *texts_with(added)]
    for add_special_tokens in (False, True):
        expected = raw.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        found = fast.encode(texts, add_special_tokens)
        for text, right, ids in zip(texts, expected, found, strict=True):
            if right.ids != ids.tolist():
                return text[:_SHOWN] or "an empty text"
    return ""


def _outside(step: dict[str, Any] | None, children: str, known: set[str]) -> Iterator[str]:
    """Types of steps that are not `known`."""
    if step is None:
        return
    kind = str(step.get("type"))
    if kind == "Sequence":
        for child in step.get(children) or ():
            yield from _outside(child, children, known)
    elif kind not in known:
        yield kind


def _has_steps(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return False
    if normalizer.get("type") == "Sequence":
        return any(map(_has_steps, normalizer.get("normalizers") or ()))
    return True


def _odd_model(model: _Model) -> str:
    if model.type != "BPE":
        return f"a model of type {model.type}"
    if model.dropout:
        return "a model with dropout"
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return "a model that marks the parts of words"
    return ""


def _odd_tokens(tokens: Iterable[tokenizers.AddedToken], has_normalizer: bool) -> str:
    """Added tokens that `fastokens` finds in other places than `tokenizers`, which looks for those
    outside of normalised text first."""
    if any(token.single_word for token in tokens):
        return "an added token that must be a whole word"
    late = {token.content for token in tokens if token.normalized}
    if late and has_normalizer:
        return "an added token in normalised text"
    early = {token.content for token in tokens if not token.normalized}
    if _may_overlap(late, early):
        return "added tokens that overlap"
    return ""


def _may_overlap(some: set[str], others: set[str]) -> bool:
    """Whether a text can have one of `some` and one of `others` in places that overlap."""
    if not some or not others:
        return False
    return (
        not _inner(some).isdisjoint(others)
        or not _inner(others).isdisjoint(some)
        or not _ends(some).isdisjoint(_begins(others))
        or not _begins(some).isdisjoint(_ends(others))
    )


def _inner(words: set[str]) -> set[str]:
    return {
        word[begin:end]
        for word in words
        for begin in range(len(word))
        for end in range(begin + 1, len(word) + 1)
    }


def _begins(words: set[str]) -> set[str]:
    return {word[:end] for word in words for end in range(1, len(word) + 1)}


def _ends(words: set[str]) -> set[str]:
    return {word[begin:] for word in words for begin in range(len(word))}
