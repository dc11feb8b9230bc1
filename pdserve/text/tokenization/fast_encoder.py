"""Encodes text by the extension, many times faster than `tokenizers`, where both give the same ids.

`choose_encoder` says for which tokenizers: those that `byte_level_bpe.py` covers, and for which
`find_difference` finds none over a fixed set of texts (`probe_texts.py`) and all added tokens. A
text that has characters newer than the tables, or is not normalised, is left to `tokenizers`. This
file knows no model card.

Memory: an encoder has some tens of bytes for each merge and 4 MiB of remembered pieces; both are
fixed. A call needs some tens of bytes for each byte of its text, and gives them back.
Threads: any number may encode at once; the interpreter lock is released for long texts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from unicodedata import is_normalized

from pdserve import accel
from pdserve.text.tokenization.byte_level_bpe import (
    AddedTokenFlags,
    Uncovered,
    read_byte_level_bpe,
)
from pdserve.text.tokenization.encoder_choice import EncoderChoice
from pdserve.text.tokenization.probe_texts import PLAIN_TEXTS, texts_with
from pdserve.text.tokenization.token_text_table import is_panic
from pdserve.text.tokenization.unicode_classes import character_classes, normalizable_classes
from pdserve.token_ids import TokenIds, token_ids

if TYPE_CHECKING:
    import tokenizers

    from pdserve.text.tokenization.byte_level_bpe import ByteLevelBpe

__all__ = ["FastEncoder", "choose_encoder", "find_difference"]

_SHOWN: Final = 60
"""Characters of a text that a log line shows."""
_FRAMED: Final = ("a", "b", "1")
"""Texts of one token each, which show what the post-processor puts around a text."""

_PART: Final = 16 * 1024
"""Characters of a text that are looked at at once."""
_APART: Final = re.compile(
    "[\0-\u02ff\u0400-\u0482\u048a-\u052f\u3041-\u3096\u30a1-\u30fa\u3400-\u9fff\uac00-\ud7a3]"
)
"""Some characters that begin anew when text is normalised: Latin, Cyrillic, Japanese, Chinese, and
Korean ones."""


class FastEncoder:
    """Encodes texts for one tokenizer."""

    def __init__(self, described: ByteLevelBpe, frame: tuple[list[int], list[int]]) -> None:
        """`frame`: the special tokens before and after a text."""
        normalized = described.normalized
        self._raw = accel.native.BpeEncoder(
            classes=normalizable_classes() if normalized else character_classes(),
            patterns=[
                (each.sets, each.steps, each.starts, each.alternatives, gaps)
                for each, gaps in described.patterns
            ],
            merges=described.merges,
            bytes=described.byte_ids,
            added=described.added,
            whole=described.whole,
        )
        self._normalized = normalized
        self._frame = frame

    def encode(self, text: str, add_special_tokens: bool) -> TokenIds | None:
        """Return the ids of a text; None if it has to be left to `tokenizers`.

        Errors: `UnicodeEncodeError` for a lone surrogate.
        """
        if self._normalized and not (text.isascii() or _is_surely_nfc(text)):
            return None
        packed = self._raw.encode(text)
        if packed is None:
            return None
        before, after = self._frame if add_special_tokens else ((), ())
        ids = token_ids(before)
        ids.frombytes(packed)
        ids.extend(after)
        return ids


def choose_encoder(
    tokenizer_json: bytes, raw: tokenizers.Tokenizer
) -> tuple[EncoderChoice, FastEncoder | None]:
    """Return the fast encoder of a tokenizer if it has one, and the reason if it has none.

    `raw` is the tokenizer that the file describes, with all added tokens. Takes some tenths of a
    second for a vocabulary of a hundred thousand. No file makes it fail: `tokenizers` may encode
    some texts where it fails at those that are tried here.
    """
    if not accel.NATIVE:
        return EncoderChoice(fast=False, uncovered=f"anything: {accel.REASON}"), None
    try:
        described = read_byte_level_bpe(tokenizer_json, _added_tokens(raw))
        fast = FastEncoder(described, _frame(raw))
        difference = find_difference(raw, fast)
    except Uncovered as error:
        return EncoderChoice(fast=False, uncovered=str(error)), None
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = f"what fails with {type(error).__name__}: {error}"
        return EncoderChoice(fast=False, uncovered=reason), None
    if difference:
        return EncoderChoice(fast=False, difference=difference), None
    return EncoderChoice(fast=True), fast


def find_difference(raw: tokenizers.Tokenizer, fast: FastEncoder) -> str:
    """The beginning of a text to which the two give different ids; empty if there is none."""
    added = [token.content for token in raw.get_added_tokens_decoder().values()]
    for texts, special in (((*PLAIN_TEXTS, *texts_with(added)), False), (PLAIN_TEXTS, True)):
        expected = raw.encode_batch_fast([*texts], add_special_tokens=special)
        for text, right in zip(texts, expected, strict=True):
            found = fast.encode(text, special)
            if found is not None and found.tolist() != right.ids:
                return text[:_SHOWN] or "an empty text"
    return ""


def _is_surely_nfc(text: str) -> bool:
    """Returns True if a text is in form NFC. Returns False also where the check would take long.

    The interpreter lock is held for one part of the text at a time. A part ends where a character
    follows that is never joined to the one before it, nor changes place with it.
    """
    begin = 0
    while begin < len(text):
        end = begin + _PART
        if end < len(text):
            apart = _APART.search(text, end, end + _PART)
            if apart is None:
                return False
            end = apart.start()
        if not is_normalized("NFC", text[begin:end]):
            return False
        begin = end
    return True


def _added_tokens(raw: tokenizers.Tokenizer) -> list[AddedTokenFlags]:
    return [
        AddedTokenFlags(
            token.content,
            token_id,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
            normalized=token.normalized,
        )
        for token_id, token in raw.get_added_tokens_decoder().items()
    ]


def _frame(raw: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text. Raises `Uncovered`."""
    for text in _FRAMED:
        plain = raw.encode(text, add_special_tokens=False).ids
        whole = raw.encode(text, add_special_tokens=True).ids
        if len(plain) == 1 and whole.count(plain[0]) == 1:
            place = whole.index(plain[0])
            return whole[:place], whole[place + 1 :]
    raise Uncovered("what its post-processor adds")
