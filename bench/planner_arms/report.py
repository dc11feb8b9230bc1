"""Writes the page of the comparison. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bench.planner_arms.cells import ARMS, MOST, SLOTS
from bench.planner_arms.loads import LOADS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.planner_arms.cells import Cell

__all__ = ["Table", "page", "static_best", "static_mean"]

_NEAR: Final = 0.005
"""A fixed size is as good as a larger one within half a point."""
_OURS: Final = "pdserve"
_THEIRS: Final = "Dynamo (rewritten)"
_OF_BEST: Final = 0.99
_HOURS: Final = 0.7
_SOON: Final = 10.0
_REMOVED_LINES: Final = 12

Numbers = dict[str, Any]


def static_best(good: Mapping[int, float]) -> int:
    """By hindsight: the smallest size within half a point of any larger one."""
    return next(
        size
        for size in sorted(good)
        if all(good[size] >= good[other] - _NEAR for other in good if other > size)
    )


def static_mean(load: str) -> int:
    """The size for the load's mean, rounded up."""
    seconds = range(int(LOADS[load].seconds))
    mean = sum(LOADS[load].at(float(at)).rate for at in seconds) / len(seconds)
    return int(-(-mean // 1))


@dataclass(frozen=True, slots=True)
class Table:
    """What was found of one load at one start-up time and seed."""

    load: str
    start_up: float
    arms: Mapping[str, Numbers]
    """By arm; those that did not run are missing."""

    @property
    def best(self) -> str:
        """The static arm that is best by hindsight; empty: too few ran to say."""
        good = {int(a.split()[1]): n["good"] for a, n in self.arms.items() if _is_static(a)}
        return f"static {static_best(good)}" if len(good) > 1 else ""

    def hours(self, arm: str) -> float:
        """Worker-hours of an arm."""
        return float(self.arms[arm]["worker_seconds"]) / 3600

    def wins(self, ours: str, theirs: str) -> bool:
        """True if `ours` keeps as much at no higher cost."""
        better = self.arms[ours]["good"] >= self.arms[theirs]["good"]
        return better and self.hours(ours) <= self.hours(theirs)


def _is_static(arm: str) -> bool:
    return arm.startswith("static ")


def tables(found: Mapping[Cell, Numbers]) -> list[Table]:
    """One per load, start-up and seed, in the order of the loads."""
    grouped: dict[tuple[str, float, int], dict[str, Numbers]] = {}
    for cell, numbers in found.items():
        grouped.setdefault((cell.load, cell.start_up, cell.seed), {})[cell.arm] = numbers
    order = [*LOADS]
    keys = sorted(grouped, key=lambda key: (order.index(key[0]), *key[1:]))
    return [Table(load, start_up, grouped[load, start_up, seed]) for load, start_up, seed in keys]


def page(
    found: Mapping[Cell, Numbers],
    planned: Sequence[Cell],
    facts: Sequence[str],
    how: Sequence[str],
) -> str:
    """The whole page."""
    made = tables(found)
    sections = [
        ["# The planner beside other rules, in simulation", "", *how],
        [*(f"- {fact}" for fact in facts), *(f"- {fact}" for fact in _world())],
        ["## What it says", "", *_verdict(made)],
        *(list(_section(table)) for table in made),
        ["## What did not run", "", *_missing(found, planned)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _world() -> Iterator[str]:
    yield "h100-70b-tp4: first tokens within 1 s + twice the prompt's time, others within 40 ms"
    yield f"at most {MOST} workers; rules over requests or utilisation reckon with {SLOTS} a worker"
    yield "start-ups are lognormal, p90 a third above the median, one seed for all arms"


def _verdict(made: Sequence[Table]) -> Iterator[str]:
    ours = [one for one in made if _OURS in one.arms]
    both = [one for one in ours if _THEIRS in one.arms]
    won = sum(one.wins(_OURS, _THEIRS) for one in both)
    failed = sum(int(one.arms[_OURS]["failed"]) for one in ours)
    yield f"- Requests failed with pdserve: {failed} in {len(ours)} cells (duty: 0)."
    yield (
        f"- As much attainment as Dynamo's rule at no more worker-hours: {won} of {len(both)} "
        "cells (aim: 80%)."
    )
    for one in ours:
        if one.best:
            yield _against_best(one)
        first = one.arms[_OURS]["first"]
        if LOADS[one.load].step:
            said = "no start" if first is None else f"first start {first:g} s after the step"
            yield f"- {one.load}: {said} (aim: {_SOON:g} s)."
    yield ""
    yield "Losing cells: an arm keeps as much as pdserve at no higher cost."
    yield ""
    yield from list(_lost(ours)) or ["- none"]


def _against_best(one: Table) -> str:
    share = one.arms[_OURS]["good"] / one.arms[one.best]["good"]
    hours = one.hours(_OURS) / one.hours(one.best)
    kept = share >= _OF_BEST and hours <= _HOURS
    return (
        f"- {one.load}: {share:.1%} of the attainment of {one.best}, the best fixed size, at "
        f"{hours:.0%} of its worker-hours (aim on the day: {_OF_BEST:.0%} at {_HOURS:.0%}; "
        f"{'reached' if kept else 'not reached'})."
    )


def _lost(ours: Sequence[Table]) -> Iterator[str]:
    for one in ours:
        for arm in one.arms:
            if arm not in (_OURS, "clairvoyant") and one.wins(arm, _OURS):
                yield (
                    f"- {one.load}, start-up {one.start_up:g} s: {arm} "
                    f"{one.arms[arm]['good']:.1%} at {one.hours(arm):.2f} h, pdserve "
                    f"{one.arms[_OURS]['good']:.1%} at {one.hours(_OURS):.2f} h"
                )


def _section(one: Table) -> Iterator[str]:
    yield f"## {one.load.capitalize()}, start-up {one.start_up:g} s"
    yield ""
    yield f"Load in units of what one worker carries: {LOADS[one.load].about}."
    yield ""
    yield _row(
        *("arm", "attainment", "worker-hours", "of static best", "failed", "starts", "removed"),
        *("first start after the step s", "TTFT p90 s", "TPOT p90 ms"),
    )
    yield _row("---", *["---:"] * 9)
    for arm in sorted(one.arms, key=_place):
        yield _line(one, arm)
    log = one.arms.get(_OURS, {}).get("log", [])
    changes = [line for line in log if " (was " in line or "removed" in line or "drain" in line]
    if changes:
        yield ""
        yield "First decisions of pdserve:"
        yield ""
        yield from (f"- {line}" for line in changes[:_REMOVED_LINES])


def _place(arm: str) -> tuple[int, str]:
    return (-1, arm) if _is_static(arm) else (ARMS.index(arm), "")


def _line(one: Table, arm: str) -> str:
    numbers = one.arms[arm]
    marks = [
        *(["best by hindsight"] if arm == one.best else []),
        *(["for the mean"] if arm == f"static {static_mean(one.load)}" else []),
    ]
    first, named = numbers["first"], f" ({', '.join(marks)})" if marks else ""
    return _row(
        f"{arm}{named}",
        f"{numbers['good']:.1%}",
        f"{one.hours(arm):.2f}",
        f"{one.hours(arm) / one.hours(one.best):.0%}" if one.best else "",
        f"{numbers['failed']}",
        f"{numbers['starts']}",
        f"{numbers['removed']}",
        "" if first is None else f"{first:g}",
        f"{numbers['ttft']['p90']:.2f}",
        f"{1000 * numbers['itl']['p90']:.1f}",
    )


def _missing(found: Mapping[Cell, Numbers], planned: Sequence[Cell]) -> Iterator[str]:
    left: dict[str, list[str]] = {}
    for cell in planned:
        if cell not in found:
            left.setdefault(f"{cell.load}, start-up {cell.start_up:g} s", []).append(cell.arm)
    for name, arms in left.items():
        yield f"- {name}: {', '.join(dict.fromkeys(arms))}"
    yield "- the public traces (Mooncake conversation, Azure code), and pools of two modes"


def _row(*values: str) -> str:
    return f"| {' | '.join(values)} |"
