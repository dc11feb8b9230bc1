"""Formats the results of a replay as text, and its progress."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from pdserve.cli.outputs import columns
from pdserve.cli.simulate.planner import scaling_report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Seconds
    from pdserve.sim.replay.config import ReplayConfig, ReplaySlo
    from pdserve.sim.replay.record import ReplayRecord
    from pdserve.sim.replay.run import ReplayResult

__all__ = ["ReplayProgress", "cluster_text", "engine_text", "report", "slo_text"]

_DRAW_EVERY: Final[Seconds] = 0.2
_BAR: Final = 30


class ReplayProgress:
    """One progress line on a terminal's standard error; nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._ended = 0
        self._shown = sys.stderr.isatty()
        self._begin = time.monotonic()
        self._next = 0.0
        self._virtual = 0.0

    def ended(self, record: ReplayRecord, now: Seconds) -> None:
        """Counts one more request that ended, at this virtual time."""
        self._ended += 1
        self._virtual = now
        if self._shown and (moment := time.monotonic()) >= self._next:
            self._next = moment + _DRAW_EVERY
            sys.stderr.write(f"\r{self.line(moment - self._begin)}\x1b[K")
            sys.stderr.flush()

    def line(self, real: Seconds) -> str:
        """The progress after `real` seconds."""
        full = _BAR * self._ended // max(1, self._total)
        pace = self._virtual / max(real, 1e-3)
        return (
            f"[{'#' * full}{'.' * (_BAR - full)}] {self._ended}/{self._total} requests, "
            f"{self._virtual:.0f} s in {real:.0f} s ({pace:.0f}x)"
        )

    @staticmethod
    def clear() -> None:
        """Removes the line."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")

    def close(self) -> None:
        """Prints the final state, below the line if there was one."""
        before = "\r\x1b[K" if self._shown else ""
        sys.stderr.write(f"{before}{self.line(time.monotonic() - self._begin)}\n")


def cluster_text(config: ReplayConfig) -> str:
    """The cluster in a few words: `8 x h200-8b, policy ttft`."""
    parts = [(config.workers, ""), (config.prefill, " prefill"), (config.decode, " decode")]
    workers = " + ".join(f"{count}{word}" for count, word in parts if count)
    return f"{workers} x {engine_text(config)}, policy {config.policy or 'ttft'}"


def engine_text(config: ReplayConfig) -> str:
    """The GPU and model whose times are simulated."""
    return config.engine_options.get("preset") or (
        "h100-8b" if config.engine == "sim" else config.engine
    )


def slo_text(slo: ReplaySlo) -> str:
    """The SLO in a few words."""
    first = [f"{slo.ttft:g} s"] if slo.ttft else []
    first += [f"{slo.cold:g} x its time on an idle worker"] if slo.cold else []
    limits = [] if slo.ttft == math.inf else [f"first token within {' + '.join(first)}"]
    limits += [f"{slo.itl * 1e3:g} ms between tokens"] if slo.itl else []
    return ", ".join(limits) or "completed"


def report(result: ReplayResult, config: ReplayConfig) -> str:
    """The summary as text."""
    numbers = result.summary
    rows: list[tuple[str, ...]] = [("", "mean", "p50", "p90", "p99")]
    for name, key in (("first token, s", "ttft"), ("between tokens, s", "itl")):
        rows.append(_row(name, numbers[key]))
    rows.append(_row("  of single tokens", numbers["token_gap"]))
    rows.append(_row("held by routers, s", numbers["held"]))
    rows.append(_row("in engines, s", numbers["queue"]))
    ended = ", ".join(f"{count} {word}" for word, count in numbers["outcomes"].items() if count)
    through = numbers["throughput"]
    return "\n".join(
        [
            f"{numbers['requests']} requests in {numbers['seconds']:.1f} s: {ended}",
            f"{cluster_text(config)}; good = {slo_text(config.slo)}",
            "",
            *columns(rows),
            "",
            f"good             {numbers['good']:7.1%}   {numbers['goodput']:.3f} requests/s",
            f"from the cache   {numbers['hit_rate']:7.1%}   of the prompt tokens",
            *_sources(numbers["prompt_tokens"], result.workers),
            f"balance          {numbers['balance']:7.3f}   Jain's index of computed tokens",
            f"throughput       {through['requests']:7.3f} requests/s, "
            f"{through['prompt_tokens']:.0f} + {through['output_tokens']:.0f} tokens/s",
            *_handoffs(numbers["prefills"], numbers["transfers"]),
            *_predictions(numbers["prediction"]),
            *(scaling_report(numbers["scaling"]) if "scaling" in numbers else ()),
        ]
    )


def _sources(tokens: dict[str, int], workers: list[dict[str, Any]]) -> Iterator[str]:
    """Where cached tokens were, and how long tiers keep them; nothing without tiers."""
    total = sum(tokens.values()) or 1
    lower = {name: tokens[name] for name in ("host", "disk", "peer") if tokens[name]}
    if lower:
        words = ", ".join(f"{name} {count / total:.1%}" for name, count in lower.items())
        yield f"  on the device  {tokens['device'] / total:7.1%}   {words}"
    for tier in dict.fromkeys(name for worker in workers for name in worker["tiers"]):
        kept = [w["tiers"][tier]["retention"] for w in workers if tier in w["tiers"]]
        if any(kept):
            yield f"  kept by {tier:<4}   {sum(kept) / len(kept):7.0f}   s until eviction"


def _handoffs(prefills: dict[str, Any], transfers: dict[str, Any]) -> Iterator[str]:
    if not prefills["remote"] and not prefills["local"]:
        return
    yield ""
    words = [
        f"{count} {where} ({reason})"
        for where in ("remote", "local")
        for reason, count in prefills[where].items()
    ]
    yield f"prefilled remote {prefills['remote_share']:7.1%}   {', '.join(words)}"
    seconds, size = transfers["seconds"], transfers["bytes"]
    rate = size / seconds / 1e9 if seconds else 0.0
    yield (
        f"KV moved         {size / 1e9:7.1f}   GB in {seconds:.2f} s of sending ({rate:.1f} GB/s), "
        f"{prefills['received_tokens']} tokens"
    )
    yield f"attempts lost    {transfers['attempts_lost']:7d}"


def _predictions(buckets: dict[str, dict[str, float]]) -> Iterator[str]:
    if not buckets:
        return
    yield ""
    rows: list[tuple[str, ...]] = [
        ("predicted / actual TTFT", "count", "p10", "p50", "p90", "median error")
    ]
    for name, one in buckets.items():
        ratios = [f"{one[key]:.2f}" for key in ("ratio_p10", "ratio_p50", "ratio_p90")]
        rows.append((f"{name} tokens", f"{one['count']:.0f}", *ratios, f"{one['error_p50']:.0%}"))
    yield from columns(rows)


def _row(name: str, values: dict[str, float]) -> tuple[str, ...]:
    return (name, *(f"{values[key]:.3f}" for key in ("mean", "p50", "p90", "p99")))
