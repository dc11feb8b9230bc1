"""Zeroes the probabilities that min_p, top_k and top_p exclude.

Tokens that tie at a filter's border all stay. On a device nothing here waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from pdserve_engines.torch.sampling.row_params import RowFilter, RowFilters

__all__ = ["border_by_counting", "border_by_sorting", "filter_"]

_NUCLEUS_GUESS: Final = 128
"""How many of the likeliest tokens a host looks at for top_p before it sorts a whole row."""
_LOW_BITS: Final = 15
"""The lower half of a probability's bits."""
_ONE_BITS: Final = 0x3F800000
"""1.0 as the bits of a float32, the most that a probability has."""
_UNIT: Final = 2.0**60
"""Parts of a probability of 1. The parts of a row, whose sum is 1 but for rounding, fit an int64;
those of each token from 2**-37 on are exact."""


def filter_(probabilities: torch.Tensor, filters: RowFilters) -> None:
    """Zero what min_p, then top_k, then top_p exclude, in place; no renormalisation."""
    if filters.min_p is not None:
        chosen = _rows_of(probabilities, filters.min_p)
        least = filters.min_p.column * chosen.amax(-1, keepdim=True)
        _keep(probabilities, filters.min_p, chosen, least)
    if filters.top_k is not None:
        chosen = _rows_of(probabilities, filters.top_k)
        largest = chosen.topk(filters.top_k.most).values
        least = largest.gather(1, filters.top_k.column - 1)
        _keep(probabilities, filters.top_k, chosen, least)
    if filters.top_p is not None:
        chosen = _rows_of(probabilities, filters.top_p)
        on_host = chosen.device.type == "cpu"
        border = border_by_sorting if on_host else border_by_counting
        _keep(probabilities, filters.top_p, chosen, border(chosen, filters.top_p.column))


def _rows_of(probabilities: torch.Tensor, rows: RowFilter) -> torch.Tensor:
    return probabilities if rows.rows is None else probabilities[rows.rows]


def _keep(
    probabilities: torch.Tensor, rows: RowFilter, chosen: torch.Tensor, least: torch.Tensor
) -> None:
    """Zero the probabilities below `least` in the filter's rows, of which `chosen` is a view or a
    copy."""
    chosen.masked_fill_(chosen < least, 0)
    if rows.rows is not None:
        probabilities[rows.rows] = chosen


def border_by_sorting(probabilities: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The smallest probability in each row's nucleus: `[n, 1]`. Looks at numbers, so it is for a
    host, where most rows need only a few of their tokens in order."""
    targets = probabilities.sum(-1, keepdim=True, dtype=torch.float64) * shares
    vocab = probabilities.shape[-1]
    width = min(_NUCLEUS_GUESS, vocab)
    largest = probabilities.topk(width).values
    covered = largest.cumsum(-1, dtype=torch.float64)
    if width < vocab and bool((covered[:, -1:] < targets).any()):
        largest = probabilities.sort(-1, descending=True).values
        covered = largest.cumsum(-1, dtype=torch.float64)
    # Tokens stay while those before them cover less than the share; rounding may leave the last
    # sum below the target, hence the clamp.
    last = torch.searchsorted(covered, targets).clamp_(max=largest.shape[-1] - 1)
    return largest.gather(1, last)


def border_by_counting(probabilities: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The same without a sort and without looking at numbers: the upper half of the border's bits
    by one histogram, the lower half by another.

    Floats that are not negative are ordered like their bits. Integers are summed, so the result
    does not depend on the order. A row without numbers gets any border.
    """
    known = probabilities.nan_to_num(0.0)
    parts = (known.double() * _UNIT).long()
    bits = known.view(torch.int32).clamp(0, _ONE_BITS).long()
    targets = parts.sum(-1, keepdim=True).double() * shares
    upper, lower = bits >> _LOW_BITS, bits & ((1 << _LOW_BITS) - 1)
    none = torch.zeros_like(targets, dtype=torch.int64)
    high, above = _border_bucket(upper, parts, (_ONE_BITS >> _LOW_BITS) + 1, targets, none)
    inside = parts.masked_fill_(upper != high, 0)
    low, _ = _border_bucket(lower, inside, 1 << _LOW_BITS, targets, above)
    return (high << _LOW_BITS | low).int().view(torch.float32)


def _border_bucket(
    places: torch.Tensor,
    parts: torch.Tensor,
    buckets: int,
    targets: torch.Tensor,
    above: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest bucket that the nucleus reaches in each row, and the parts of what lies over it:
    `[n, 1]` both. `above`: parts that lie over all buckets."""
    held = parts.new_zeros((len(parts), buckets)).scatter_add_(1, places, parts)
    over = held.flip(-1).cumsum(-1).flip(-1) - held + above
    # A bucket is reached if those over it cover less than the share; so are all above it.
    bucket = (over.double() >= targets).sum(-1, keepdim=True).clamp_(max=buckets - 1)
    return bucket, over.gather(1, bucket)
