"""Writes the page of the comparison. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.planner_arms.cells import ARMS, LOOSE, MOST, SHARE, SLOTS
from bench.planner_arms.loads import STEADY, load_of
from bench.planner_arms.tables import OURS, is_static, static_mean, tables
from bench.planner_arms.verdict import row, verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.planner_arms.cells import Cell
    from bench.planner_arms.tables import Numbers, Table

__all__ = ["page"]

_DECISIONS: Final = 12


def page(
    found: Mapping[Cell, Numbers],
    planned: Sequence[Cell],
    facts: Sequence[str],
    how: Sequence[str],
) -> str:
    """The whole page."""
    made = tables(found)
    whole = [one for one in made if one.start_up == 60.0 and one.seed == 1]
    sections = [
        ["# The planner beside other rules, in simulation", "", *how],
        [*(f"- {fact}" for fact in facts), *(f"- {fact}" for fact in _world())],
        ["## What it says", "", *verdict(made)],
        *(list(_section(table)) for table in whole),
        list(_others([one for one in made if one not in whole])),
        list(_slots(found)),
        ["## What did not run", "", *(list(_missing(found, planned)) or ["- nothing"])],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _world() -> Iterator[str]:
    yield "h100-70b-tp4: first tokens within 1 s + twice the prompt's time, others within 40 ms"
    yield f"pdserve and clairvoyant are to keep it for {SHARE:.0%} of the requests"
    yield f"*pdserve {LOOSE:.0%}* is to keep it for {LOOSE:.0%}"
    yield f"at most {MOST} workers; rules over requests or utilisation reckon with {SLOTS} a worker"
    yield "start-ups are lognormal, p90 a third above the median, one seed for all arms"
    yield "workers at the beginning have served before; no rule knows anything of the load then"


def _section(one: Table) -> Iterator[str]:
    yield f"## {one.load[:1].upper()}{one.load[1:]}, start-up {one.start_up:g} s"
    yield ""
    yield _about(one.load)
    yield ""
    is_split = load_of(one.load).split is not None
    last = ("switches",) if is_split else ("first start after the step s",)
    yield row(
        *("arm", "attainment", "worker-hours", "of static best", "failed", "starts", "removed"),
        *(*last, "TTFT p90 s", "TPOT p90 ms"),
    )
    yield row("---", *["---:"] * 9)
    for arm in sorted(one.arms, key=_place):
        yield _line(one, arm, is_split=is_split)
    yield from _decisions(one)


def _about(load: str) -> str:
    part = load_of(load).part
    unit = "" if part else "Load in units of what one worker carries: "
    return f"{unit}{load_of(load).about}."


def _decisions(one: Table) -> Iterator[str]:
    log = one.arms.get(OURS, {}).get("log", [])
    changes = [line for line in log if " (was " in line or "removed" in line or "drain" in line]
    if changes:
        yield from ("", "First decisions of pdserve:", "")
        yield from (f"- {line}" for line in changes[:_DECISIONS])


def _place(arm: str) -> tuple[int, str]:
    return (-1, arm) if is_static(arm) else (ARMS.index(arm), "")


def _line(one: Table, arm: str, *, is_split: bool) -> str:
    numbers = one.arms[arm]
    marks = [
        *(["best by hindsight"] if arm == one.best else []),
        *(["for the mean"] if arm == f"static {static_mean(one.load)}" and not is_split else []),
    ]
    named = f" ({', '.join(marks)})" if marks else ""
    first = "" if numbers["first"] is None else f"{numbers['first']:g}"
    return row(
        f"{arm}{named}",
        f"{numbers['good']:.1%}",
        f"{one.hours(arm):.2f}",
        f"{one.hours(arm) / one.hours(one.best):.0%}" if one.best else "",
        f"{numbers['failed']}",
        f"{numbers['starts']}",
        f"{numbers['removed']}",
        f"{len(numbers['switches'])}" if is_split else first,
        f"{numbers['ttft']['p90']:.2f}",
        f"{1000 * numbers['itl']['p90']:.1f}",
    )


def _others(made: Sequence[Table]) -> Iterator[str]:
    """Other start-ups and seeds: attainment and worker-hours only."""
    if not made:
        return
    yield from ("## Other start-ups and seeds", "", "Attainment at worker-hours.", "")
    arms = [arm for arm in ARMS if any(arm in one.arms for one in made)]
    yield row("load", "start-up s", "seed", "static best", *arms)
    yield row("---", "---:", "---:", *["---:"] * (len(arms) + 1))
    for one in made:
        cells = [_short(one, arm) for arm in (one.best, *arms)]
        yield row(one.load, f"{one.start_up:g}", f"{one.seed}", *cells)


def _short(one: Table, arm: str) -> str:
    return f"{one.good(arm):.1%} at {one.hours(arm):.2f}" if arm in one.arms else ""


def _slots(found: Mapping[Cell, Numbers]) -> Iterator[str]:
    steady = {cell: numbers for cell, numbers in found.items() if cell.load in STEADY}
    if not steady:
        return
    yield "## What one worker bears"
    yield ""
    yield f"Constant loads on four workers. Rules over requests reckon with {SLOTS} a worker."
    yield ""
    yield row("load of a worker", "attainment", "requests a worker")
    yield row("---:", "---:", "---:")
    for cell, numbers in steady.items():
        load = cell.load.removeprefix("steady ")
        yield row(load, f"{numbers['good']:.1%}", f"{numbers['in_flight']:.1f}")


def _missing(found: Mapping[Cell, Numbers], planned: Sequence[Cell]) -> Iterator[str]:
    left: dict[str, list[str]] = {}
    for cell in planned:
        if cell not in found:
            where = f"{cell.load}, start-up {cell.start_up:g} s, seed {cell.seed}"
            left.setdefault(where, []).append(cell.arm)
    for name, arms in left.items():
        yield f"- {name}: {', '.join(arms)}"
