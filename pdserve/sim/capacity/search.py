"""Decides which clusters to replay, and finds the smallest ones that keep the objective. Pure.

The search assumes that a larger cluster keeps the objective if a smaller one does, and that of one
size a best ratio of prefill to decode workers has no second best far away. Neither is certain: a
router places differently among more workers. So the answer is replayed with every seed, and so is
each cluster with one worker less, and the one with one aggregated worker more, up to the first seed
that misses the objective.

The caller replays each batch of cells that `steps` yields, puts the results into `known`, and goes
on. The fields `aggregated` and `split` then have the answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from pdserve.sim.capacity.shapes import ClusterShape, aggregated, split

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence
    from typing import TypeAlias

    from pdserve.sim.capacity.trial import TrialResult

__all__ = ["PlanCell", "PlanSearch"]

_RAISES: Final = 4
"""Workers that are added to a split cluster that only some seeds accept, before it is given up."""


T = TypeVar("T")


class PlanCell(NamedTuple):
    """One replay: a cluster and the number of a seed."""

    shape: ClusterShape
    seed: int


if TYPE_CHECKING:
    Steps: TypeAlias = Generator[list[PlanCell], None, T]


class PlanSearch:
    """One search. `known` has the result of each cell that was replayed."""

    def __init__(
        self, *, floor: int, most: int, seeds: int, width: int, modes: Sequence[str]
    ) -> None:
        """Args: no cluster below `floor` workers is tried first, none above `most` at all; `width`
        is the number of replays that run at once; `modes`: `aggregated`, `split` or both."""
        self._floor = max(1, floor)
        self._most = most
        self._seeds = seeds
        self._width = max(1, width)
        self._modes = modes
        self.known: dict[PlanCell, TrialResult] = {}
        self.aggregated: ClusterShape | None = None
        self.split: ClusterShape | None = None

    def steps(self) -> Steps[None]:
        """Yields batches of cells to replay."""
        if "aggregated" in self._modes:
            self.aggregated = yield from self._aggregated()
        if "split" in self._modes:
            self.split = yield from self._split()

    @property
    def answer(self) -> ClusterShape | None:
        """The smallest cluster found; of one size the aggregated one, which is simpler."""
        found = [one for one in (self.aggregated, self.split) if one is not None]
        return min(found, key=lambda one: one.size, default=None)

    def kept(self, shape: ClusterShape) -> bool:
        """True if every seed of this cluster that was replayed keeps the objective."""
        return all(one.met for one in self.of(shape)) and bool(self.of(shape))

    def of(self, shape: ClusterShape) -> list[TrialResult]:
        """The results of a cluster, by seed."""
        return [result for cell, result in sorted(self.known.items()) if cell.shape == shape]

    # ------------------------------------------------------------------ aggregated workers

    def _aggregated(self) -> Steps[ClusterShape | None]:
        low, high = yield from self._galloped()
        if high is None:
            return None
        while high - low > 1:
            sizes = _between(low, high, self._width)
            yield from self._ask(map(aggregated, sizes))
            good = [size for size in sizes if self._met(aggregated(size))]
            high = min([high, *good])
            low = max([low, *(size for size in sizes if size < high)])
        return (yield from self._confirmed_size(high))

    def _galloped(self) -> Steps[tuple[int, int | None]]:
        """The largest size known to fail, and a size that keeps the objective."""
        low, sizes = self._floor - 1, self._floor
        while low < self._most:
            batch = sorted({min(sizes << index, self._most) for index in range(self._width)})
            yield from self._ask(map(aggregated, batch))
            for size in batch:
                if self._met(aggregated(size)):
                    return low, size
                low = size
            sizes = 2 * low
        return low, None

    def _confirmed_size(self, size: int) -> Steps[ClusterShape | None]:
        while not (yield from self._holds(aggregated(size))):
            size += 1
            if size > self._most:
                return None
        while size > 1 and (yield from self._holds(aggregated(size - 1))):
            size -= 1
        if size < self._most:
            yield from self._holds(aggregated(size + 1))
        return aggregated(size)

    # ------------------------------------------------------------------ prefill and decode workers

    def _split(self) -> Steps[ClusterShape | None]:
        """Looks among clusters that are not larger than the aggregated answer."""
        most = self.aggregated.size if self.aggregated else self._most
        low, found = yield from self._galloped_split(most)
        while found is not None and found.size - low > 1:
            middle = (low + found.size) // 2
            smaller = yield from self._best_ratio(middle, found.prefill / found.size)
            low, found = (low, smaller) if smaller is not None else (middle, found)
        return None if found is None else (yield from self._confirmed_split(found, most))

    def _galloped_split(self, most: int) -> Steps[tuple[int, ClusterShape | None]]:
        low, size = max(1, self._floor - 1), max(2, self._floor)
        if self.aggregated:
            # The only size that matters is the largest: without it no smaller one is looked for.
            size = most
        while low < most:
            found = yield from self._best_ratio(min(size, most), 0.5)
            if found is not None:
                return low, found
            low, size = min(size, most), 2 * size
        return low, None

    def _best_ratio(self, size: int, share: float) -> Steps[ClusterShape | None]:
        """A ratio that keeps the objective: from `share` prefill workers uphill in steps that
        shrink."""
        step, centre = max(1, size // 4), min(max(1, round(share * size)), size - 1)
        while size > 1:
            tried = [p for p in (centre, centre - step, centre + step) if 1 <= p < size]
            yield from self._ask(split(p, size) for p in tried)
            best = max(tried, key=lambda p: self._progress(split(p, size)))
            if self._met(split(best, size)):
                return split(best, size)
            if best != centre:
                centre = best
            elif step == 1:
                return None
            else:
                step //= 2
        return None

    def _confirmed_split(self, shape: ClusterShape, most: int) -> Steps[ClusterShape | None]:
        confirmed = yield from self._raised(shape, most)
        smaller = confirmed
        while smaller is not None:
            confirmed, smaller = smaller, (yield from self._smaller(smaller))
        return confirmed

    def _raised(self, shape: ClusterShape, most: int) -> Steps[ClusterShape | None]:
        """The cluster, or one with a few workers more, that every seed accepts."""
        if (yield from self._holds(shape)):
            return shape
        for _ in range(_RAISES):
            larger = [_changed(shape, prefill=1), _changed(shape, decode=1)]
            if shape.size >= most:
                return None
            for one in larger:
                if (yield from self._holds(one)):
                    return one
            shape = max(larger, key=self._progress)
        return None

    def _smaller(self, shape: ClusterShape) -> Steps[ClusterShape | None]:
        """A cluster with one worker less that keeps the objective with every seed."""
        for one in (_changed(shape, prefill=-1), _changed(shape, decode=-1)):
            if min(one.prefill, one.decode) >= 1 and (yield from self._holds(one)):
                return one
        return None

    # ------------------------------------------------------------------ cells

    def _ask(self, shapes: Iterable[ClusterShape]) -> Steps[None]:
        cells = [PlanCell(shape, 0) for shape in shapes]
        if new := [cell for cell in cells if cell not in self.known]:
            yield new

    def _holds(self, shape: ClusterShape) -> Steps[bool]:
        """True if the cluster keeps the objective with every seed; ends at the first that fails."""
        yield from self._ask([shape])
        if not self._met(shape):
            return False
        cells = [PlanCell(shape, seed) for seed in range(1, self._seeds)]
        if new := [cell for cell in cells if cell not in self.known]:
            yield new
        return self.kept(shape)

    def _met(self, shape: ClusterShape) -> bool:
        return self.known[PlanCell(shape, 0)].met

    def _progress(self, shape: ClusterShape) -> tuple[bool, float]:
        """Larger is better: how much of the trace was replayed before too many had missed."""
        result = self.known[PlanCell(shape, 0)]
        return result.met, result.ended / max(1, result.total) - result.worst_share


def _changed(shape: ClusterShape, *, prefill: int = 0, decode: int = 0) -> ClusterShape:
    return ClusterShape(prefill=shape.prefill + prefill, decode=shape.decode + decode)


def _between(low: int, high: int, count: int) -> list[int]:
    """At most `count` sizes that divide the sizes between two into equal parts."""
    parts = range(1, count + 1)
    return sorted({low + (high - low) * part // (count + 1) for part in parts} - {low})
