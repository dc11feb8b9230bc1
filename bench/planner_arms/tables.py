"""Groups the results by load, start-up and seed, and compares arms within such a group. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bench.planner_arms.loads import LOADS, load_of
from bench.planner_arms.mode_watch import followed, nearly_followed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.planner_arms.cells import Cell
    from pdserve.ids import Seconds

__all__ = [
    "OURS",
    "THEIRS",
    "Numbers",
    "Table",
    "is_static",
    "static_best",
    "static_mean",
    "tables",
]

OURS: Final = "pdserve"
THEIRS: Final = "Dynamo (rewritten)"
_NEAR: Final = 0.005
"""A fixed size is as good as a larger one within half a point."""

Numbers = dict[str, Any]


def static_best(good: Mapping[int, float]) -> int:
    """By hindsight: the smallest size within half a point of any larger one."""
    return next(
        size
        for size in sorted(good)
        if all(good[size] >= good[other] - _NEAR for other in good if other > size)
    )


def static_mean(load: str) -> int:
    """The size for a made load's mean, rounded up; 0: the load is a trace."""
    made = load_of(load)
    if made.part is not None:
        return 0
    seconds = range(int(made.seconds))
    mean = sum(made.at(float(at)).rate for at in seconds) / len(seconds)
    return int(-(-mean // 1))


def is_static(arm: str) -> bool:
    """True for a pool that does not change."""
    return arm.startswith("static ")


@dataclass(frozen=True, slots=True)
class Table:
    """What was found of one load at one start-up time and seed."""

    load: str
    start_up: Seconds
    seed: int
    arms: Mapping[str, Numbers]
    """By arm; those that did not run are missing. Static arms do not depend on the start-up."""

    @property
    def words(self) -> str:
        """The load, the start-up and the seed."""
        return f"{self.load}, start-up {self.start_up:g} s, seed {self.seed}"

    @property
    def best(self) -> str:
        """The static arm that is best by hindsight: the size, or of pools with two modes the ratio
        that serves most requests well. Empty: too few ran to say."""
        good = {arm: numbers["good"] for arm, numbers in self.arms.items() if is_static(arm)}
        if load_of(self.load).split is not None:
            ratios = [arm for arm in good if ":" in arm]
            return max(ratios, key=lambda arm: good[arm]) if len(ratios) > 1 else ""
        sizes = {int(arm.split()[1]): share for arm, share in good.items()}
        return f"static {static_best(sizes)}" if len(sizes) > 1 else ""

    def hours(self, arm: str) -> float:
        """Worker-hours of an arm."""
        return float(self.arms[arm]["worker_seconds"]) / 3600

    def good(self, arm: str) -> float:
        """Share of its requests that were good."""
        return float(self.arms[arm]["good"])

    def wins(self, ours: str, theirs: str) -> bool:
        """True if `ours` keeps as much at no higher cost."""
        return self.good(ours) >= self.good(theirs) and self.hours(ours) <= self.hours(theirs)

    def followed(self) -> list[tuple[Seconds | None, Seconds | None]]:
        """Seconds from each shift of lengths until pdserve's pool had, but for one worker, the
        ratio that it kept, and until it had that."""
        load = load_of(self.load)
        ends = (*load.shifts[1:], load.seconds)
        ratios = [(float(at), str(ratio)) for at, ratio in self.arms[OURS]["ratios"]]
        return [
            (nearly_followed(ratios, at, until), followed(ratios, at, until))
            for at, until in zip(load.shifts, ends, strict=True)
        ]


def tables(found: Mapping[Cell, Numbers]) -> list[Table]:
    """One per load, start-up and seed, in the order of the loads."""
    grouped: dict[tuple[str, Seconds, int], dict[str, Numbers]] = {}
    fixed: dict[tuple[str, int], dict[str, Numbers]] = {}
    for cell, numbers in found.items():
        if cell.load not in LOADS:
            continue
        if is_static(cell.arm):
            fixed.setdefault((cell.load, cell.seed), {})[cell.arm] = numbers
        else:
            grouped.setdefault((cell.load, cell.start_up, cell.seed), {})[cell.arm] = numbers
    order = [*LOADS]
    return [
        Table(load, start_up, seed, fixed.get((load, seed), {}) | grouped[load, start_up, seed])
        for load, start_up, seed in sorted(grouped, key=lambda key: (order.index(key[0]), *key[1:]))
    ]
