"""Writes the text before and after a gap as models that fill in the middle were trained to read it.

The tokenizer's own tokens show which form a model knows. A general model of the same family may
have the tokens without the training; its answer is then poor, not wrong. Runs in the text pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.errors import InvalidRequest
from pdserve.token_ids import TokenIds, token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.tokenization.tokenizer import Tokenizer

__all__ = ["InfillFormat", "infill_format", "infill_prompts"]


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The tokens around both texts."""

    prefix: str
    suffix: str
    middle: str = ""
    """Written last; empty: the prefix is."""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()
    """Further tokens that end the middle; a model may lack some."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens that a model of this form has."""
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))

    def known_to(self, tokenizer: Tokenizer) -> bool:
        return all(tokenizer.token_to_id(mark) is not None for mark in self.marks)

    def end_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The special tokens that end the middle; they are never shown."""
        found = self._ends(tokenizer).values()
        return tuple(token for token in found if token in tokenizer.special_ids)

    def end_texts(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        """The other tokens that end the middle: as stop strings, since they would be shown."""
        found = self._ends(tokenizer)
        return tuple(mark for mark, token in found.items() if token not in tokenizer.special_ids)

    def _ends(self, tokenizer: Tokenizer) -> dict[str, int]:
        found = {mark: tokenizer.token_to_id(mark) for mark in (*self.marks, *self.ends)}
        return {mark: token for mark, token in found.items() if token is not None}


_FORMATS: Final = (
    # Qwen, CodeGemma, Granite 4.
    InfillFormat(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>"),
    ),
    # StarCoder, Granite 3, StableCode.
    InfillFormat(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ends=("<fim_pad>", "<file_sep>", "<repo_name>"),
    ),
    # SantaCoder.
    InfillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),
    # DeepSeek.
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Seed-Coder.
    InfillFormat("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    # Code Llama.
    InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    # Codestral; other models of Mistral have the tokens, too.
    InfillFormat("[PREFIX]", "[SUFFIX]", suffix_first=True, ends=("[MIDDLE]",)),
)
_LETTER: Final = "☺"
"""Text before a suffix while it is tokenised, so that it is not the beginning of a text."""


def infill_format(tokenizer: Tokenizer) -> InfillFormat:
    """The form that the model knows. Errors: `InvalidRequest` if there is none."""
    found = next((each for each in _FORMATS if each.known_to(tokenizer)), None)
    if found is None:
        raise InvalidRequest(
            "'suffix' is not supported by this model: its tokenizer has no tokens to fill in the "
            "middle. Put the context into 'prompt'",
            param="suffix",
        )
    return found


def infill_prompts(
    tokenizer: Tokenizer, before: Sequence[str], after: str, special: bool
) -> list[TokenIds]:
    """The prompt of each text and what follows its gap. `special`: with the tokens that the
    tokenizer puts before a text.

    Errors: `InvalidRequest`.
    """
    layout = infill_format(tokenizer)
    start = tokenizer.encode("") if special else token_ids()
    suffix = _ids(tokenizer, layout.suffix) + _inside(tokenizer, after)
    opening, middle = _ids(tokenizer, layout.prefix), _ids(tokenizer, layout.middle)
    prompts = []
    for prefix in tokenizer.encode_batch(before, add_special_tokens=False):
        first, second = opening + prefix, suffix
        if layout.suffix_first:
            first, second = second, first
        prompts.append(start + first + second + middle)
    return prompts


def _ids(tokenizer: Tokenizer, mark: str) -> TokenIds:
    token = tokenizer.token_to_id(mark) if mark else None
    return token_ids(() if token is None else (token,))


def _inside(tokenizer: Tokenizer, text: str) -> TokenIds:
    """The tokens of a text that is not the beginning of one: some tokenizers put a space there."""
    plain = tokenizer.encode(text, add_special_tokens=False)
    probe, letter = (
        tokenizer.encode(each, add_special_tokens=False) for each in (_LETTER + "x", _LETTER)
    )
    if probe == letter + tokenizer.encode("x", add_special_tokens=False):
        return plain
    return tokenizer.encode(_LETTER + text, add_special_tokens=False)[len(letter) :]
