"""Writes the grid's page. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from bench.disagg_grid.cells import ABLATIONS, KINDS, Scale, World, arms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.disagg_grid.runner import Result

__all__ = ["Findings", "page"]

_AIM: Final = 0.95
_PAYS: Final = 0.01
"""A smaller difference counts as noise."""


@dataclass(frozen=True, slots=True)
class Findings:
    """All measurements."""

    scale: Scale
    knees: dict[str, float]
    """Requests per second by preset."""
    results: dict[tuple[World, str], list[Result]]
    """Results by world and arm, in order of seeds. Arms that move nothing have only the first
    network."""
    ablated: dict[tuple[World, str, str], list[Result]]
    """Results by world, arm and the term that was left out."""
    reasons: dict[str, str]
    """Reasons of lost cells, by what these cells have in common."""
    cpu_seconds: float

    def at(self, world: World, arm: str, *path: str) -> float:
        """The median over seeds."""
        if _moves_nothing(arm):
            world = World(world.kind, world.load, self.scale.bandwidths[0])
        return median(dig(result, path) for result in self.results[world, arm])


@dataclass(frozen=True, slots=True)
class Cell:
    """`predict` against both sides, in one world at one ratio."""

    world: World
    ratio: str
    predict: float
    always: float
    never: float
    aggregated: float

    @property
    def share(self) -> float:
        """Goodput of `predict` as a share of the better side: aggregated workers or `always`."""
        better = max(self.always, self.aggregated)
        return self.predict / better if better else 1.0

    @property
    def of_choice(self) -> float:
        """Goodput of `predict` as a share of the better of the arms that this cluster could have
        chosen."""
        better = max(self.always, self.never)
        return self.predict / better if better else 1.0

    @property
    def words(self) -> str:
        world = self.world
        return f"{world.kind.preset}, {rate_of(world)}, load {world.load:g}, {self.ratio}"


def dig(result: Result, path: Sequence[str]) -> float:
    """A number in nested dicts."""
    found = result
    for key in path:
        found = found[key]
    return float(found)  # type: ignore[arg-type]


def _moves_nothing(arm: str) -> bool:
    return arm == "aggregated" or arm.endswith("never")


def rate_of(world: World) -> str:
    """The network's speed, in the usual words."""
    return f"{world.bandwidth / 1e9:g} GB/s"


def cells(findings: Findings) -> list[Cell]:
    """All cells."""
    found = []
    for world, ratio in worlds(findings):
        choices = ("predict", "always", "never")
        names = (*(f"{ratio} {choice}" for choice in choices), "aggregated")
        predict, always, never, aggregated = (findings.at(world, arm, "good") for arm in names)
        found.append(Cell(world, ratio, predict, always, never, aggregated))
    return found


def worlds(findings: Findings) -> Iterator[tuple[World, str]]:
    scale = findings.scale
    ratios = dict.fromkeys(arm.name.split()[0] for arm in arms(scale))
    for kind in KINDS:
        for bandwidth in scale.bandwidths:
            for load in scale.loads:
                for ratio in ratios:
                    yield World(kind, load, bandwidth), ratio


def page(findings: Findings, facts: Sequence[str], how: Sequence[str]) -> str:
    """The whole page."""
    sections = [
        ["# Prefill and decode on different workers, in simulation", "", *how, ""],
        [f"- {fact}" for fact in facts],
        list(_verdict(findings)),
        ["## Good requests: the conditional choice and both sides", "", *_goodput(findings)],
        ["## First tokens and pace", "", *_latencies(findings)],
        ["## The router's terms", "", *_ablation(findings)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _verdict(findings: Findings) -> Iterator[str]:
    all_cells = cells(findings)
    lost = [cell for cell in all_cells if cell.share < _AIM]
    pays = [c for c in all_cells if c.predict > c.aggregated + _PAYS]
    hurts = [c for c in all_cells if c.predict < c.aggregated - _PAYS]
    blind = [c for c in all_cells if c.always < c.aggregated - _PAYS]
    yield "## What it says"
    yield ""
    yield (
        f"`predict` serves at least {_AIM:.0%} of what the better of both sides (all workers "
        f"aggregated; always disaggregated at the same ratio) serves well in "
        f"{len(all_cells) - len(lost)} of {len(all_cells)} cells."
    )
    yield (
        f"Against aggregated workers it serves more requests well in {len(pays)} cells, fewer in "
        f"{len(hurts)}, and as many (within {_PAYS:.0%}) in the others. Always to disaggregate "
        f"serves fewer than aggregated workers in {len(blind)}: there it does not pay."
    )
    chosen = [cell for cell in all_cells if cell.of_choice >= _AIM]
    yield (
        f"Of the two that a decode worker can choose between, all elsewhere (`always`) and all "
        f"here (`never`), it serves at least {_AIM:.0%} of the better in {len(chosen)} cells."
    )
    if not lost:
        return
    yield ""
    yield f"Below {_AIM:.0%} of the better side:"
    yield ""
    for cell in lost:
        side = "aggregated" if cell.aggregated >= cell.always else "always"
        better = max(cell.aggregated, cell.always)
        yield (
            f"- {cell.words}: {cell.predict:.1%} good, {side} {better:.1%}; `always` there "
            f"{cell.always:.1%}, `never` {cell.never:.1%}"
        )
    for words, why in findings.reasons.items():
        yield ""
        yield f"**{words}** {why}"


def _goodput(findings: Findings) -> Iterator[str]:
    yield _row(
        *("preset", "network", "load", "P:D", "aggregated", "always", "never", "predict"),
        *("of the better side", "of the better choice", "remote", "against aggregated"),
    )
    yield _row("---", "---:", "---:", "---", *["---:"] * 7, "---")
    for cell in cells(findings):
        remote = findings.at(cell.world, f"{cell.ratio} predict", "prefills", "remote_share")
        yield _row(
            cell.world.kind.preset,
            rate_of(cell.world),
            f"{cell.world.load:g}",
            cell.ratio,
            f"{cell.aggregated:.1%}",
            f"{cell.always:.1%}",
            f"{cell.never:.1%}",
            f"{cell.predict:.1%}",
            _marked(cell.share),
            _marked(cell.of_choice),
            f"{remote:.0%}",
            _pays(cell),
        )


def _marked(share: float) -> str:
    return f"**{share:.0%}**" if share < _AIM else f"{share:.0%}"


def _pays(cell: Cell) -> str:
    best = max(cell.predict, cell.always)
    if best > cell.aggregated + _PAYS:
        return "disaggregation pays"
    return "does not pay" if best < cell.aggregated - _PAYS else "equal"


def _latencies(findings: Findings) -> Iterator[str]:
    yield "ITL: all times between two tokens of any stream. TPOT: its mean over a stream, which the"
    yield "objective is about."
    yield ""
    yield _row(
        *("preset", "network", "load", "cluster", "TTFT p50 s", "p90", "p99"),
        *("TPOT p90 ms", "ITL p50 ms", "ITL p99", "good", "KV sent s"),
    )
    yield _row("---", "---:", "---:", "---", *["---:"] * 8)
    for world, arm in findings.results:
        yield _row(
            world.kind.preset,
            "" if _moves_nothing(arm) else rate_of(world),
            f"{world.load:g}",
            arm,
            *(f"{findings.at(world, arm, 'ttft', key):.2f}" for key in ("p50", "p90", "p99")),
            f"{1000 * findings.at(world, arm, 'itl', 'p90'):.1f}",
            *(f"{1000 * findings.at(world, arm, 'token_gap', key):.1f}" for key in ("p50", "p99")),
            f"{findings.at(world, arm, 'good'):.1%}",
            f"{findings.at(world, arm, 'transfers', 'seconds'):.1f}",
        )


def _ablation(findings: Findings) -> Iterator[str]:
    yield "`ttft` with single terms off, half of the workers decode workers, fast network. With few"
    yield "seeds a difference of two per cent is noise."
    yield ""
    yield _row(
        *("preset", "load", "cluster", "router", "good", "TTFT p50 s", "p90", "TPOT p90 ms"),
        *("ITL p99 ms", "predicted TTFT / actual, p50"),
    )
    yield _row("---", "---:", "---", "---", *["---:"] * 6)
    for (world, arm, name), results in findings.ablated.items():
        assert name in ABLATIONS

        def at(*path: str, results: list[Result] = results) -> float:
            return median(dig(result, path) for result in results)

        ratios = [one["ratio_p50"] for result in results for one in result["prediction"].values()]
        yield _row(
            world.kind.preset,
            f"{world.load:g}",
            arm,
            name,
            f"{at('good'):.1%}",
            *(f"{at('ttft', key):.3f}" for key in ("p50", "p90")),
            f"{1000 * at('itl', 'p90'):.1f}",
            f"{1000 * at('token_gap', 'p99'):.1f}",
            f"{median(ratios):.2f}" if ratios else "",
        )


def _row(*values: str) -> str:
    return f"| {' | '.join(values)} |"
