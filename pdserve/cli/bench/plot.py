"""Plots a run: latency distributions, and throughput over time. Needs the extra `plot`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from pdserve.cli.bench.record import BenchRecord
    from pdserve.ids import Seconds

__all__ = ["draw", "timeline"]

_WINDOWS: Final = 60


def draw(records: Sequence[BenchRecord], path: Path, title: str) -> None:
    """Writes a PNG. Errors: `ConfigError` if the file cannot be written."""
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
        axes.xaxis.set_major_formatter(_milliseconds)
        axes.xaxis.set_minor_formatter(_milliseconds)
        axes.tick_params(axis="x", which="both", labelsize=7)
    axes.set_ylim(0, 1)
    axes.grid(visible=True, alpha=0.3)


def _milliseconds(value: float, position: object = None) -> str:
    """A label of a logarithmic axis: 20, not 2 x 10^1; only 1, 2 and 5 of a decade are labelled."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""


def _load(axes: Any, records: Sequence[BenchRecord]) -> None:
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


def timeline(records: Sequence[BenchRecord]) -> list[tuple[Seconds, float, float]]:
    """(time, output tokens per second, requests in flight), in equal windows.

    A token counts in the window in which it arrived. In an answer without token times all tokens
    count at its end.
    """
    end = max((record.ended or record.sent for record in records), default=0.0)
    width = end / _WINDOWS or 1.0
    tokens, flight = [0.0] * _WINDOWS, [0.0] * _WINDOWS
    for record in records:
        ended = record.ended if record.ended is not None else end
        for at, count in _arrived(record, ended):
            tokens[min(_WINDOWS - 1, int(at / width))] += count
        for window in range(int(record.sent / width), min(_WINDOWS, int(ended / width) + 1)):
            overlap = min(ended, (window + 1) * width) - max(record.sent, window * width)
            flight[window] += max(0.0, overlap) / width
    return [((i + 0.5) * width, tokens[i] / width, flight[i]) for i in range(_WINDOWS)]


def _arrived(record: BenchRecord, ended: Seconds) -> Iterator[tuple[Seconds, float]]:
    """(time, tokens) pairs of one answer."""
    at = record.first
    if at is None or not record.seen:
        yield ended, record.output_tokens
        return
    scale = record.output_tokens / record.seen
    # These tokens came with the first chunk.
    yield at, scale * (record.seen - len(record.gaps))
    for gap in record.gaps:
        at += gap
        yield at, scale
