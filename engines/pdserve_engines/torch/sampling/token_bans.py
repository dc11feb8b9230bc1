"""Masks the tokens that a request itself excludes: all but its allowed ones, and the ends of bad
words.

A request's lists are read once per sequence, not once per token. The frontend ensures that some
token always stays allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Container
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import SequenceKey
    from pdserve.messages.request import SamplingParams


@dataclass(slots=True)
class _Lists:
    """One sequence's lists, in the form that a step needs."""

    allowed: torch.Tensor | None
    """None: all tokens."""
    always: list[int]
    """Bad words of one token."""
    after: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """Longer bad words, by their last token but one."""

    def ended_by(self, sequence: Sequence) -> list[int]:
        """Tokens that would now end a bad word."""
        found = list(self.always)
        words = self.after.get(sequence.tokens[-1], ()) if sequence.num_output else ()
        for word in words:
            begin = len(sequence.tokens) + 1 - len(word)
            if begin >= sequence.prompt_len and tuple(sequence.tokens[begin:]) == word[:-1]:
                found.append(word[-1])
        return found


class TokenBans:
    """Keeps the lists of sequences that have some, until `forget`."""

    def __init__(self) -> None:
        self._lists: dict[SequenceKey, _Lists] = {}

    def apply(
        self, logits: torch.Tensor, sequences: Seq[Sequence], forced: Container[int] = ()
    ) -> None:
        """Set row i of `logits` `[n, vocab]`, which continues `sequences[i]`, to minus infinity
        where a token is excluded; in place. `forced`: rows for which only an end is left; they are
        not changed."""
        rows: list[int] = []
        ids: list[int] = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            if row in forced or not (sampling.allowed_token_ids or sampling.bad_words):
                continue
            lists = self._of(sequence, logits.device)
            if lists.allowed is not None:
                kept = logits[row, lists.allowed]
                logits[row] = -torch.inf
                logits[row, lists.allowed] = kept
            banned = lists.ended_by(sequence)
            rows += [row] * len(banned)
            ids += banned
        if rows:
            logits[rows, ids] = -torch.inf

    def forget(self, key: SequenceKey) -> None:
        """Drop a sequence's lists; an unknown one is ignored."""
        self._lists.pop(key, None)

    def _of(self, sequence: Sequence, device: torch.device) -> _Lists:
        lists = self._lists.get(sequence.key)
        if lists is None:
            lists = self._lists[sequence.key] = _lists(sequence.sampling, device)
        return lists


def _lists(sampling: SamplingParams, device: torch.device) -> _Lists:
    ids = sampling.allowed_token_ids
    allowed = torch.tensor(ids, dtype=torch.int64, device=device) if ids else None
    lists = _Lists(allowed, [word[0] for word in sampling.bad_words if len(word) == 1])
    for word in sampling.bad_words:
        if len(word) > 1:
            lists.after.setdefault(word[-2], []).append(word)
    return lists
