"""A run as a picture: distributions of times, and throughput over time. Needs the extra `plot`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pdserve.cli.bench.record import Record
    from pdserve.ids import Seconds

__all__ = ["draw", "timeline"]

_WINDOWS: Final = 60


def draw(records: Sequence[Record], path: Path, title: str) -> None:
    """Write a PNG. Errors: `ConfigError` if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    left, middle, right = figure.subplots(1, 3)
    done = [record for record in records if record.completed]
    _share(left, (one for r in done if (one := r.ttft) is not None), "time to first token")
    _share(middle, (gap for r in done for gap in r.gaps), "between tokens")
    _load(right, records)
    try:
        figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"the plot {path} cannot be written: {reason}") from None


def _share(axes: Any, values: Iterable[Seconds], title: str) -> None:
    times = sorted(value * 1e3 for value in values)
    axes.step(times, [(i + 1) / len(times) for i in range(len(times))], where="post")
    axes.set(title=title, xlabel="milliseconds", ylabel="share")
    if times and times[0] > 0:
        axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.grid(visible=True, alpha=0.3)


def _load(axes: Any, records: Sequence[Record]) -> None:
    points = timeline(records)
    moments = [moment for moment, _, _ in points]
    axes.plot(moments, [rate for _, rate, _ in points], label="output tokens/s")
    axes.set(title="load", xlabel="seconds", ylabel="output tokens/s")
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    other.plot(moments, [flight for _, _, flight in points], color="gray", linewidth=0.8)
    other.set(ylabel="requests in flight (gray)")
    other.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)


def timeline(records: Sequence[Record]) -> list[tuple[Seconds, float, float]]:
    """(moment, output tokens per second of answers that ended then, requests in flight), in equal
    windows."""
    end = max((record.ended or record.sent for record in records), default=0.0)
    width = end / _WINDOWS or 1.0
    tokens, flight = [0.0] * _WINDOWS, [0.0] * _WINDOWS
    for record in records:
        ended = record.ended if record.ended is not None else end
        tokens[min(_WINDOWS - 1, int(ended / width))] += record.output_tokens
        for window in range(int(record.sent / width), min(_WINDOWS, int(ended / width) + 1)):
            overlap = min(ended, (window + 1) * width) - max(record.sent, window * width)
            flight[window] += max(0.0, overlap) / width
    return [((i + 0.5) * width, tokens[i] / width, flight[i]) for i in range(_WINDOWS)]
