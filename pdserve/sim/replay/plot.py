"""Plots a replay: time to first token, load and hit rate. Needs the extra `plot`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pdserve.ids import Seconds
    from pdserve.sim.replay.record import ReplayRecord
    from pdserve.sim.replay.run import ReplayResult

__all__ = ["check_library", "draw", "hit_rates"]

_WINDOWS: Final = 60


def check_library() -> None:
    """Errors: `ConfigError`, with the remedy, if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401  this only tests whether it is installed
    except ImportError:
        raise ConfigError(
            "plots need matplotlib, which is not installed: pip install matplotlib"
        ) from None


def draw(result: ReplayResult, path: Path, title: str) -> None:
    """Write a PNG. Errors: `ConfigError` if it cannot be written."""
    check_library()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    left, middle, right = figure.subplots(1, 3)
    _first_tokens(left, result.records)
    _load(middle, result)
    _hits(right, result.records)
    try:
        figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"the plot {path} cannot be written: {reason}") from None


def _first_tokens(axes: Any, records: Sequence[ReplayRecord]) -> None:
    times = sorted(record.ttft for record in records if record.completed)
    axes.step(times, [(i + 1) / len(times) for i in range(len(times))], where="post")
    axes.set(title="time to first token", xlabel="seconds", ylabel="share of requests")
    if times and times[0] > 0:
        axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.grid(visible=True, alpha=0.3)


def _load(axes: Any, result: ReplayResult) -> None:
    moments = [moment for moment, _ in result.load]
    for worker in range(len(result.workers)):
        axes.plot(moments, [load[worker] for _, load in result.load], linewidth=0.7)
    axes.set(title="requests at each worker", xlabel="seconds", ylabel="requests")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)


def _hits(axes: Any, records: Sequence[ReplayRecord]) -> None:
    points = list(hit_rates(records))
    axes.plot([moment for moment, _ in points], [100 * rate for _, rate in points])
    axes.set(title="prompt tokens from the cache", xlabel="seconds", ylabel="%")
    axes.set_ylim(0, 100)
    axes.grid(visible=True, alpha=0.3)


def hit_rates(records: Sequence[ReplayRecord]) -> Iterator[tuple[Seconds, float]]:
    """(time, share of prompt tokens that came from a cache), by arrival in equal windows."""
    done = [record for record in records if record.completed]
    width = max((record.arrival for record in done), default=0.0) / _WINDOWS or 1.0
    prompt, cached = [0] * (_WINDOWS + 1), [0] * (_WINDOWS + 1)
    for record in done:
        window = int(record.arrival / width)
        prompt[window] += record.prompt_tokens
        cached[window] += record.cached_tokens
    for window, tokens in enumerate(prompt):
        if tokens:
            yield (window + 0.5) * width, cached[window] / tokens
