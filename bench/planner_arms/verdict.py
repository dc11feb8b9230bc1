"""Says what the comparison shows: aims beside what was reached, and every cell that pdserve loses.
Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

from bench.planner_arms.cells import PLANNERS
from bench.planner_arms.loads import load_of
from bench.planner_arms.tables import OURS, THEIRS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.planner_arms.tables import Table

__all__ = ["row", "verdict"]

_OF_BEST: Final = 0.99
_HOURS: Final = 0.7
_WINS: Final = 0.8
_SOON: Final = 10.0
_FOLLOWED: Final = 60.0
_GAIN: Final = 1.3
_AWAY: Final = 3.0


def row(*values: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(values)} |"


def verdict(made: Sequence[Table]) -> Iterator[str]:
    """Lines of the page's first section."""
    ours = [one for one in made if OURS in one.arms]
    failed = sum(int(one.arms[OURS]["failed"]) for one in ours)
    yield f"- Requests failed with pdserve: {failed} in {len(ours)} cells (duty: 0)."
    for arm, share in PLANNERS.items():
        yield from _beside_dynamo(arm, share, made)
    for one in ours:
        if load_of(one.load).split is not None:
            yield from _switching(one)
    yield from _beside_best([one for one in ours if load_of(one.load).split is None])
    yield from ("", "## Losing cells", "", "An arm keeps as much as pdserve at no higher cost.", "")
    yield from list(_lost(ours)) or ["- none"]


def _beside_dynamo(arm: str, share: float, made: Sequence[Table]) -> Iterator[str]:
    """In how many cells `arm`, which is to keep `share`, is as good and as cheap."""
    both = [one for one in made if arm in one.arms and THEIRS in one.arms]
    if not both:
        return
    won = sum(one.wins(arm, THEIRS) for one in both)
    yield (
        f"- With an objective of {share:.0%}, as much attainment as Dynamo's rule at no more "
        f"worker-hours: {won} of {len(both)} cells, aim {_WINS:.0%} "
        f"({_reached(won >= _WINS * len(both))})."
    )


def _reached(is_so: bool) -> str:
    return "reached" if is_so else "not reached"


def _switching(one: Table) -> Iterator[str]:
    numbers, times = one.arms[OURS], one.followed()
    said = [
        "the ratio stayed" if near is None else f"{near:.0f} s but for one worker, whole {at:.0f} s"
        for near, at in times
    ]
    in_time = all(at is not None and at <= _FOLLOWED for _, at in times) and not numbers["starts"]
    yield (
        f"- {one.words}: after each shift the ratio that it kept came in {'; '.join(said)}, with "
        f"{numbers['starts']} starts; aim {_FOLLOWED:g} s by switches alone "
        f"({_reached(in_time)})."
    )
    if one.best:
        gain = one.good(OURS) / one.good(one.best)
        yield (
            f"- {one.words}: {gain:.2f} times the good requests of {one.best}, the best fixed "
            f"ratio; aim {_GAIN:g} ({_reached(gain >= _GAIN)}). To keep every request would be "
            f"{1 / one.good(one.best):.2f} times: with a full queue decode workers compute prompts "
            "themselves, which makes up for a wrong ratio."
        )
    if away := numbers["switches"]:
        middle = median(away)
        yield (
            f"- {one.words}: {len(away)} switches kept their workers out of service for "
            f"{middle:.1f} s (p50), at most {max(away):.1f} s; aim {_AWAY:g} s "
            f"({_reached(middle <= _AWAY)})."
        )


def _beside_best(ours: Sequence[Table]) -> Iterator[str]:
    """pdserve beside the best fixed size."""
    known = [one for one in ours if one.best]
    if not known:
        return
    yield ""
    yield (
        f"pdserve beside the fixed size that is best by hindsight. Aims: on the day {_OF_BEST:.0%} "
        f"of its attainment at {_HOURS:.0%} of its worker-hours; a first start {_SOON:g} s after a "
        "step at the latest."
    )
    yield ""
    yield row("load", "start-up s", "seed", "best", "of its attainment", "of its hours", "first")
    yield row("---", "---:", "---:", "---", "---:", "---:", "---:")
    yield from map(_line, known)


def _line(one: Table) -> str:
    first = one.arms[OURS]["first"]
    return row(
        one.load,
        f"{one.start_up:g}",
        f"{one.seed}",
        one.best,
        f"{one.good(OURS) / one.good(one.best):.1%}",
        f"{one.hours(OURS) / one.hours(one.best):.0%}",
        "" if first is None else f"{first:.1f} s",
    )


def _lost(ours: Sequence[Table]) -> Iterator[str]:
    for one in ours:
        better = [
            f"{arm} {one.good(arm):.1%} at {one.hours(arm):.2f} h"
            for arm in one.arms
            if arm not in (*PLANNERS, "clairvoyant") and one.wins(arm, OURS)
        ]
        if better:
            yield (
                f"- {one.words}, pdserve {one.good(OURS):.1%} at {one.hours(OURS):.2f} h: "
                f"{'; '.join(better)}"
            )
