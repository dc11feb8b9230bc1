"""Writes an overview as the few lines at the top of `pdserve status` and `pdserve top`. Pure.

Lines are as narrow as asked for: cells that do not fit go to the next line, and none is cut.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final

from pdserve.cli.console.overview import latency
from pdserve.cli.outputs import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pdserve.cli.console.overview import Overview, Traffic
    from pdserve.ids import Seconds

__all__ = ["as_numbers", "degraded_lines", "head_lines", "milliseconds", "percent", "rate"]

_LABEL: Final = 10
_GAP: Final = "   "
_BAR: Final = 20
_NARROW: Final = 70
_NARROW_BAR: Final = 10


def head_lines(seen: Overview, width: int = 80) -> list[str]:
    """The title, and what happens now."""
    traffic = seen.all
    window = f"last {seen.seconds:.0f} s" if seen.seconds else "now"
    return [
        *_flow("", [_clean(seen.title), f"({window})"], width, gap="  "),
        *_flow(
            "requests",
            [
                f"{rate(traffic.requests)}/s",
                f"errors {rate(traffic.errors)}/s",
                f"running {seen.running}",
                f"waiting {seen.waiting}",
                f"held {seen.held}",
            ],
            width,
        ),
        *_flow(
            "tokens",
            [
                f"in {rate(traffic.input)}/s",
                f"out {rate(traffic.output)}/s",
                f"cached {percent(traffic.cached)}",
            ],
            width,
        ),
        *_flow("TTFT", _quantiles(traffic.ttft), width),
        *_flow("ITL", _quantiles(traffic.itl), width),
        *_flow("KV cache", _kv(seen, width), width),
        *_flow("SLO kept", _slo(traffic), width),
    ]


def degraded_lines(seen: Overview, width: int = 80) -> list[str]:
    """Everything that is degraded, with its remedy, wrapped; empty: nothing is."""
    lines = []
    for node, text in seen.degraded:
        lines += textwrap.wrap(
            f"! {_clean(node)}: {_clean(text)}",
            max(20, width),
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
    return lines


def as_numbers(seen: Overview) -> dict[str, Any]:
    """The overview for programs: seconds, shares and rates per second; None: not known."""
    everything = _numbers(seen.all)
    return {
        "seconds": seen.seconds,
        **everything,
        "running": seen.running,
        "waiting": seen.waiting,
        "held": seen.held,
        "active": seen.active,
        "kv_use": seen.kv_use,
        "models": {name: _numbers(traffic) for name, traffic in seen.models.items()},
    }


def _numbers(traffic: Traffic) -> dict[str, Any]:
    return {
        "requests_per_second": traffic.requests,
        "errors_per_second": traffic.errors,
        "input_tokens_per_second": traffic.input,
        "output_tokens_per_second": traffic.output,
        "cached_share": traffic.cached,
        "ttft_p50": latency(traffic.ttft, 0.5),
        "ttft_p99": latency(traffic.ttft, 0.99),
        "itl_p50": latency(traffic.itl, 0.5),
        "itl_p99": latency(traffic.itl, 0.99),
        "slo_kept": {objective: traffic.kept(objective) for objective in traffic.slo},
    }


def _quantiles(counts: Mapping[float, float]) -> list[str]:
    found = ((name, latency(counts, share)) for name, share in (("p50", 0.5), ("p99", 0.99)))
    return [f"{name} {milliseconds(value)}" for name, value in found]


def _kv(seen: Overview, width: int) -> list[str]:
    used, size = seen.kv_use, _BAR if width >= _NARROW else _NARROW_BAR
    if used is None:
        return ["-"]
    filled = round(size * min(1.0, used))
    bar = f"[{'#' * filled}{'.' * (size - filled)}]"
    return [bar, f"{used:.0%} of {seen.blocks} blocks"]


def _slo(traffic: Traffic) -> list[str]:
    """Shares by objective; empty without objectives."""
    names = {"both": "all", "ttft": "TTFT", "itl": "ITL"}
    return [
        f"{name} {percent(traffic.kept(objective), 1)}"
        for objective, name in names.items()
        if objective in traffic.slo
    ]


def _flow(label: str, cells: Sequence[str], width: int, gap: str = _GAP) -> list[str]:
    """Cells behind a label, on as many lines as they need; no line without cells."""
    if not cells:
        return []
    indent = _LABEL if label else 0
    lines = [label.ljust(indent)]
    empty = True
    for cell in cells:
        room = width - len(lines[-1]) - (0 if empty else len(gap))
        if not empty and len(cell) > room:
            lines.append(" " * indent)
            empty = True
        lines[-1] += cell if empty else gap + cell
        empty = False
    # A title longer than the terminal is wide.
    return [part for line in lines for part in _pieces(line.rstrip(), width)]


def _pieces(line: str, width: int) -> Iterable[str]:
    return [line] if len(line) <= width else textwrap.wrap(line, width) or [""]


def rate(value: float) -> str:
    """A rate with about three digits."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def percent(share: float | None, digits: int = 0) -> str:
    """A share in percent; `-` if there is none."""
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def milliseconds(seconds: Seconds | None) -> str:
    """A latency with about three digits; `-` if there is none."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    if value >= 10_000:
        return f"{seconds:.1f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _clean(text: str) -> str:
    return " ".join(printable(text).split())
