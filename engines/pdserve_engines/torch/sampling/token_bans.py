"""Masks the tokens that a request itself excludes: all but its allowed ones, and the ends of bad
words.

A request's lists are read once per sequence, not once per token. The frontend ensures that some
token always stays allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pdserve_engines.torch.models.upload import upload

if TYPE_CHECKING:
    from collections.abc import Container
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import SequenceKey
    from pdserve.messages.request import SamplingParams


@dataclass(slots=True, eq=False)
class _Lists:
    """One sequence's lists, in the form that a step needs."""

    allowed: npt.NDArray[np.int64] | None
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
        self._limited: tuple[list[int], list[_Lists]] = ([], [])
        """The rows of the last step that allow only some tokens, and their lists."""
        self._kept = torch.zeros((2, 0), dtype=torch.int64)
        """Rows and tokens that those rows allow."""

    def apply(
        self, logits: torch.Tensor, sequences: Seq[Sequence], forced: Container[int] = ()
    ) -> None:
        """Set row i of `logits` `[n, vocab]`, which continues `sequences[i]`, to minus infinity
        where a token is excluded; in place. `forced`: rows for which only an end is left; they are
        not changed."""
        limited: tuple[list[int], list[_Lists]] = ([], [])
        rows: list[int] = []
        ids: list[int] = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.request.sampling
            if not (sampling.allowed_token_ids or sampling.bad_words) or row in forced:
                continue
            lists = self._of(sequence)
            if lists.allowed is not None:
                limited[0].append(row)
                limited[1].append(lists)
            banned = lists.ended_by(sequence)
            rows += [row] * len(banned)
            ids += banned
        if limited[0]:
            self._limit(logits, limited)
        if rows:
            places = upload(np.array((rows, ids), np.int64), logits.device)
            logits[places[0], places[1]] = -torch.inf

    def _limit(self, logits: torch.Tensor, limited: tuple[list[int], list[_Lists]]) -> None:
        """Leave each of these rows only the tokens that it allows."""
        if limited != self._limited:
            found = [lists.allowed for lists in limited[1] if lists.allowed is not None]
            rows = np.repeat(np.array(limited[0], np.int64), [len(each) for each in found])
            self._kept = upload(np.stack((rows, np.concatenate(found))), logits.device)
            self._limited = limited
        kept_rows, kept_ids = self._kept
        kept = logits[kept_rows, kept_ids]
        logits[upload(np.array(limited[0], np.int64), logits.device)] = -torch.inf
        logits[kept_rows, kept_ids] = kept

    def forget(self, key: SequenceKey) -> None:
        """Drop a sequence's lists; an unknown one is ignored."""
        if self._lists.pop(key, None) is not None:
            self._limited = ([], [])

    def _of(self, sequence: Sequence) -> _Lists:
        lists = self._lists.get(sequence.key)
        if lists is None:
            lists = self._lists[sequence.key] = _lists(sequence.sampling)
        return lists


def _lists(sampling: SamplingParams) -> _Lists:
    ids = sampling.allowed_token_ids
    allowed = np.array(ids, np.int64) if ids else None
    lists = _Lists(allowed, [word[0] for word in sampling.bad_words if len(word) == 1])
    for word in sampling.bad_words:
        if len(word) > 1:
            lists.after.setdefault(word[-2], []).append(word)
    return lists
