"""Writes the grid's page. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bench.policy_grid.cells import (
    ABLATIONS,
    BEYOND,
    KV_LOAD,
    RIVALS,
    TTFT,
    Arm,
    Scale,
    World,
    few_worlds,
)
from bench.policy_grid.compare import Difference, difference, mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.policy_grid.runner import Result

__all__ = ["Findings", "page"]

_ALLOWED: Final = -0.03
"""Lowest allowed relative difference of the goodput of `ttft` to that of another policy."""
_NEAR: Final = (1.0,)
"""Loads that count as near saturation."""

_LOST_ELSEWHERE: Final = (
    "- `unique` prompts (`simulate --generate unique`) are no cell of it, and `ttft` loses them: "
    "measured apart, with 8 seeds at 160 requests/s, 95.3 % good against 97.6 % of `mooncake` "
    "(paired -2.3 %, 95 %: -3.6 to -1.0); at 120/s its mean time to first token is 9 to 16 % "
    "longer. `shared-prefix` at 80/s is the opposite: `ttft` 92 to 96 %, `mooncake` 23 %, `sticky` "
    "20 %."
)
_OF_ONE_FORM: Final = (
    "- The world's time model and the predictor have the same form; a worker's slowness is the "
    "predictor's own factor; the noise is independent per step, so that a prompt of eight steps "
    "sees about a third of it."
)


@dataclass(frozen=True, slots=True)
class Findings:
    """All measurements."""

    scale: Scale
    knees: dict[str, float]
    """Knees by preset, as multiples of the trace's own speed."""
    tuned: Arm
    tuning: list[tuple[Arm, float, float]]
    """(candidate, share of good requests, mean time to first token) on the first half."""
    results: dict[tuple[World, str], list[Result]]
    """Results by world and arm, in order of seeds."""
    cpu_seconds: float

    def has(self, world: World, arm: Arm) -> bool:
        return (world, arm.name) in self.results

    def values(self, world: World, arm: Arm, read: Callable[[Result], float]) -> list[float]:
        return [read(result) for result in self.results[world, arm.name]]

    def compare(self, world: World, rival: Arm, read: Callable[[Result], float]) -> Difference:
        """Compares `ttft` with another policy."""
        return difference(self.values(world, TTFT, read), self.values(world, rival, read))

    @property
    def worlds(self) -> list[World]:
        """The worlds in which `ttft` ran."""
        return [world for world, arm in self.results if arm == TTFT.name]


def good(result: Result) -> float:
    """Share of good requests. At one load it is goodput in another unit."""
    return float(result["good"])


def first(result: Result) -> float:
    """Mean time to first token."""
    return float(result["ttft"]["mean"])


def page(findings: Findings, facts: Sequence[str], how: Sequence[str]) -> str:
    """The whole page."""
    sections = [
        ["# Routing policies in simulation", "", *how, "", *(f"- {fact}" for fact in facts)],
        _verdict(findings),
        ["## Against tuned `kv_load`, cell by cell", "", *_grid(findings)],
        ["## All policies", "", *_all_policies(findings)],
        ["## What each part of `ttft` is worth", "", *_ablations(findings)],
        ["## How good predictions are", "", *_predictions(findings)],
        ["## How `kv_load` was tuned", "", *_tuning(findings)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def rivals_in(findings: Findings, world: World) -> list[Arm]:
    arms = (findings.tuned, KV_LOAD, *RIVALS)
    return [arm for arm in arms if findings.has(world, arm)]


def _verdict(findings: Findings) -> list[str]:
    worlds = findings.worlds
    words: list[str] = []
    lost: list[str] = []
    worst = 0.0
    for world in worlds:
        found = {arm.name: findings.compare(world, arm, good) for arm in rivals_in(findings, world)}
        worst = min([worst, *(one.mean for one in found.values())])
        losing = [name for name, one in found.items() if one.word == "worse"]
        words.append("lost" if losing else "held")
        lost += [
            f"- {world.words}: {name} has {-found[name].mean:.1%} more "
            f"({-found[name].high:.1%} to {-found[name].low:.1%})"
            for name in losing
        ]
    held = words.count("held") / max(1, len(words))
    near = [world for world in worlds if world.load in _NEAR]
    gains = [-findings.compare(world, findings.tuned, first).mean for world in near]
    return [
        "## In short",
        "",
        f"- `ttft` is best or statistically equal in goodput in {held:.0%} of {len(words)} cells "
        "(aim: 90 %)",
        f"- its largest deficit in a cell is {-worst:.1%} (aim: at most {-_ALLOWED:.0%})",
        f"- its mean time to first token at load 1 is {mean(gains):.0%} shorter than that of tuned "
        f"`kv_load` (aim: 15 %); by cell {min(gains, default=0):.0%} "
        f"to {max(gains, default=0):.0%}",
        "",
        "Cells that it loses:" if lost else "It loses no cell.",
        *([""] if lost else []),
        *lost,
        "",
        "What the grid does not show:",
        "",
        *_not_shown(findings),
    ]


def _not_shown(findings: Findings) -> Iterator[str]:
    """The limits of the verdict, which a reader must know."""
    worlds, scale = findings.worlds, findings.scale
    rivals = [{arm.policy for arm in rivals_in(findings, world)} for world in worlds]
    alone = rivals.count({"kv_load"})
    presets = [world.preset for world in worlds]
    most = max(map(presets.count, presets), default=0)
    yield (
        f"- In {alone} of the {len(worlds)} cells `kv_load` is the only rival. The others run in a "
        "few cells, with their defaults: see *All policies*."
    )
    if ties := _ties(findings):
        names = ", ".join(ties)
        yield f"- Where they ran, these tie with `ttft` in goodput at every load: {names}."
    yield _LOST_ELSEWHERE
    yield (
        f"- One trace, {scale.requests} requests a replay, cold caches, one preset in {most} of "
        f"{len(worlds)} cells."
    )
    yield _OF_ONE_FORM


def _ties(findings: Findings) -> list[str]:
    """Other policies of the few worlds that are equal to `ttft` in all of them."""
    few = [world for world in few_worlds(findings.scale) if findings.has(world, TTFT)]
    return [
        f"`{arm.name}`"
        for arm in RIVALS
        if any(findings.has(world, arm) for world in few)
        and all(
            findings.compare(world, arm, good).word == "equal"
            for world in few
            if findings.has(world, arm)
        )
    ]


def _grid(findings: Findings) -> Iterator[str]:
    yield _row(
        "cell",
        "good, ttft",
        "kv_load",
        "difference (95 %)",
        "",
        "mean TTFT s, ttft",
        "kv_load",
        "difference (95 %)",
    )
    yield _row("---", *["---:"] * 3, "---", *["---:"] * 3)
    for world in findings.worlds:
        tuned = findings.tuned
        goods, firsts = (findings.compare(world, tuned, read) for read in (good, first))
        yield _row(
            world.words,
            f"{mean(findings.values(world, TTFT, good)):.1%}",
            f"{mean(findings.values(world, tuned, good)):.1%}",
            _spread(goods),
            goods.word,
            f"{mean(findings.values(world, TTFT, first)):.2f}",
            f"{mean(findings.values(world, tuned, first)):.2f}",
            _spread(firsts),
        )


def _all_policies(findings: Findings) -> Iterator[str]:
    yield "Requests of this trace name no session, so that `session` is `least_loaded`."
    yield ""
    yield _row(
        *("load", "policy", "good", "goodput/s", "TTFT mean", "p50", "p90", "p99"),
        *("ITL p50 ms", "p99 ms", "hits", "balance", "`ttft` against it"),
    )
    yield _row("---:", "---", *["---:"] * 10, "---")
    for world in few_worlds(findings.scale):
        arms = [arm for arm in (TTFT, *rivals_in(findings, world)) if findings.has(world, arm)]
        arms.sort(key=lambda arm: -mean(findings.values(world, arm, good)))
        for arm in arms:
            yield _one(findings, world, arm)


def _one(findings: Findings, world: World, arm: Arm) -> str:
    def at(*path: str) -> float:
        return mean(findings.values(world, arm, lambda result: _dig(result, path)))

    against = "" if arm == TTFT else findings.compare(world, arm, good)
    return _row(
        f"{world.load:g}",
        f"**{arm.name}**" if arm == TTFT else arm.name,
        f"{at('good'):.1%}",
        f"{at('goodput'):.2f}",
        *(f"{at('ttft', key):.2f}" for key in ("mean", "p50", "p90", "p99")),
        *(f"{1000 * at('itl', key):.0f}" for key in ("p50", "p99")),
        f"{at('hit_rate'):.1%}",
        f"{at('balance'):.2f}",
        against if isinstance(against, str) else f"{_spread(against)} {against.word}",
    )


def _ablations(findings: Findings) -> Iterator[str]:
    for load in (1.0, BEYOND):
        yield from _ablated(findings, World(load=load))


def _ablated(findings: Findings, world: World) -> Iterator[str]:
    if not findings.has(world, TTFT):
        return
    yield f"At load {world.load:g}, jittered, equal workers, one router; differences to the whole."
    yield ""
    yield _row("arm", "good", "difference (95 %)", "mean TTFT s", "difference (95 %)", "hits")
    yield _row("---", *["---:"] * 5)
    for arm in (TTFT, *ABLATIONS):
        if not findings.has(world, arm):
            continue
        base = findings.tuned if arm.policy == "kv_load" else TTFT
        base = KV_LOAD if arm.policy == "kv_load" and findings.has(world, KV_LOAD) else base
        goods, firsts = (
            difference(findings.values(world, arm, read), findings.values(world, base, read))
            for read in (good, first)
        )
        hits = mean(findings.values(world, arm, lambda result: float(result["hit_rate"])))
        yield _row(
            arm.name,
            f"{mean(findings.values(world, arm, good)):.1%}",
            "" if arm == TTFT else _spread(goods),
            f"{mean(findings.values(world, arm, first)):.2f}",
            "" if arm == TTFT else _spread(firsts),
            f"{hits:.1%}",
        )
    yield ""


def _predictions(findings: Findings) -> Iterator[str]:
    yield "Of `ttft`, predicted over actual time to first token, by uncached tokens of the prompt;"
    yield "means over seeds of each run's quantiles, the time in which everything was still to be"
    yield "learnt included."
    yield ""
    yield _row("load", "workers", "uncached", "p10", "p50", "p90", "median error", "p90 error")
    yield _row("---:", "---", "---", *["---:"] * 5)
    for slow in (False, True):
        for load in findings.scale.few_loads:
            world = World(load=load, slow=slow)
            if findings.has(world, TTFT):
                yield from _buckets(findings, world)


def _buckets(findings: Findings, world: World) -> Iterator[str]:
    results = findings.results[world, TTFT.name]
    names = {name: None for result in results for name in result["prediction"]}
    for name in names:
        having = [r["prediction"][name] for r in results if name in r["prediction"]]
        ratios = [mean([one[key] for one in having]) for key in ("ratio_p10", "ratio_p50")]
        ratios.append(mean([one["ratio_p90"] for one in having]))
        errors = [mean([one[key] for one in having]) for key in ("error_p50", "error_p90")]
        yield _row(
            f"{world.load:g}",
            "a quarter slow" if world.slow else "equal",
            f"{name} tokens",
            *(f"{ratio:.2f}" for ratio in ratios),
            *(f"{error:.0%}" for error in errors),
        )


def _tuning(findings: Findings) -> Iterator[str]:
    yield "On the first half of the trace, mean of loads 0.75 and 1; the first line is in force:"
    yield "most good requests, then the least mean time to first token. One router, jittered, equal"
    yield "workers. The request weight is in blocks, of 512 tokens in this trace; blocks of"
    yield "sequences that decode count for each of them, shared or not."
    if edges := _edges(findings.tuning[0][0], [arm for arm, _, _ in findings.tuning]):
        yield f"On the edge of what was tried: {', '.join(edges)}; more may be better."
    yield ""
    yield _row("credit / decay / request weight / temperature", "good", "mean TTFT s")
    yield _row("---", "---:", "---:")
    for arm, share, seconds in findings.tuning:
        yield _row(arm.name.removeprefix("kv_load "), f"{share:.2%}", f"{seconds:.3f}")


def _edges(best: Arm, tried: Sequence[Arm]) -> list[str]:
    """Settings of the best arm that are the largest tried values beside its other settings."""
    found = []
    for name, value in best.options.items():
        rest = {**best.options, name: ""}
        values = {float(arm.options[name]) for arm in tried if {**arm.options, name: ""} == rest}
        if len(values) > 1 and float(value) == max(values):
            found.append(f"`{name}` {value}")
    return found


def _dig(result: Any, path: Sequence[str]) -> float:
    for key in path:
        result = result[key]
    return float(result)


def _spread(one: Difference) -> str:
    return f"{one.mean:+.1%} ({one.low:+.1%} to {one.high:+.1%})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
