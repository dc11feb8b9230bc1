"""`pdserve simulate`: what a cluster would do with a trace, by production code in virtual time.

Owns the terminal's one line of progress and the files that are written; the replay itself is
`pdserve.sim.replay`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdserve.cli.outputs import check_writable, columns, write
from pdserve.cli.parser import Parser
from pdserve.errors import ConfigError
from pdserve.launch import exit_codes, units

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from pdserve.ids import Seconds
    from pdserve.sim.replay.config import ReplayConfig, Slo
    from pdserve.sim.replay.record import Record
    from pdserve.sim.replay.run import Result
    from pdserve.sim.traces.base import TraceRequest
    from pdserve.sim.traces.shape import Shape

__all__ = ["Progress", "report", "run"]

_DRAW_EVERY: Final[Seconds] = 0.2
_BAR: Final = 30


def run(arguments: list[str]) -> int:
    """Replay, print a table, write what was asked for."""
    parsed = _parser().parse(arguments)
    from pdserve.sim.replay.plot import check_library, draw
    from pdserve.sim.replay.run import replay
    from pdserve.sim.traces.shape import shaped

    if parsed.plot:
        check_library()
    config = _config(parsed)
    config.validate()
    trace, shape = _trace(parsed), _shape(parsed)
    outputs = [Path(path) for path in (parsed.json, parsed.plot) if path]
    check_writable(outputs)
    progress = Progress(_counted(shaped(trace, shape)))
    result = replay(config, shaped(trace, shape), progress.ended)
    progress.close()
    print(report(result))
    if parsed.json:
        write(Path(parsed.json), _as_text(parsed, result))
    if parsed.plot:
        draw(result, Path(parsed.plot), _title(parsed))
    return exit_codes.OK


# ---------------------------------------------------------------- what is asked for


def _parser() -> Parser:
    parser = Parser(
        "pdserve simulate",
        "Replay a trace through a virtual cluster: the router, workers and schedulers that serve,\n"
        "a model of time for an engine, and one seed for all that is drawn.",
        "With one seed, machine and set of versions the JSON is the same byte by byte.",
    )
    _add_trace(parser.add_argument_group("trace: who asks, and when"))
    _add_cluster(parser.add_argument_group("cluster: who answers"))
    _add_handoffs(parser.add_argument_group("prefill and decode on different workers"))
    _add_engine(parser.add_argument_group("engine: how long it takes"))
    output = parser.add_argument_group("output")
    output.add_argument("--slo", metavar="A,B[,ITL]", default="1,2", help=_SLO)
    output.add_argument("--json", metavar="FILE", help="Write every number there.")
    output.add_argument(
        "--plot", metavar="FILE", help="Draw a PNG: time to first token, load, hit rate."
    )
    return parser


_SLO: Final = (
    "Count a request as good if its first token came within A seconds and B times what its prompt "
    "takes on an idle worker, and its tokens within ITL seconds of each other. [1,2]"
)


def _add_trace(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="Mooncake's JSONL or Azure's CSV.")
    source.add_argument(
        "--generate", metavar="KIND", help="shared-prefix, multi-turn, agentic or unique."
    )
    _many(group, "--generate-option", "Of what is generated, such as requests=500 or rate=3.")
    _number(group, "--speed", 1.0, "Arrivals come so many times as fast.")
    _number(group, "--jitter", 0.0, "Put each arrival off by up to so many seconds.")
    group.add_argument(
        "--part", metavar="A:B", default="0:1", help="Only this part of its time. [0:1]"
    )
    _count(group, "--limit", 0, "Requests at most; 0: all.")
    _count(group, "--seed", 0, "Of everything that is drawn.")


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers",
        metavar="N",
        type=_as_count,
        help="Workers that do everything by themselves. [4; beside --prefill 0]",
    )
    _count(group, "--prefill", 0, "Workers that compute prompts for others,")
    _count(group, "--decode", 0, "and those, which take requests.")
    _count(group, "--routers", 1, "Routers.")
    _count(group, "--frontends", 1, "Frontends; each asks a router of its own choice.")
    group.add_argument("--policy", metavar="NAME", default="", help="As of a router.")
    _many(group, "--policy-option", "Of the policy.")
    _many(group, "--router-option", "Of the router, such as queue-order=fifo.")
    group.add_argument(
        "--slow",
        metavar="SHARE:FACTOR",
        default="0:1",
        help="This share of the workers takes so many times as long. [0:1]",
    )
    _number(group, "--delay", 0.0002, "Seconds from one node to another.")


def _add_handoffs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--disagg", metavar="HOW", default="rule", help="rule, predict, always or never. [rule]"
    )
    _count(group, "--disagg-min-tokens", 512, "`rule`: prompts with more uncached tokens.")
    _count(group, "--disagg-max-queue", 10, "`rule`: while no more than this wait.")
    group.add_argument(
        "--bandwidth",
        metavar="RATE",
        type=_as_rate,
        default="25GB/s",
        help="At which a worker sends KV, and at which it receives some. [25GB/s]",
    )
    group.add_argument(
        "--transfer-latency",
        metavar="TIME",
        type=_as_duration,
        default="20us",
        help="Of each part that is sent, besides. [20us]",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--engine", metavar="NAME", default="sim", help="An engine's name. [sim]")
    group.add_argument("--preset", metavar="NAME", default="", help="Whose times the engine takes.")
    _many(group, "--engine-option", "Of the engine.")
    _number(group, "--noise", 0.0, "Spread of a step's time, as a share of it.")
    _count(group, "--block-size", 512, "Tokens of a block.")
    _count(group, "--kv-tokens", 500_000, "Tokens that a worker's pool holds.")
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
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None


def _as_count(text: str) -> int:
    from argparse import ArgumentTypeError

    try:
        return units.parse_count(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: {error}") from None


def _as_rate(text: str) -> float:
    """Bytes per second."""
    from argparse import ArgumentTypeError

    size, _, per = text.partition("/")
    try:
        if per.strip() not in ("", "s"):
            raise ValueError(f"{text!r} is not a rate such as 25GB/s")
        return float(units.parse_size(size))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _as_duration(text: str) -> Seconds:
    from argparse import ArgumentTypeError

    try:
        if text.endswith("us"):
            return float(text.removesuffix("us")) / 1e6
        return units.parse_duration(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


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
        routers=parsed.routers,
        frontends=parsed.frontends,
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
        max_batch_tokens=parsed.max_batch_tokens,
        max_sequences=parsed.max_sequences,
        delay=parsed.delay,
        slo=_slo(parsed.slo),
    )


def _workers(parsed: argparse.Namespace) -> int:
    if parsed.workers is not None:
        return int(parsed.workers)
    return 0 if parsed.prefill or parsed.decode else 4


def _slo(text: str) -> Slo:
    from pdserve.sim.replay.config import Slo

    values = _floats("--slo", text, ",", 2, 3)
    return Slo(ttft=values[0], cold=values[1], itl=values[2] if len(values) == 3 else 0.0)


def _shape(parsed: argparse.Namespace) -> Shape:
    from pdserve.sim.traces.shape import Shape

    begin, end = _floats("--part", parsed.part, ":", 2)
    return Shape(
        begin=begin,
        end=end,
        jitter=parsed.jitter,
        speed=parsed.speed,
        limit=parsed.limit,
        seed=parsed.seed,
    )


def _trace(parsed: argparse.Namespace) -> Iterable[TraceRequest]:
    if parsed.trace:
        from pdserve.sim.traces.load import open_trace

        if parsed.generate_option:
            raise ConfigError("--generate-option belongs to --generate, not to --trace")
        return open_trace(Path(parsed.trace))
    from pdserve.sim.traces.generate import generator

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
    if len(values) not in counts:
        wanted = " or ".join(map(str, counts))
        raise ConfigError(f"{flag} {text!r} is not {wanted} numbers with {between!r} between them")
    return values


# ---------------------------------------------------------------- what is told


class Progress:
    """One line on a terminal's standard error; nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._ended = 0
        self._shown = sys.stderr.isatty()
        self._begin = time.monotonic()
        self._next = 0.0
        self._virtual = 0.0

    def ended(self, record: Record, now: Seconds) -> None:
        """One more request, at this virtual time."""
        self._ended += 1
        self._virtual = now
        if self._shown and (moment := time.monotonic()) >= self._next:
            self._next = moment + _DRAW_EVERY
            sys.stderr.write(f"\r{self.line(moment - self._begin)}\x1b[K")
            sys.stderr.flush()

    def line(self, real: Seconds) -> str:
        """How far it is after `real` seconds."""
        full = _BAR * self._ended // max(1, self._total)
        pace = self._virtual / max(real, 1e-3)
        return (
            f"[{'#' * full}{'.' * (_BAR - full)}] {self._ended}/{self._total} requests, "
            f"{self._virtual:.0f} s in {real:.0f} s ({pace:.0f}x)"
        )

    def close(self) -> None:
        """Say how it went, below the bar if there was one."""
        before = "\r\x1b[K" if self._shown else ""
        sys.stderr.write(f"{before}{self.line(time.monotonic() - self._begin)}\n")


def report(result: Result) -> str:
    """The summary as a person reads it."""
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
            "",
            *columns(rows),
            "",
            f"good             {numbers['good']:7.1%}   {numbers['goodput']:.3f} requests/s",
            f"from the cache   {numbers['hit_rate']:7.1%}   of the prompt tokens",
            f"balance          {numbers['balance']:7.3f}   Jain's index of computed tokens",
            f"throughput       {through['requests']:7.3f} requests/s, "
            f"{through['prompt_tokens']:.0f} + {through['output_tokens']:.0f} tokens/s",
            *_handoffs(numbers["prefills"], numbers["transfers"]),
            *_predictions(numbers["prediction"]),
        ]
    )


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
        ("predicted / actual", "count", "p10", "p50", "p90", "median error")
    ]
    for name, one in buckets.items():
        ratios = [f"{one[key]:.2f}" for key in ("ratio_p10", "ratio_p50", "ratio_p90")]
        rows.append((f"{name} tokens", f"{one['count']:.0f}", *ratios, f"{one['error_p50']:.0%}"))
    yield from columns(rows)


def _row(name: str, values: dict[str, float]) -> tuple[str, ...]:
    return (name, *(f"{values[key]:.3f}" for key in ("mean", "p50", "p90", "p99")))


# ---------------------------------------------------------------- files


def _counted(trace: Iterable[TraceRequest]) -> int:
    """Also finds every bad line before hours of work."""
    return sum(1 for _ in trace)


def _title(parsed: argparse.Namespace) -> str:
    source = Path(parsed.trace).name if parsed.trace else parsed.generate
    policy = parsed.policy or "default policy"
    cluster = f"{_workers(parsed)} workers"
    if parsed.prefill:
        cluster += f", {parsed.prefill} prefill, {parsed.decode} decode"
    return f"{source} at {parsed.speed:g}x, {cluster}, {policy}, seed {parsed.seed}"


def _as_text(parsed: argparse.Namespace, result: Result) -> str:
    """Settings and numbers; of files only their names, of this machine nothing."""
    settings: dict[str, Any] = {
        name: value for name, value in vars(parsed).items() if name not in ("json", "plot")
    }
    if parsed.trace:
        settings["trace"] = Path(parsed.trace).name
    made = {"settings": settings, **result.plain()}
    return json.dumps(made, indent=1, sort_keys=True) + "\n"
