"""Runs `pdserve simulate`: turns flags into a replay, and its results into a table, JSON and a
plot.

The replay itself is `pdserve.sim.replay`: production code in virtual time.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pdserve.cli.outputs import check_writable, write
from pdserve.cli.parser import Parser
from pdserve.cli.simulate.planner import PLANNER_FLAGS, add_planner_flags, planned
from pdserve.cli.simulate.report import ReplayProgress, cluster_text, engine_text, report
from pdserve.cli.simulate.tune import TUNE_FLAGS, add_tune_flags, run_tune
from pdserve.cli.slo_flags import add_slo_flags, slo_of
from pdserve.errors import ConfigError
from pdserve.launch import exit_codes
from pdserve.launch.config import units

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.ids import Seconds
    from pdserve.sim.capacity.objective import Objective
    from pdserve.sim.replay.config import ReplayConfig, ReplaySlo
    from pdserve.sim.replay.run import ReplayResult
    from pdserve.sim.workloads.trace_request import TraceRequest
    from pdserve.sim.workloads.transform import TraceTransform

__all__ = ["run"]

T = TypeVar("T")


def run(arguments: list[str]) -> int:
    """Replays the trace, prints a table and writes the requested files."""
    parsed = _parser().parse(arguments)
    _check_modes(arguments, parsed)
    if not (parsed.plan or parsed.slo or parsed.slo_ttft or parsed.slo_itl):
        parsed.slo = _DEFAULT_SLO
    from pdserve.sim.replay.plot import check_library, draw
    from pdserve.sim.replay.run import replay
    from pdserve.sim.workloads.transform import transform_trace

    if parsed.plot:
        check_library()
    config = _config(parsed)
    config.validate()
    trace, shape = _trace(parsed), _shape(parsed)
    if parsed.plan:
        return _plan(parsed, config, trace, shape)
    if parsed.tune:
        return _tune(parsed, arguments, config, trace, shape)
    scaler = None
    if parsed.planner:
        config, scaler = planned(parsed, config)
    outputs = [Path(path) for path in (parsed.json, parsed.plot) if path]
    check_writable(outputs)
    total = _counted(transform_trace(trace, shape))
    if not total:
        raise ConfigError("the trace has no request: nothing to replay")
    progress = ReplayProgress(total)
    result = replay(config, transform_trace(trace, shape), progress.ended, scaler=scaler)
    progress.close()
    print(report(result, config))
    if parsed.json:
        write(Path(parsed.json), _as_text(parsed, result))
    if parsed.plot:
        draw(result, Path(parsed.plot), _title(parsed, config))
    return exit_codes.OK


# ---------------------------------------------------------------- arguments


def _parser() -> Parser:
    parser = Parser(
        "pdserve simulate",
        "Replay a trace through a virtual cluster: the router, workers and schedulers that serve,\n"
        "a timing model as the engine, and one seed for all random numbers.",
        "With one seed, machine and set of versions the JSON is the same byte by byte.",
    )
    _add_trace(parser.add_argument_group("trace: who asks, and when"))
    _add_cluster(parser.add_argument_group("cluster: who answers"))
    _add_plan(parser.add_argument_group("plan: how many workers, and in which modes"))
    add_tune_flags(parser.add_argument_group("tune: which settings serve this trace better"))
    add_planner_flags(parser.add_argument_group("planner: workers that come and go"))
    _add_handoffs(parser.add_argument_group("prefill and decode on different workers"))
    _add_engine(parser.add_argument_group("engine: how long it takes"))
    output = parser.add_argument_group("output")
    add_slo_flags(output, _SLO_NAMES, _COLD, _DEFAULT_SLO)
    output.add_argument("--json", metavar="FILE", help="Write all results to this file.")
    output.add_argument(
        "--plot", metavar="FILE", help="Draw a PNG: time to first token, load, hit rate."
    )
    return parser


_PLAN_FLAGS: Final = ("--modes", "--processes")
"""Flags that only a plan reads."""
_SIZE_FLAGS: Final = ("--good", "--price", "--most-workers")
"""Flags that a plan and a planner read."""
_SLO_NAMES: Final = ("ttft", "itl")
_DEFAULT_SLO: Final = "ttft=1000,cold=2"
_COLD: Final = (
    "cold=X allows a first token X times the prompt's time on an idle worker in addition."
)


def _add_trace(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace",
        metavar="FILE",
        help="JSON lines or CSV, such as Mooncake's and Azure's, or ShareGPT's conversations.",
    )
    source.add_argument(
        "--generate", metavar="KIND", help="shared-prefix, multi-turn, agentic or unique."
    )
    _many(group, "--generate-option", "Option of the generator, such as requests=500 or rate=3.")
    _number(group, "--rate", 0.0, "Draw arrivals of so many requests per second; 0: the trace's.")
    _number(group, "--speed", 1.0, "Factor by which arrivals are sped up.")
    group.add_argument(
        "--columns",
        metavar="NAMES",
        default="",
        help="Columns of another trace: at=NAME,input=NAME,output=NAME (at_ms: milliseconds; "
        "hash_ids=NAME,block=512: ids of blocks that prompts share).",
    )
    group.add_argument(
        "--jitter",
        metavar="TIME",
        type=_as_duration,
        default="0s",
        help="Delay each arrival randomly by up to this, such as 3s for Mooncake's traces. [0s]",
    )
    group.add_argument(
        "--part", metavar="A:B", default="0:1", help="Only this part of the trace's time. [0:1]"
    )
    _count(group, "--limit", 0, "Maximum number of requests; 0: all.")
    _count(group, "--seed", 0, "Seed of all random numbers.")


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers",
        metavar="N",
        type=_as_count,
        help="Number of aggregated workers. [4; with --prefill 0]",
    )
    _count(group, "--prefill", 0, "Number of prefill workers,")
    _count(group, "--decode", 0, "and of decode workers, which take requests.")
    _count(group, "--routers", 1, "Routers.")
    _count(group, "--frontends", 1, "Frontends; each asks a router of its own choice.")
    group.add_argument(
        "--with-router",
        action="store_true",
        help="Each frontend has a router of its own and asks it first, instead of --routers.",
    )
    group.add_argument("--policy", metavar="NAME", default="", help="Routing policy.")
    _many(group, "--policy-option", "Option of the policy.")
    _many(group, "--router-option", "Option of the router, such as queue-order=fifo.")
    group.add_argument(
        "--slow",
        metavar="SHARE:FACTOR",
        default="0:1",
        help="Share of workers that are slower, and by which factor. [0:1]",
    )
    group.add_argument(
        "--delay",
        metavar="TIME",
        type=_as_duration,
        default="200us",
        help="Network delay between nodes. [200us]",
    )


def _add_plan(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--plan",
        action="store_true",
        help="Find the cheapest cluster that keeps --slo-ttft and --slo-itl, and what binds it.",
    )
    group.add_argument(
        "--good",
        metavar="SHARE",
        type=_as_share,
        default="99%",
        help="Share of the requests that must keep the limits which name no share. [99%%]",
    )
    group.add_argument(
        "--modes",
        metavar="NAMES",
        type=_as_modes,
        default="aggregated,split",
        help="aggregated, split (prefill and decode workers), or both. [aggregated,split]",
    )
    _number(group, "--price", 1.0, "Price of a worker and hour.")
    _count(group, "--most-workers", 256, "No larger cluster is tried.")
    _count(group, "--seeds", 2, "Replays of each cluster or choice, with other seeds.")
    _count(group, "--processes", 0, "Replays at once, at most the number of cores; 0: all cores.")


def _add_handoffs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--disagg", metavar="HOW", default="rule", help="rule, predict, always or never. [rule]"
    )
    _count(group, "--disagg-min-tokens", 512, "With rule: only prompts with more uncached tokens.")
    _count(group, "--disagg-max-queue", 10, "With rule: only while at most this many wait.")
    group.add_argument(
        "--bandwidth",
        metavar="RATE",
        type=_as_rate,
        default="25GB/s",
        help="Bandwidth of a worker for KV, in each direction. [25GB/s]",
    )
    group.add_argument(
        "--transfer-latency",
        metavar="TIME",
        type=_as_duration,
        default="20us",
        help="Additional latency of each part sent. [20us]",
    )


_PRESET: Final = (
    "GPU and model whose times the sim engine takes: h100-8b, h200-8b, h100-70b-tp4, h200-70b or "
    "dynamo-mocker. [h100-8b]"
)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--engine", metavar="NAME", default="sim", help="An engine's name. [sim]")
    group.add_argument("--preset", metavar="NAME", default="", help=_PRESET)
    _many(group, "--engine-option", "Option of the engine.")
    _number(group, "--noise", 0.0, "Random spread of a step's time, as a share of it.")
    _count(group, "--block-size", 512, "Tokens per KV block.")
    _count(group, "--kv-tokens", 500_000, "Tokens that a worker's pool holds.")
    for flag, where in (("--host-kv", "in host memory"), ("--disk-kv", "on disk")):
        group.add_argument(
            flag,
            metavar="SIZE",
            type=_as_size,
            default="0",
            help=f"Size of a worker's KV tier {where}, such as 64GiB; 0: none. [0]",
        )
    group.add_argument(
        "--kv-fetch",
        metavar="HOW",
        default="",
        help="Whether workers fetch KV from each other: auto, always or never. [auto with a tier, "
        "else never]",
    )
    _count(group, "--max-batch-tokens", 2048, "Tokens of a step.")
    _count(group, "--max-sequences", 256, "Sequences of a step.")


def _many(group: argparse._ArgumentGroup, flag: str, text: str) -> None:
    group.add_argument(
        flag, metavar="NAME=VALUE", action="append", default=[], help=f"{text} May be repeated."
    )


def _number(group: argparse._ArgumentGroup, flag: str, default: float, text: str) -> None:
    group.add_argument(
        flag, metavar="X", type=_as_float, default=default, help=f"{text} [{default:g}]"
    )


def _count(group: argparse._ArgumentGroup, flag: str, default: int, text: str) -> None:
    group.add_argument(
        flag, metavar="N", type=_as_count, default=default, help=f"{text} [{default}]"
    )


def _as_float(text: str) -> float:
    from argparse import ArgumentTypeError

    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentTypeError(f"{text!r} is no number")
    return value


def _as_count(text: str) -> int:
    from argparse import ArgumentTypeError

    try:
        return units.parse_count(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: {error}") from None


def _as_size(text: str) -> int:
    """Bytes."""
    return _argument(units.parse_size, text)


def _as_share(text: str) -> float:
    """`99%` or `0.99`."""
    return _argument(units.parse_share, text)


def _as_modes(text: str) -> tuple[str, ...]:
    from pdserve.cli.simulate.plan import parse_modes

    return _argument(parse_modes, text)


def _argument(parse: Callable[[str], T], text: str) -> T:
    from argparse import ArgumentTypeError

    try:
        return parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _as_rate(text: str) -> float:
    """Bytes per second."""
    return _argument(_bytes_per_second, text)


def _bytes_per_second(text: str) -> float:
    size, _, per = text.partition("/")
    if per.strip() not in ("", "s"):
        raise ValueError(f"{text!r} is not a rate such as 25GB/s")
    return float(units.parse_size(size))


def _as_duration(text: str) -> Seconds:
    return _argument(units.parse_duration, text)


def _check_modes(arguments: Sequence[str], parsed: argparse.Namespace) -> None:
    """Refuses what would have no effect. Errors: `ConfigError`."""
    given = {word.partition("=")[0] for word in arguments}
    asked = [flag for flag in ("--plan", "--tune", "--planner") if getattr(parsed, flag[2:])]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are two questions: ask one after the other")
    if not parsed.planner:
        _refuse(given, PLANNER_FLAGS, "--planner")
    if not parsed.tune:
        _refuse(given, TUNE_FLAGS, "--tune")
    if not (parsed.plan or parsed.tune):
        _refuse(given, ("--seeds",), "--plan or --tune")
    if not parsed.plan:
        _refuse(given, _PLAN_FLAGS, "--plan")
        _check_no_shares(parsed)
    if not (parsed.plan or parsed.planner):
        _refuse(given, _SIZE_FLAGS, "--plan or --planner")


def _refuse(given: set[str], flags: Iterable[str], without: str) -> None:
    for flag in flags:
        if flag in given:
            raise ConfigError(
                f"{flag} has no effect without {without}: add {without}, or leave it out"
            )


def _check_no_shares(parsed: argparse.Namespace) -> None:
    for name, limit in slo_of(parsed, _SLO_NAMES, cold=True).limits.items():
        if limit.share is not None:
            raise ConfigError(
                f"the share p{limit.share * 100:g} of {name} has no effect without --plan: add "
                "--plan, or leave it out"
            )


def _config(parsed: argparse.Namespace) -> ReplayConfig:
    from pdserve.sim.replay.config import ReplayConfig

    share, factor = _floats("--slow", parsed.slow, ":", 2)
    engine_options = _pairs("--engine-option", parsed.engine_option)
    if parsed.preset:
        engine_options["preset"] = parsed.preset
    return ReplayConfig(
        workers=_workers(parsed),
        prefill=parsed.prefill,
        decode=parsed.decode,
        disagg=parsed.disagg,
        disagg_min_tokens=parsed.disagg_min_tokens,
        disagg_max_queue=parsed.disagg_max_queue,
        bandwidth=parsed.bandwidth,
        transfer_latency=parsed.transfer_latency,
        routers=parsed.frontends if parsed.with_router else parsed.routers,
        frontends=parsed.frontends,
        with_router=parsed.with_router,
        policy=parsed.policy,
        policy_options=_pairs("--policy-option", parsed.policy_option),
        router_options=_pairs("--router-option", parsed.router_option),
        seed=parsed.seed,
        engine=parsed.engine,
        engine_options=engine_options,
        slow_share=share,
        slow_factor=factor,
        noise=parsed.noise,
        block_size=parsed.block_size,
        kv_tokens=parsed.kv_tokens,
        host_kv=parsed.host_kv,
        disk_kv=parsed.disk_kv,
        kv_fetch=parsed.kv_fetch or ("auto" if parsed.host_kv or parsed.disk_kv else "never"),
        max_batch_tokens=parsed.max_batch_tokens,
        max_sequences=parsed.max_sequences,
        delay=parsed.delay,
        slo=_slo(parsed),
    )


def _workers(parsed: argparse.Namespace) -> int:
    if parsed.workers is not None:
        return int(parsed.workers)
    return 0 if parsed.prefill or parsed.decode else 4


def _slo(parsed: argparse.Namespace) -> ReplaySlo:
    from pdserve.sim.replay.config import ReplaySlo

    slo = slo_of(parsed, _SLO_NAMES, cold=True)
    # Without a limit of its own the first token may take any time.
    ttft = 0.0 if slo.cold else math.inf
    if "ttft" in slo.limits:
        ttft = slo.limits["ttft"].time
    itl = slo.limits["itl"].time if "itl" in slo.limits else 0.0
    return ReplaySlo(ttft=ttft, cold=slo.cold, itl=itl)


def _objective(parsed: argparse.Namespace) -> Objective:
    from pdserve.sim.capacity.objective import Objective, SloLimit

    slo = slo_of(parsed, _SLO_NAMES, cold=True)
    limits = slo.limits
    if slo.cold:
        limits.setdefault("ttft", SloLimit(0.0))
    return Objective(
        ttft=limits.get("ttft"), itl=limits.get("itl"), cold=slo.cold, good=parsed.good
    )


def _shape(parsed: argparse.Namespace) -> TraceTransform:
    from pdserve.sim.workloads.transform import TraceTransform

    begin, end = _floats("--part", parsed.part, ":", 2)
    return TraceTransform(
        begin=begin,
        end=end,
        jitter=parsed.jitter,
        speed=parsed.speed,
        limit=parsed.limit,
        seed=parsed.seed,
        rate=parsed.rate,
    )


def _trace(parsed: argparse.Namespace) -> Iterable[TraceRequest]:
    if parsed.trace:
        from pdserve.sim.workloads.trace_file import open_trace

        if parsed.generate_option:
            raise ConfigError("--generate-option belongs to --generate, not to --trace")
        trace = open_trace(Path(parsed.trace), parsed.columns)
        if not trace.timed and not parsed.rate:
            raise ConfigError(f"{parsed.trace} has no arrival times: give --rate, such as --rate 5")
        return trace
    from pdserve.sim.workloads.generate import generator

    options = _pairs("--generate-option", parsed.generate_option)
    return generator(parsed.generate, options, seed=parsed.seed)


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    try:
        return units.parse_pairs(texts)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _floats(flag: str, text: str, between: str, *counts: int) -> list[float]:
    parts = text.split(between)
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = []
    if len(values) not in counts or not all(map(math.isfinite, values)):
        wanted = " or ".join(map(str, counts))
        raise ConfigError(f"{flag} {text!r} is not {wanted} numbers with {between!r} between them")
    return values


def _plan(
    parsed: argparse.Namespace,
    config: ReplayConfig,
    trace: Iterable[TraceRequest],
    shape: TraceTransform,
) -> int:
    """Searches the cheapest cluster that keeps the objective."""
    from pdserve.cli.simulate.plan import run_plan
    from pdserve.sim.capacity.trial import TrialPlan
    from pdserve.sim.replay.cold_ttft import LengthTimes

    title = {
        "trace": _source(parsed),
        "engine": engine_text(config),
        "policy": config.policy or "ttft",
        "disagg": config.disagg,
        "modes": list(parsed.modes),
        "most": parsed.most_workers,
    }
    unknown = LengthTimes((1,), (0.0,))
    return run_plan(parsed, TrialPlan(config, trace, shape, _objective(parsed), unknown), title)


def _tune(
    parsed: argparse.Namespace,
    arguments: Sequence[str],
    config: ReplayConfig,
    trace: Iterable[TraceRequest],
    shape: TraceTransform,
) -> int:
    """Searches values of settings that keep the objective for more requests."""
    from pdserve.sim.capacity.trial import TrialPlan
    from pdserve.sim.replay.cold_ttft import LengthTimes

    unknown = LengthTimes((1,), (0.0,))
    plan = TrialPlan(config, trace, shape, _objective(parsed), unknown)
    return run_tune(parsed, plan, arguments, _source(parsed))


# ---------------------------------------------------------------- files


def _counted(trace: Iterable[TraceRequest]) -> int:
    """Counts the requests; finds every bad line before hours of work."""
    return sum(1 for _ in trace)


def _title(parsed: argparse.Namespace, config: ReplayConfig) -> str:
    return f"{_source(parsed)}, {cluster_text(config)}, seed {parsed.seed}"


def _source(parsed: argparse.Namespace) -> str:
    source = Path(parsed.trace).name if parsed.trace else parsed.generate
    return f"{source} at {parsed.speed:g}x"


def _as_text(parsed: argparse.Namespace, result: ReplayResult) -> str:
    """Settings and results as text; contains only the names of files, and nothing about this
    machine."""
    settings: dict[str, Any] = {
        name: value for name, value in vars(parsed).items() if name not in ("json", "plot")
    }
    if parsed.trace:
        settings["trace"] = Path(parsed.trace).name
    made = {"settings": settings, **result.plain()}
    return json.dumps(made, indent=1, sort_keys=True) + "\n"
