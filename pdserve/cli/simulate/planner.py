"""Runs `pdserve simulate --planner`: the planner that serves, over workers that take time to start.

The replay with a planner is `pdserve.sim.replay.planner_scaler`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import ConfigError
from pdserve.launch.config import units

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from pdserve.ids import Seconds
    from pdserve.planner.config import PlannerConfig
    from pdserve.sim.replay.config import ReplayConfig, ReplaySlo
    from pdserve.sim.replay.planner_scaler import PlannerScaler
    from pdserve.sim.replay.virtual_actuator import StartUp

__all__ = ["PLANNER_FLAGS", "add_planner_flags", "parse_start_up", "planned", "scaling_report"]

PLANNER_FLAGS: Final = ("--start-up", "--pending", "--stuck", "--failing", "--budget")
"""Flags that only a replay with a planner reads."""
_MOST_PRICE: Final = 1e9
_LINES: Final = 40
"""Lines of the decision log in the report; --json has more."""


def add_planner_flags(group: argparse._ArgumentGroup) -> None:
    """Adds `--planner` and its flags."""
    group.add_argument(
        "--planner",
        action="store_true",
        help="A planner starts, stops and switches workers, so that --good of the requests keep "
        "--slo-ttft and --slo-itl; the cluster is what it begins with.",
    )
    group.add_argument(
        "--start-up",
        metavar="TIME[:P90]",
        type=_argument(parse_start_up),
        default="60s",
        help="Median time from a start to the first request, and its 90th percentile. [60s]",
    )
    group.add_argument(
        "--pending",
        metavar="TIME",
        type=_argument(units.parse_duration),
        default="0s",
        help="Time that each start waits for a machine first, free of charge. [0s]",
    )
    for flag, what in (("--stuck", "wait for a machine for ever"), ("--failing", "fail")):
        group.add_argument(
            flag,
            metavar="SHARE",
            type=_argument(_parse_part),
            default="0",
            help=f"Share of the starts that {what}. [0]",
        )
    group.add_argument(
        "--budget",
        metavar="X",
        type=_argument(_parse_budget),
        default="0",
        help="Most that all workers may cost in an hour, at --price each; 0: no limit. [0]",
    )


def _argument(parse: Any) -> Any:
    """`parse` as argparse wants it, with the words of its error."""

    def parsed(text: str) -> Any:
        from argparse import ArgumentTypeError

        try:
            return parse(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return parsed


def parse_start_up(text: str) -> tuple[Seconds, Seconds]:
    """Reads `60s` or `60s:90s`: median and 90th percentile. Errors: `ValueError`."""
    first, colon, second = text.partition(":")
    median = units.parse_duration(first)
    p90 = units.parse_duration(second) if colon else median
    if median <= 0 or p90 < median:
        raise ValueError(
            f"{text!r} is no start-up time: give the median, more than 0, and after a colon the "
            "90th percentile, which is not below it, such as 60s:90s"
        )
    return median, p90


def _parse_part(text: str) -> float:
    """A share that may be 0."""
    return 0.0 if text in ("0", "0%") else units.parse_share(text)


def _parse_budget(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ValueError(f"{text!r} is no budget: give the cost of an hour, such as 8, or 0")
    return value


def planned(parsed: argparse.Namespace, config: ReplayConfig) -> tuple[ReplayConfig, PlannerScaler]:
    """The replay and the planner in it. Errors: `ConfigError` for what cannot work."""
    from pdserve.planner.what_if.judge import WhatIfJudge
    from pdserve.sim.replay.planner_scaler import PlannerScaler

    if parsed.most_workers < config.all_workers:
        raise ConfigError(
            f"--most-workers {parsed.most_workers} is less than the {config.all_workers} workers "
            "that the replay begins with"
        )
    if not 0 <= parsed.price < _MOST_PRICE:
        raise ConfigError(f"--price {parsed.price:g} must be 0 or more, and less than 1e9")
    judge = WhatIfJudge(idle_factor=config.slo.cold, max_batch_tokens=config.max_batch_tokens)
    scaler = PlannerScaler(
        _config(parsed, config),
        judge,
        _start_up(parsed),
        slots=parsed.most_workers,
        price=parsed.price,
    )
    return replace(config, scaling=True), scaler


def _start_up(parsed: argparse.Namespace) -> StartUp:
    from pdserve.sim.replay.virtual_actuator import StartUp

    median, p90 = parsed.start_up
    return StartUp(
        median=median,
        p90=p90,
        pending=parsed.pending,
        stuck=parsed.stuck,
        failing=parsed.failing,
    )


def _config(parsed: argparse.Namespace, config: ReplayConfig) -> PlannerConfig:
    from pdserve.planner.config import PlannerConfig, PoolConfig
    from pdserve.sim.replay.cluster import MODEL

    pool = PoolConfig(
        model=MODEL,
        ttft=_ttft(config.slo),
        itl=config.slo.itl or None,
        share=parsed.good,
        max=parsed.most_workers,
    )
    return PlannerConfig(mode="act", pools=(pool,), budget=parsed.budget)


def _ttft(slo: ReplaySlo) -> Seconds | None:
    """The planner's limit; what `cold` adds is the what-if's."""
    return slo.ttft if 0 < slo.ttft < 1e6 else None


def scaling_report(scaling: dict[str, Any]) -> Iterator[str]:
    """What the planner did, as lines."""
    yield ""
    yield (
        f"workers          {scaling['mean_workers']:7.2f}   on average, "
        f"{scaling['worker_seconds'] / 3600:.2f} worker-hours; "
        f"{scaling['not_serving_seconds'] / 3600:.2f} of them while they started"
    )
    yield (
        f"starts           {scaling['starts']:7d}   of which {scaling['failed_starts']} came to "
        f"nothing; {scaling['removed']} workers left"
    )
    log = scaling["log"]
    if len(log) > _LINES:
        yield f"decisions, the last {_LINES} of {len(log)} (--json has them all):"
    else:
        yield "decisions:"
    yield from (f"  {line}" for line in log[-_LINES:])
