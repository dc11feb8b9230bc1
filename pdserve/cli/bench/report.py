"""Formats the results of a run as text, or of two runs side by side. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.cli.bench.summary import result_warnings
from pdserve.cli.outputs import columns, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.cli.bench.record import BenchRecord

__all__ = ["comparison", "record_as_json", "report"]

_COLUMNS: Final = ("mean", "p50", "p90", "p95", "p99", "max")
_SHOWN: Final = 300
"""Most characters of an error's message."""
_TIMES: Final = (
    ("first token, ms", "ttft"),
    ("between tokens, ms", "itl"),
    ("  mean of a request", "tpot"),
    ("whole answer, ms", "e2e"),
)


def report(numbers: dict[str, Any]) -> str:
    """The report, which fits on one screen."""
    times = ["", *_table(numbers)] if numbers["completed"] else []
    return "\n".join([*_heads(numbers), *times, "", *_tails(numbers)])


def _heads(numbers: dict[str, Any]) -> Iterator[str]:
    end = ", interrupted" if numbers["interrupted"] else ""
    yield (
        f"{numbers['completed']} of {numbers['requests']} requests answered in "
        f"{numbers['seconds']:.2f} s{end}"
    )
    for kind, count in sorted(numbers["errors"].items()):
        why = " ".join(printable(numbers["error_messages"][kind])[:_SHOWN].split())
        yield f"  {count} failed: {printable(kind)}" + (f", such as: {why}" if why else "")


def _table(numbers: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [("", *_COLUMNS)]
    for name, key in _TIMES:
        if values := numbers[key]:
            rows.append((name, *(f"{values[column] * 1e3:.2f}" for column in _COLUMNS)))
    return columns(rows)


def _tails(numbers: dict[str, Any]) -> Iterator[str]:
    yield (
        f"throughput    {numbers['requests_per_second']:.2f} requests/s, "
        f"{numbers['output_tokens_per_second']:.1f} output tokens/s"
    )
    prompt, output = numbers["prompt_tokens"], numbers["output_tokens"]
    yield f"tokens        {prompt} of prompts, {output} of answers"
    if numbers["cached_tokens"]:
        share = numbers["cached_tokens"] / max(1, numbers["prompt_tokens"])
        yield f"cached        {numbers['cached_tokens']} prompt tokens ({share:.1%})"
    if numbers["good"] is not None:
        yield (
            f"goodput       {numbers['good']} requests ({numbers['good_share']:.1%}), "
            f"{numbers['goodput']:.2f}/s"
        )
    yield from _limits(numbers.get("slo", {}))
    if numbers["retries"]:
        yield f"retries       {numbers['retries']}"
    if numbers["workers"]:
        counts = ", ".join(f"{printable(name)} {n}" for name, n in numbers["workers"].items())
        yield f"by worker     {counts}"
    if "seed" in numbers:
        yield f"seed          {numbers['seed']}"
    slip, lag = (numbers[key].get("p99", 0.0) * 1e3 for key in ("slip", "lag"))
    yield (
        f"generator     {numbers['cpu_share']:.0%} of a core; sent late by {slip:.2f} ms, "
        f"loop late by {lag:.2f} ms (p99)"
    )
    for warning in result_warnings(numbers):
        yield f"WARNING: {warning}"


def _limits(results: dict[str, Any]) -> Iterator[str]:
    for name, one in results.items():
        line = f"  {name:<12}{one['kept']:.1%} within {one['limit'] * 1e3:g} ms"
        if one["wanted"] is not None:
            line += f", {one['wanted'] * 100:g}% wanted: {'kept' if one['met'] else 'MISSED'}"
        yield line


def record_as_json(record: BenchRecord) -> dict[str, Any]:
    """One request for JSON; times in seconds since the run's start."""
    return {name: getattr(record, name) for name in record.__slots__} | {
        "ttft": record.ttft,
        "tpot": record.tpot,
        "e2e": record.e2e,
    }


def comparison(names: Sequence[str], first: dict[str, Any], second: dict[str, Any]) -> str:
    """The second run's numbers relative to the first's."""
    rows: list[tuple[str, ...]] = [("", *names, "ratio")]
    for key in ("requests_per_second", "output_tokens_per_second", "goodput", "completed"):
        rows += _ratio(key.replace("_", " "), first.get(key), second.get(key), 1.0)
    for name, key in _TIMES:
        for column in ("p50", "p90", "p99"):
            a, b = (one.get(key, {}).get(column) for one in (first, second))
            rows += _ratio(f"{name.strip()} {column}", a, b, 1e3)
    return "\n".join(columns(rows))


def _ratio(name: str, a: float | None, b: float | None, scale: float) -> Iterator[tuple[str, ...]]:
    if a is None or b is None:
        return
    ratio = f"{b / a:.3f}" if a else "-"
    yield (name, f"{a * scale:.2f}", f"{b * scale:.2f}", ratio)
