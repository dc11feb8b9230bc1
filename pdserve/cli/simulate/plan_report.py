"""Formats a capacity plan: the clusters that were replayed, the answer, and what binds it. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pdserve.cli.outputs import columns
from pdserve.launch.config.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.sim.capacity.idle import IdleWorker, TraceFloor
    from pdserve.sim.capacity.objective import Objective, SloLimit
    from pdserve.sim.capacity.search import PlanSearch
    from pdserve.sim.capacity.shapes import ClusterShape
    from pdserve.sim.capacity.trial import TrialPlan, TrialResult
    from pdserve.sim.replay.config import ReplayConfig

__all__ = ["CapacityPlan", "objective_text", "plan_as_json", "plan_report", "unreachable"]

_WORDS: Final = {"ttft": "first token", "itl": "between tokens"}


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """A finished search, and what it was for."""

    plan: TrialPlan
    search: PlanSearch
    idle: IdleWorker
    title: dict[str, Any]
    """Trace, engine and policy, as words."""
    price: float
    """Of a worker and hour."""

    @property
    def title_text(self) -> str:
        """What was replayed, in a line."""
        return (
            f"{self.title['trace']}, engine {self.title['engine']}, policy {self.title['policy']}, "
            f"disagg {self.title['disagg']}"
        )


def plan_report(made: CapacityPlan) -> str:
    """The table and the answer as text."""
    return "\n".join(
        [
            made.title_text,
            f"objective: {objective_text(made.plan.objective)}",
            "",
            *columns(list(_rows(made))),
            "",
            *_answer(made),
        ]
    )


def objective_text(objective: Objective) -> str:
    """The objective in a line."""
    parts = []
    for part in objective.parts:
        limits = " and ".join(_limit_text(objective, name) for name in part.names)
        parts.append(f"{part.share * 100:g}% of the requests with {limits}")
    return "; ".join(parts)


def _limit_text(objective: Objective, name: str) -> str:
    text = f"{_WORDS[name]} within {format_duration(objective.limits[name].time)}"
    if name == "ttft" and objective.cold:
        text += f" + {objective.cold:g} x its time on an idle worker"
    return text


def _rows(made: CapacityPlan) -> Iterator[tuple[str, ...]]:
    limits = made.plan.objective.limits
    heads = [f"{name} in {format_duration(limit.time)}" for name, limit in limits.items()]
    yield ("cluster", "price/h", "seed", *heads, "TTFT p50, s", "p99", "ITL p99, ms", "")
    for cell, one in sorted(made.search.known.items(), key=lambda item: _order(item[0].shape)):
        yield (
            str(cell.shape),
            f"{cell.shape.size * made.price:g}",
            str(made.plan.config.seed + cell.seed),
            *(_share(one, name) for name in limits),
            f"{one.ttft_p50:.3f}",
            f"{one.ttft_p99:.3f}",
            f"{one.itl_p99 * 1e3:.1f}",
            "kept" if one.met else f"missed after {one.ended} of {one.total}",
        )


def _order(shape: ClusterShape) -> tuple[bool, int, int]:
    return bool(shape.prefill), shape.size, shape.prefill


def _share(one: TrialResult, name: str) -> str:
    """A replay that was ended early says only what the share is at most."""
    return f"{'' if one.met or one.ended == one.total else '<'}{one.kept(name):.1%}"


def _answer(made: CapacityPlan) -> Iterator[str]:
    search = made.search
    best = search.answer
    if best is None:
        yield (
            f"no cluster of up to {made.title['most']} workers keeps the objective: raise "
            "--most-workers, or the limits"
        )
        yield from _limiting(made)
        return
    yield f"answer: {_named(made, best)}"
    yield from _binding(made, best)
    for other in (search.aggregated, search.split):
        if other is not None and other != best:
            yield f"also: {_named(made, other)}"
    for mode, found in (("aggregated", search.aggregated), ("split", search.split)):
        if found is None and mode in made.title["modes"]:
            yield f"{_MODES[mode]}: no cluster of that price or less was found"
    yield from _not_monotone(made)


_MODES: Final = {"aggregated": "aggregated workers", "split": "prefill and decode workers"}


def _named(made: CapacityPlan, shape: ClusterShape) -> str:
    seeds = len(made.search.of(shape))
    price = f"{shape.size * made.price:g} an hour"
    named = f"{shape} {_plural('worker', shape.size)}"
    return f"{named}, {price}; kept with {seeds} {_plural('seed', seeds)}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _binding(made: CapacityPlan, best: ClusterShape) -> Iterator[str]:
    """What a cluster with one worker less misses."""
    smaller = [
        (shape, result)
        for shape in dict.fromkeys(cell.shape for cell in made.search.known)
        if shape.size == best.size - 1 and bool(shape.prefill) == bool(best.prefill)
        for result in made.search.of(shape)
        if not result.met
    ]
    if not smaller:
        if best.size == 1:
            yield "one worker is the least there is: nothing binds"
        return
    shape, result = max(smaller, key=lambda pair: pair[1].ended - pair[1].worst_share)
    yield f"binds: {_missed(made, result)} with {shape}"


def _limiting(made: CapacityPlan) -> Iterator[str]:
    if made.search.known:
        cell, result = max(made.search.known.items(), key=lambda item: item[1].ended)
        yield f"binds: {_missed(made, result)} with {cell.shape}"


def _missed(made: CapacityPlan, result: TrialResult) -> str:
    """The limit that most requests missed, and how many may."""
    name = max(result.missed, key=lambda one: result.missed[one])
    part = next(one for one in made.plan.objective.parts if name in one.names)
    at_least = "at least " if result.ended < result.total else ""
    return (
        f"{name}: {at_least}{result.missed[name]} of {result.total} requests miss it, "
        f"{part.allowed(result.total)} may"
    )


def _not_monotone(made: CapacityPlan) -> Iterator[str]:
    """Larger clusters of the same mode that miss what a smaller one keeps."""
    search = made.search
    for best in (search.aggregated, search.split):
        if best is None:
            continue
        for shape in dict.fromkeys(cell.shape for cell in search.known):
            same = bool(shape.prefill) == bool(best.prefill)
            larger = all(a >= b for a, b in zip(shape, best, strict=True)) and shape != best
            if same and larger and not search.kept(shape):
                yield f"careful: {shape} workers miss the objective though {best} keep it"


def unreachable(plan: TrialPlan, floor: TraceFloor, idle: IdleWorker) -> str:
    """Why no number of workers keeps the objective."""
    tally, limits = floor.tally, plan.objective.limits
    name = max(tally.missed, key=lambda one: tally.missed[one])
    part = next(one for one in plan.objective.parts if name in one.names)
    head = (
        f"unreachable with any number of workers: {tally.missed[name]} of {tally.total} requests "
        f"miss {name} on an idle worker, {part.allowed(tally.total)} may"
    )
    return f"{head}; {_reason(name, limits[name], floor, idle, plan.config)}"


def _reason(
    name: str, limit: SloLimit, floor: TraceFloor, idle: IdleWorker, config: ReplayConfig
) -> str:
    slowest, longest = floor.slowest, floor.longest
    if longest is not None and longest.prompt_tokens > idle.longest:
        bound = "--kv-tokens" if config.kv_tokens < config.max_model_len else "the longest context"
        return (
            f"the longest prompt has {longest.prompt_tokens} tokens, and a worker takes at most "
            f"{idle.longest} ({bound})"
        )
    if name == "itl":
        return (
            f"one request alone has {idle.itl * 1e3:.1f} ms between its tokens, more than "
            f"{format_duration(limit.time)}: choose another --preset"
        )
    assert slowest is not None  # there is a request
    cached = slowest.prompt_tokens - slowest.uncached_tokens
    return (
        f"the slowest prompt ({slowest.prompt_tokens} tokens, at most {cached} of them cached) "
        f"takes {floor.first_token(slowest):.2g} s alone, more than {format_duration(limit.time)}: "
        "raise the limit, or let more requests miss it (--good, or @p95 behind the limit)"
    )


def plan_as_json(made: CapacityPlan) -> str:
    """All results as text; it has no time of this machine."""
    search, objective = made.search, made.plan.objective
    text = {
        "replayed": made.title,
        "objective": {
            "good": objective.good,
            "cold": objective.cold,
            "limits": {n: {"time": x.time, "share": x.share} for n, x in objective.limits.items()},
        },
        "price": made.price,
        "answer": _shape(search.answer),
        "aggregated": _shape(search.aggregated),
        "split": _shape(search.split),
        "idle": {"itl": made.idle.itl, "longest": made.idle.longest},
        "replays": [
            {
                **(_shape(cell.shape) or {}),
                "seed": made.plan.config.seed + cell.seed,
                **{name: getattr(one, name) for name in one.__slots__},
            }
            for cell, one in sorted(search.known.items())
        ],
    }
    return json.dumps(_finite(text), indent=1, sort_keys=True) + "\n"


def _shape(shape: ClusterShape | None) -> dict[str, int] | None:
    return None if shape is None else shape._asdict()


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
