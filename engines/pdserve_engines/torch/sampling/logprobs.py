"""Describes chosen tokens: their logprob and rank, the likeliest tokens, and tokens asked for.

Everything is looked up on the device, and nothing here waits for it: `look_up` launches, and
`records` reads what has come to the host by then. It knows nothing of how tokens are chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdserve.messages.request import TokenLogprob
from pdserve_engines.torch.models.download import Download
from pdserve_engines.torch.models.upload import upload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq

    import torch

__all__ = ["LogprobWishes", "describe", "look_up", "records"]


class LogprobWishes:
    """What some rows of a batch want to know, uploaded once for all steps of the batch."""

    def __init__(
        self,
        counts: Seq[int],
        others: Seq[Seq[int]],
        device: torch.device,
        rows: Seq[int] | None = None,
    ) -> None:
        """For each row, how many of the likeliest tokens and which others it wants. `rows`: their
        places in the batch; None: they are all of it, in order."""
        self.rows = list(range(len(counts)) if rows is None else rows)
        """Places of the rows in the batch."""
        self.others = others
        """Tokens that each row asks for."""
        self._index = None if rows is None else _indices(rows, device)
        self.groups = [(count, at, _indices(at, device)) for count, at in _by_count(counts)]
        """How many of the likeliest tokens, the rows that want so many, and these on the device.
        They are done together, so that ties do not depend on the other rows."""
        self.places: torch.Tensor | None = None
        """`[2, k]` int64: row and id of all `others`; None: there are none."""
        if any(others):
            at = np.repeat(np.arange(len(others)), [len(ids) for ids in others])
            self.places = upload(np.stack((at, np.concatenate(others).astype(np.int64))), device)

    def of_rows(self, batch: torch.Tensor) -> torch.Tensor:
        """The rows of `batch`, which has one for each sequence."""
        return batch if self._index is None else batch[self._index]


def _indices(rows: Seq[int], device: torch.device) -> torch.Tensor:
    return upload(np.array(rows, np.int64), device)


def _by_count(counts: Seq[int]) -> Iterator[tuple[int, list[int]]]:
    """Each count and the rows that have it."""
    for count in sorted(set(counts) - {0}):
        yield count, [row for row, wanted in enumerate(counts) if wanted == count]


def look_up(raw: torch.Tensor, tokens: torch.Tensor, wishes: LogprobWishes) -> list[torch.Tensor]:
    """Launch the search for what `records` needs. `raw` `[n, vocab]` are logprobs, `tokens` `[n]`
    int64 ids of that vocabulary on the same device."""
    values = raw.gather(1, tokens.unsqueeze(1))
    found = [values.squeeze(1), (raw > values).sum(-1).add_(1)]
    for count, rows, index in wishes.groups:
        chosen = raw if len(rows) == len(raw) else raw[index]
        best = chosen.topk(min(count, raw.shape[-1]))
        found += [best.indices, best.values]
    if wishes.places is not None:
        found.append(raw[wishes.places[0], wishes.places[1]])
    return found


def records(
    tokens: Seq[int], wishes: LogprobWishes, found: Seq[torch.Tensor]
) -> list[TokenLogprob]:
    """The records of `tokens`. `found`: what `look_up` has launched, on the host."""
    rest = iter(found)
    values, ranks = next(rest).tolist(), next(rest).tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
    for _, rows, _ in wishes.groups:
        for row, ids, best in zip(rows, next(rest).tolist(), next(rest).tolist(), strict=True):
            tops[row] = list(zip(ids, best, strict=True))
    if wishes.places is not None:
        _add_others(tops, wishes.others, iter(next(rest).tolist()))
    return [
        TokenLogprob(token=token, logprob=value, rank=rank, top=top)
        for token, value, rank, top in zip(tokens, values, ranks, tops, strict=True)
    ]


def _add_others(
    tops: list[list[tuple[int, float]]], others: Seq[Seq[int]], values: Iterator[float]
) -> None:
    """Add the tokens that a row asks for, unless they are among its likeliest ones."""
    for top, ids in zip(tops, others, strict=True):
        known = {token for token, _ in top}
        top += [(token, value) for token in ids if (value := next(values), token not in known)[1]]


def describe(raw: torch.Tensor, tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
    """The records of `tokens` with the `counts[i]` likeliest ones of row i of `raw` `[n, vocab]`.
    Waits for the device."""
    wishes = LogprobWishes(counts, [()] * len(counts), raw.device)
    found = look_up(raw, _indices(tokens, raw.device), wishes)
    return records(tokens, wishes, Download(found).wait())
