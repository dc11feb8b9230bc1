"""Writes the page of the comparison of tiers. Pure.

Cells that were not run are no rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import bench.policy_grid.losses
import bench.policy_grid.tiers
from bench.policy_grid.compare import mean
from bench.policy_grid.losses import CAUSES
from bench.policy_grid.report import first, good
from bench.policy_grid.tiers import LOADS, NO_TIERS, ROWS
from pdserve.sim.workloads.mooncake import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.policy_grid.runner import Result
    from bench.policy_grid.tiers import TierFindings

__all__ = ["tiers_page"]

_COLUMNS: Final = (
    *("row", "good", "found", "device", "host", "peer", "computed, M"),
    *("TTFT mean, s", "p50", "p99", "mean, to no tiers"),
)
_SOURCES: Final = ("device", "host", "peer")


def tiers_page(findings: TierFindings, about: Sequence[str]) -> str:
    """The whole page."""
    missing = [
        f"{arm.name} at {load:g}"
        for load in LOADS
        for arm in ROWS
        if (load, arm.name) not in findings.results
    ]
    lines = [*_head(findings, about), *([f"- not run: {', '.join(missing)}"] if missing else [])]
    for load in sorted({load for load, _ in findings.results}):
        lines += ["", f"## Load {load:g}", "", *_table(findings, load)]
        lines += ["", "Tokens not found, in points of all prompt tokens:", ""]
        lines += _loss_table(findings, load)
    lines += ["", "## Why tokens are computed again", "", *_explained()]
    lines += ["", "## What became of blocks that were known elsewhere", "", *_outcomes(findings)]
    return "\n".join(lines) + "\n"


def _head(findings: TierFindings, about: Sequence[str]) -> list[str]:
    scale = findings.scale
    count = f"the first {scale.requests}" if scale.requests else "all"
    cold, warm = findings.idle
    return [
        "# Tiers and routing in simulation",
        "",
        "Repeat with `python bench/policies.py --trace conversation_trace.jsonl --tiers`.",
        "",
        *(bench.policy_grid.tiers.__doc__ or "").split("\n\n", 2)[2].strip().split("\n"),
        "",
        *(f"- {fact}" for fact in about),
        f"- {count} requests of Mooncake's conversation trace, with 3 s of jitter; "
        f"{scale.seeds} seed(s)",
        f"- load 1 is the trace at {findings.knee:g}x",
        f"- one LRU pool of all devices and hosts, requests one after the other, would find "
        f"{findings.atomic:.1%} of the prompt tokens",
        f"- a prefill on an idle worker takes {cold:.3f} s in the mean with an empty cache, and "
        f"{warm:.3f} s if all that earlier prompts had were cached and came at once: "
        f"{warm / cold - 1 if cold else 0:+.1%}",
        f"- {findings.cpu_seconds / 60:.0f} minutes of CPU",
    ]


def _rows(findings: TierFindings, load: float) -> Iterator[tuple[str, Sequence[Result]]]:
    for arm in ROWS:
        results = findings.results.get((load, arm.name))
        if results:
            yield arm.name, results


def _table(findings: TierFindings, load: float) -> Iterator[str]:
    yield from _header(_COLUMNS)
    base = mean([first(one) for one in findings.results.get((load, NO_TIERS.name), ())])
    for name, results in _rows(findings, load):
        shares = [_mean(results, _share(source)) for source in _SOURCES]
        times = [_mean(results, _ttft(key)) for key in ("mean", "p50", "p99")]
        computed = _mean(results, lambda one: one["prompt_tokens"]["computed"]) / 1e6
        yield _line(
            name,
            f"{_mean(results, good):.1%}",
            f"{sum(shares):.1%}",
            *(f"{share:.1%}" for share in shares),
            f"{computed:.1f}",
            *(f"{value:.3f}" for value in times),
            f"{times[0] / base - 1:+.1%}" if base else "",
        )


def _loss_table(findings: TierFindings, load: float) -> Iterator[str]:
    yield from _header(("row", "found", "atomic", "gap", *CAUSES, "atomic: elsewhere", "evicted"))
    for name, results in _rows(findings, load):
        real = [_points(results, "losses", what) for what in ("found", *CAUSES)]
        atomic = [_points(results, "atomic", what) for what in ("found", "elsewhere", "evicted")]
        values = [real[0], atomic[0], atomic[0] - real[0], *real[1:], *atomic[1:]]
        yield _line(name, *(f"{round(value, 1) + 0.0:.1f}" for value in values))


def _explained() -> Iterator[str]:
    yield from (bench.policy_grid.losses.__doc__ or "").split("\n\n", 1)[1].strip().split("\n")
    yield from (
        "",
        "*Atomic* is the same cluster if requests take no time, one after the other. A policy",
        "that looks at prefixes goes there to the worker with most of the prompt, among those",
        "that have served at most a tenth more than the mean. The gap is the sum of the causes,",
        "less those of the atomic figure.",
    )


def _outcomes(findings: TierFindings) -> Iterator[str]:
    """Blocks that engines' onboarders knew of, in points of all prompt tokens."""
    names = sorted(
        {
            name
            for results in findings.results.values()
            for one in results
            for name in one["fetches"]
        }
    )
    yield "Counters of the engines, in points of all prompt tokens. `came`: brought to the device;"
    yield "`computed`: the planner expected that to be sooner; `deadline`: they were late; `busy`:"
    yield "the other worker served too many; `absent`: they were evicted meanwhile."
    yield ""
    yield from _header(("load", "row", *names))
    for load in LOADS:
        for row, results in _rows(findings, load):
            if any(one["fetches"] for one in results):
                values = (_points(results, "fetches", name) for name in names)
                yield _line(f"{load:g}", row, *(f"{value:.2f}" for value in values))


def _points(results: Sequence[Result], group: str, what: str) -> float:
    """A number of blocks as a percentage of all prompt tokens."""
    return _mean(results, lambda one: 100 * BLOCK * one[group].get(what, 0) / _tokens(one))


def _mean(results: Sequence[Result], read: Callable[[Result], float]) -> float:
    return mean([read(one) for one in results])


def _tokens(result: Result) -> int:
    return max(1, int(sum(result["prompt_tokens"].values())))


def _share(source: str) -> Callable[[Result], float]:
    return lambda one: one["prompt_tokens"][source] / _tokens(one)


def _ttft(key: str) -> Callable[[Result], float]:
    return lambda one: float(one["ttft"][key])


def _header(names: Sequence[str]) -> Iterator[str]:
    yield _line(*names)
    yield f"|{'---|' * len(names)}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
