"""Fits non-negative coefficients to observations by ridge regression over a stratified window.

    minimise  sum ((y - x·b) / y^)² + ridge · sum ((b - prior) / scale)²     over b >= 0

Rows are divided by what was predicted for them (y^), so that a tenth too much is as bad for a short
prompt as for a long one: unweighted, the longest prompts alone would decide. The rows kept are the
last few of each *stratum* (a class of similar rows), so that a thousand short prompts do not push
out the only long ones. The ridge weighs as much as one row. It pulls towards the prior's shape, at
the scale that fits best, and so decides only what the rows leave open: with prompts of one length,
how much of their time was base and how much was quadratic.

A twentieth of the prior's second price always stays (`_LEAST`). From prompts of nearly one length
it cannot be told, noise would set it to 0 in every fourth fit, and a cached prefix would be worth
nothing until longer prompts came.

Three columns, so the solution is found by trying which of them are zero: exact, pure Python, well
below a millisecond but for the sums. Bounded: `strata` x `depth` rows.
"""

from __future__ import annotations

from collections import deque
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Coefficients", "RegressionRow", "StratifiedWindow", "fit_nonnegative", "scale_of"]

Coefficients = tuple[float, float, float]

_LEAST: Final = 0.05
"""Least share of the prior's second coefficient, at the scale that fits best."""


class RegressionRow(NamedTuple):
    """One observation: y = first + x1 * second + x2 * third."""

    x1: float
    x2: float
    y: float

    def predicted(self, by: Coefficients) -> float:
        return by[0] + by[1] * self.x1 + by[2] * self.x2


class StratifiedWindow:
    """Keeps the last rows of each stratum."""

    def __init__(self, depth: int = 32, strata: int = 64) -> None:
        self._depth = depth
        self._strata = strata
        self._rows: dict[object, deque[RegressionRow]] = {}
        """Rows by stratum; the stratum without news for longest comes first."""

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def add(self, stratum: object, row: RegressionRow) -> bool:
        """Add a row; drops the stratum's oldest row, or the stratum without news for longest, if
        there is no room. True if the stratum is new."""
        rows = self._rows.pop(stratum, None)
        fresh = rows is None
        if rows is None:
            if len(self._rows) >= self._strata:
                del self._rows[next(iter(self._rows))]
            rows = deque(maxlen=self._depth)
        self._rows[stratum] = rows
        rows.append(row)
        return fresh

    def has(self, stratum: object) -> bool:
        return stratum in self._rows

    def rows(self) -> list[RegressionRow]:
        return [row for rows in self._rows.values() for row in rows]

    def rows_with(self, others: StratifiedWindow, few: int) -> list[RegressionRow]:
        """All rows, and those of `others` in strata of which fewer than `few` rows are here."""
        missing = (
            rows for stratum, rows in others._rows.items() if len(self._rows.get(stratum, ())) < few
        )
        return self.rows() + [row for rows in missing for row in rows]


def fit_nonnegative(
    rows: Sequence[RegressionRow], prior: Coefficients, passes: int = 2, ridge: float = 1.0
) -> Coefficients:
    """Fit the coefficients to `rows`; returns `prior` if there are none. Each pass weights the rows
    by the predictions of the pass before."""
    scale = scale_of(prior, rows)
    by = prior[0] * scale, prior[1] * scale, prior[2] * scale
    shape = by
    for _ in range(passes):
        sums = _Sums.of(rows, by)
        if sums is None:
            return prior
        by = _solved(sums, shape, ridge)
    return by


def scale_of(prior: Coefficients, rows: Iterable[RegressionRow]) -> float:
    """The factor on the prior that fits the rows best: relative errors of both directions count
    alike. 1: there are no rows."""
    p0, p1, p2 = prior
    ratios = sorted([y / (p0 + p1 * x1 + p2 * x2) for x1, x2, y in rows])
    return ratios[len(ratios) // 2] if ratios else 1.0


class _Sums(NamedTuple):
    """Normal equations of the weighted rows, per row: the matrix and the right side."""

    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]
    rows: int

    @classmethod
    def of(cls, rows: Iterable[RegressionRow], by: Coefficients) -> _Sums | None:
        """None: no row says anything."""
        b0, b1, b2 = by
        s00 = s01 = s02 = s11 = s12 = s22 = y0 = y1 = y2 = 0.0
        n = 0
        for x1, x2, y in rows:
            predicted = b0 + b1 * x1 + b2 * x2
            if predicted <= 0.0:
                continue
            n += 1
            weight = 1.0 / (predicted * predicted)
            w1, w2 = weight * x1, weight * x2
            s00 += weight
            s01 += w1
            s02 += w2
            s11 += w1 * x1
            s12 += w1 * x2
            s22 += w2 * x2
            y0 += weight * y
            y1 += w1 * y
            y2 += w2 * y
        if not n:
            return None
        matrix = ((s00, s01, s02), (s01, s11, s12), (s02, s12, s22))
        return cls(
            tuple(tuple(value / n for value in line) for line in matrix),
            (y0 / n, y1 / n, y2 / n),
            n,
        )


def _solved(sums: _Sums, shape: Coefficients, ridge: float) -> Coefficients:
    """Solves in units of the columns' own size, so that all coefficients have a similar size."""
    unit = [sums.a[k][k] ** -0.5 if sums.a[k][k] > 0.0 else 0.0 for k in range(3)]
    pull = ridge / sums.rows
    a = [[sums.a[i][j] * unit[i] * unit[j] for j in range(3)] for i in range(3)]
    b = [sums.b[k] * unit[k] for k in range(3)]
    for k in range(3):
        a[k][k] += pull
        b[k] += pull * (shape[k] / unit[k] if unit[k] else 0.0)
    least = _LEAST * shape[1] / unit[1] if unit[1] else 0.0
    # This solves for the part of the second coefficient that is above `least`.
    best = _least(a, [b[k] - a[k][1] * least for k in range(3)])
    return best[0] * unit[0], (best[1] + least) * unit[1], best[2] * unit[2]


def _least(a: Sequence[Sequence[float]], b: Sequence[float]) -> list[float]:
    """The x >= 0 with the least x·a·x - 2 b·x; `a` is positive definite. For every choice of what
    is zero, the rest is a linear system; the best of the non-negative solutions is the answer."""
    best, least = [0.0] * len(b), 0.0
    for size in range(len(b), 0, -1):
        for free in combinations(range(len(b)), size):
            x = _linear([[a[i][j] for j in free] for i in free], [b[i] for i in free])
            if min(x) < 0.0:
                continue
            value = -sum(b[i] * x[k] for k, i in enumerate(free))
            if value < least:
                least, best = value, [0.0] * len(b)
                for k, i in enumerate(free):
                    best[i] = x[k]
    return best


def _linear(a: list[list[float]], b: list[float]) -> list[float]:
    """Solves a·x = b for a positive definite `a`, which needs no pivots."""
    size = len(b)
    for i in range(size):
        for k in range(i + 1, size):
            factor = a[k][i] / a[i][i]
            for j in range(i, size):
                a[k][j] -= factor * a[i][j]
            b[k] -= factor * b[i]
    x = [0.0] * size
    for i in range(size - 1, -1, -1):
        x[i] = (b[i] - sum(a[i][j] * x[j] for j in range(i + 1, size))) / a[i][i]
    return x
