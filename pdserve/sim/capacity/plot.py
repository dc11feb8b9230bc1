"""Plots a plan: what share of the requests each cluster keeps, by its price. Needs the extra
`plot`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import ConfigError
from pdserve.sim.replay.plot import check_library

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve.sim.capacity.objective import Objective
    from pdserve.sim.capacity.search import PlanSearch

__all__ = ["draw_plan", "plan_points"]

_MARKS: Final = (("aggregated", "o"), ("prefill + decode", "s"))


def draw_plan(
    search: PlanSearch, objective: Objective, price: float, path: Path, title: str
) -> None:
    """Write a PNG with one picture for each limit. Errors: `ConfigError` if it cannot be
    written."""
    check_library()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    limits = objective.limits
    figure = Figure(figsize=(6.5 * len(limits), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    for axes, name in zip(figure.subplots(1, len(limits), squeeze=False)[0], limits, strict=True):
        _draw_limit(axes, search, objective, price, name)
    try:
        figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"the plot {path} cannot be written: {reason}") from None


def _draw_limit(
    axes: Any, search: PlanSearch, objective: Objective, price: float, name: str
) -> None:
    for split, (label, mark) in enumerate(_MARKS):
        points = list(plan_points(search, name, split=bool(split)))
        if not points:
            continue
        sizes = [size * price for size, _, _ in points]
        shares = [100 * share for _, share, _ in points]
        axes.scatter(sizes, shares, marker=mark, label=label, alpha=0.7)
    wanted = next(part.share for part in objective.parts if name in part.names)
    axes.axhline(100 * wanted, color="grey", linestyle="--", label=f"{100 * wanted:g}% wanted")
    if search.answer is not None:
        axes.axvline(search.answer.size * price, color="green", alpha=0.4, label="answer")
    limit = objective.limits[name]
    axes.set(title=f"{name} within {limit.time:g} s", xlabel="price per hour", ylabel="requests, %")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def plan_points(search: PlanSearch, name: str, *, split: bool) -> Iterator[tuple[int, float, bool]]:
    """(workers, share of the requests that keep the limit, objective kept) of each replay; the
    share is an upper bound for a replay that was ended early."""
    for cell, result in sorted(search.known.items()):
        if bool(cell.shape.prefill) == split:
            yield cell.shape.size, result.kept(name), result.met
