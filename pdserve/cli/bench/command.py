"""Runs `pdserve bench`: turns flags into a run, and its results into a table, JSON and a plot."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import secrets
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdserve import __version__
from pdserve.cli.bench.arrivals import arrival_times, parse_burstiness
from pdserve.cli.bench.report import comparison, record_as_json, report
from pdserve.cli.bench.summary import BenchSlo, summarise
from pdserve.cli.bench.workload import (
    SampleRequest,
    length_sampler,
    random_requests,
    requests_from_file,
    requests_from_trace,
    warm_up_requests,
    with_output_lengths,
)
from pdserve.cli.outputs import check_writable, write
from pdserve.cli.parser import Parser, value_of
from pdserve.cli.slo_flags import add_slo_flags, slo_of
from pdserve.errors import ConfigError, PdserveError
from pdserve.launch import exit_codes
from pdserve.launch.config import units

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from pdserve.cli.bench.runner import BenchRun, LoadConfig, RequestTemplate
    from pdserve.client import Client
    from pdserve.ids import Seconds

__all__ = ["run"]

_DRAW_EVERY: Final[Seconds] = 0.2
_BAR: Final = 30
_DEFAULT_REQUESTS: Final = 100
_INPUT_TOKENS: Final = "512"
_OUTPUT_TOKENS: Final = "128"
_SLO_NAMES: Final = ("ttft", "itl", "e2e")
_SEEDS: Final = 1 << 31
"""Seeds are drawn below this: short enough to type again."""


class BenchError(PdserveError):
    """The server cannot be measured."""


def run(arguments: list[str]) -> int:
    """Sends the load, prints a table, and writes the requested files."""
    parsed = _parser().parse(arguments)
    if parsed.compare:
        print(_compared(*map(Path, parsed.compare)))
        return exit_codes.OK
    if parsed.seed is None:
        parsed.seed = str(secrets.randbelow(_SEEDS))
    plan = _plan(parsed)
    if parsed.plot:
        from pdserve.sim.replay.plot import check_library

        check_library()
    check_writable(Path(path) for path in (parsed.json, parsed.plot) if path)
    measured, server = _measured(parsed, plan)
    numbers = summarise(measured.records, measured.pace, plan.slo)
    numbers["seed"] = int(parsed.seed)
    numbers["expect_uncached"] = _expects_uncached(parsed)
    print(report(numbers))
    if parsed.json:
        write(Path(parsed.json), _as_json(parsed, server, numbers, measured))
    if parsed.plot:
        from pdserve.cli.bench.plot import draw

        draw(measured.records, Path(parsed.plot), _title(parsed, server))
    return exit_codes.OK if numbers["completed"] else exit_codes.FAILED


# ---------------------------------------------------------------- arguments


def _parser() -> Parser:
    parser = Parser(
        "pdserve bench",
        "Put load on a server of the OpenAI API and report time to first token, inter-token\n"
        "latency, throughput and goodput. Times are measured here; token counts are the server's.",
        "PDSERVE_URL and PDSERVE_API_KEY stand in for --url and --api-key. Ctrl-C ends the "
        "run\nand reports the results so far.",
    )
    _add_target(parser.add_argument_group("target: who is asked"))
    _add_workload(parser.add_argument_group("workload: what is asked"))
    _add_load(parser.add_argument_group("load: when it is asked"))
    output = parser.add_argument_group("output")
    add_slo_flags(output, _SLO_NAMES, "Goodput is the rate of good requests.", "")
    output.add_argument(
        "--json", metavar="FILE", help="Write every request and all results to this file."
    )
    output.add_argument("--plot", metavar="FILE", help="Draw a PNG: times, and load over time.")
    output.add_argument("--compare", metavar="FILE", nargs=2, help="Two JSON files side by side.")
    return parser


def _add_target(group: argparse._ArgumentGroup) -> None:
    url = os.environ.get("PDSERVE_URL", "http://127.0.0.1:8000")
    group.add_argument("--url", default=url, metavar="URL", help=f"The server. [{url}]")
    key = os.environ.get("PDSERVE_API_KEY", "")
    group.add_argument("--api-key", default=key, metavar="KEY", help="If the server requires one.")
    group.add_argument("--model", default="", metavar="NAME", help="[the first one served]")
    group.add_argument(
        "--endpoint",
        choices=("chat", "completions", "embeddings"),
        help="[chat with --prompts, else completions]",
    )
    group.add_argument(
        "--timeout", default="600s", metavar="TIME", help="Time limit of a request. [600s]"
    )
    group.add_argument(
        "--retries",
        default="0",
        metavar="N",
        help="Retries of refused requests, and if unreachable. [0]",
    )


def _add_workload(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help="Lines of text, or JSON lines with prompt or messages, and max_tokens.",
    )
    source.add_argument(
        "--trace", metavar="FILE", help="JSON lines or CSV, such as Mooncake's and Azure's."
    )
    group.add_argument(
        "--columns",
        metavar="NAMES",
        help="Columns of --trace: at=NAME,input=NAME,output=NAME, perhaps hash_ids=NAME,block=512.",
    )
    group.add_argument("--input-tokens", metavar="LENGTH", help=_LENGTH + " [512]")
    group.add_argument(
        "--output-tokens", metavar="LENGTH", help="As above. [128; for a trace its own]"
    )
    group.add_argument(
        "--shared-prefix", metavar="N", help="Additional prefix tokens that all prompts share. [0]"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="Answers have exactly the requested length."
    )
    group.add_argument(
        "--temperature", type=float, metavar="X", help="Sampling temperature. [the server's]"
    )
    group.add_argument(
        "--vocabulary",
        default="1000",
        metavar="N",
        help="Upper bound of synthetic token ids. [1000]",
    )
    group.add_argument(
        "--seed", metavar="N", help="Seed of prompts, lengths and arrivals. [random, and printed]"
    )


_LENGTH: Final = (
    "Length of synthetic prompts: N, uniform:A:B, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA or "
    "exponential:MEAN."
)


def _add_load(group: argparse._ArgumentGroup) -> None:
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("--concurrency", metavar="N", help="Closed loop: number of callers. [8]")
    kind.add_argument("--rate", metavar="X", help="Open loop: requests per second.")
    group.add_argument(
        "--arrivals",
        metavar="HOW",
        help="Arrivals of --rate: poisson, even or gamma:SHAPE. [poisson]",
    )
    group.add_argument(
        "--speed", metavar="X", help="Factor by which a trace's arrivals are sped up. [1]"
    )
    group.add_argument(
        "--jitter",
        metavar="TIME",
        help="Delay these randomly by up to this; Mooncake's need 3s. [0]",
    )
    group.add_argument(
        "--requests", metavar="N", help="Number of requests. [the file's; 100 synthetic ones]"
    )
    group.add_argument("--duration", metavar="TIME", help="No request is sent after this time.")
    group.add_argument(
        "--warmup", default="2", metavar="N", help="Short requests before the run, not counted. [2]"
    )
    group.add_argument(
        "--max-in-flight",
        default="1024",
        metavar="N",
        help="Open loop: requests beyond this are dropped. [1024]",
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    target: RequestTemplate
    load: LoadConfig
    asks: Iterator[SampleRequest]
    total: int
    """Number of requests to send; 0: unknown."""
    warm: list[SampleRequest]
    slo: BenchSlo | None
    timeout: Seconds
    retries: int


def _plan(parsed: argparse.Namespace) -> _Plan:
    """Reads all flags before anything is sent. Errors: `ConfigError`."""
    from pdserve.cli.bench.runner import LoadConfig, RequestTemplate

    _check_used(parsed)
    endpoint = parsed.endpoint or ("chat" if parsed.prompts else "completions")
    duration = (
        value_of("--duration", units.parse_duration, parsed.duration) if parsed.duration else None
    )
    open_loop = parsed.rate or (parsed.trace and not parsed.concurrency)
    concurrency = 0 if open_loop else _count("--concurrency", parsed.concurrency or "8", 1)
    fields = {} if parsed.temperature is None else {"temperature": parsed.temperature}
    words = endpoint == "chat"
    vocabulary = _count("--vocabulary", parsed.vocabulary, 32)
    seed = _count("--seed", parsed.seed or "0")
    warm = _count("--warmup", parsed.warmup)
    asks, total = _asks(parsed, words, vocabulary, endless=duration is not None)
    if parsed.rate:
        asks = _timed(parsed, asks)
    return _Plan(
        RequestTemplate(endpoint=endpoint, fields=fields, exact=parsed.ignore_eos),
        LoadConfig(
            concurrency=concurrency,
            most_in_flight=_count("--max-in-flight", parsed.max_in_flight, 1),
            duration=duration,
        ),
        asks,
        total,
        list(warm_up_requests(warm, words=words, vocabulary=vocabulary, seed=seed)),
        _slo(parsed),
        value_of("--timeout", units.parse_duration, parsed.timeout),
        _count("--retries", parsed.retries),
    )


def _slo(parsed: argparse.Namespace) -> BenchSlo | None:
    limits = slo_of(parsed, _SLO_NAMES).limits
    return BenchSlo(**limits) if limits else None


def _check_used(parsed: argparse.Namespace) -> None:
    """Errors: `ConfigError` for a flag that has no effect together with the others."""
    source = "--trace" if parsed.trace else "--prompts" if parsed.prompts else ""
    own_pace = parsed.trace and not parsed.rate and not parsed.concurrency
    for flag, given, effective, why in (
        ("--input-tokens", parsed.input_tokens, not source, f"{source} says what is asked"),
        ("--shared-prefix", parsed.shared_prefix, not source, f"{source} says what is asked"),
        ("--columns", parsed.columns, parsed.trace, "it is of --trace"),
        ("--arrivals", parsed.arrivals, parsed.rate, "it is of --rate"),
        ("--speed", parsed.speed, own_pace, "it is of a --trace that is asked at its moments"),
        ("--jitter", parsed.jitter, own_pace, "it is of a --trace that is asked at its moments"),
    ):
        if given is not None and not effective:
            raise ConfigError(f"{flag} has no effect here: {why}")


def _asks(
    parsed: argparse.Namespace, words: bool, vocabulary: int, *, endless: bool
) -> tuple[Iterator[SampleRequest], int]:
    """The requests to send, and their number, 0 if unknown."""
    most = _count("--requests", parsed.requests, 1) if parsed.requests else 0
    seed = _count("--seed", parsed.seed or "0")
    outputs = length_sampler("--output-tokens", parsed.output_tokens or _OUTPUT_TOKENS)
    asks: Iterator[SampleRequest]
    if parsed.trace:
        asks, total = _traced(parsed, words, vocabulary, most)
        return (with_output_lengths(asks, outputs, seed) if parsed.output_tokens else asks), total
    if parsed.prompts:
        listed = requests_from_file(Path(parsed.prompts), outputs, seed)
        _check_prompts(listed, chat=words)
        asks, default = itertools.cycle(listed), len(listed)
    else:
        asks, default = (
            random_requests(
                length_sampler("--input-tokens", parsed.input_tokens or _INPUT_TOKENS),
                outputs,
                shared_prefix=_count("--shared-prefix", parsed.shared_prefix or "0"),
                words=words,
                vocabulary=vocabulary,
                seed=seed,
            ),
            _DEFAULT_REQUESTS,
        )
    total = most or (0 if endless else default)
    return (itertools.islice(asks, total), total) if total else (asks, 0)


def _check_prompts(asks: list[SampleRequest], *, chat: bool) -> None:
    """Errors: `ConfigError` for prompts that the endpoint does not accept."""
    for ask in asks:
        lists = isinstance(ask.prompt, list)
        messages = lists and isinstance(ask.prompt[0], dict)
        if lists and messages != chat:
            wrong = "`messages` need --endpoint chat" if messages else "token ids are not for chat"
            raise ConfigError(f"--prompts, request {ask.number + 1}: {wrong}")


def _traced(
    parsed: argparse.Namespace, words: bool, vocabulary: int, most: int
) -> tuple[Iterator[SampleRequest], int]:
    from pdserve.sim.workloads.trace_file import open_trace
    from pdserve.sim.workloads.transform import TraceTransform, transform_trace

    shape = TraceTransform(
        speed=_number("--speed", parsed.speed or "1"),
        jitter=value_of("--jitter", units.parse_duration, parsed.jitter) if parsed.jitter else 0.0,
        limit=most,
        seed=_count("--seed", parsed.seed or "0"),
    )
    trace = open_trace(Path(parsed.trace), parsed.columns or "")
    if not (trace.timed or parsed.rate or parsed.concurrency):
        raise ConfigError(f"{parsed.trace} has no arrival times: give --rate or --concurrency")
    # This pass also finds every bad line before the run.
    total = sum(1 for _ in transform_trace(trace, shape))
    asks = requests_from_trace(
        transform_trace(trace, shape), words=words, vocabulary=vocabulary, seed=shape.seed
    )
    return asks, total


def _expects_uncached(parsed: argparse.Namespace) -> bool:
    """True if prompts share no prefixes, so that the cache should have no effect."""
    return not (parsed.trace or parsed.prompts or int(parsed.shared_prefix or 0))


def _timed(parsed: argparse.Namespace, asks: Iterator[SampleRequest]) -> Iterator[SampleRequest]:
    """The requests, with arrival times from the rate instead of the workload's."""
    shape, rate = parse_burstiness(parsed.arrivals or "poisson"), _number("--rate", parsed.rate)
    moments = arrival_times(rate, shape, _count("--seed", parsed.seed or "0"))
    return (replace(ask, at=at) for at, ask in zip(moments, asks, strict=False))


def _count(flag: str, text: str, least: int = 0) -> int:
    return value_of(flag, lambda given: units.parse_count(given, least), text)


def _number(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise ConfigError(f"{flag}: {text!r} is no number above 0")
    return value


# ---------------------------------------------------------------- the run


def _measured(parsed: argparse.Namespace, plan: _Plan) -> tuple[BenchRun, dict[str, Any]]:
    from pdserve.client import ClientError, ConnectionFailed

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(_load(parsed, plan))
        except ConnectionFailed as error:
            raise BenchError(
                f"{error.message}; start one with `pdserve`, or name another with --url"
            ) from None
        except ClientError as error:
            raise BenchError(f"{parsed.url}: {error.message}") from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _load(parsed: argparse.Namespace, plan: _Plan) -> tuple[BenchRun, dict[str, Any]]:
    from pdserve.cli.bench.runner import BenchRun, LoadConfig, measure
    from pdserve.client import Client, Timeouts

    timeouts = Timeouts(first=plan.timeout, between=plan.timeout, total=plan.timeout)
    key, model = parsed.api_key or None, parsed.model or None
    async with Client(
        parsed.url, key, model=model, timeout=timeouts, retries=plan.retries
    ) as client:
        server = await _facts(client, model)
        if plan.warm:
            warmed = await measure(client, plan.target, LoadConfig(concurrency=2), iter(plan.warm))
            if warmed.pace.interrupted:
                return BenchRun(pace=warmed.pace), server
        progress = _Progress(plan.total, plan.load.duration)
        measured = await measure(client, plan.target, plan.load, plan.asks, progress.show)
        progress.close()
    return measured, server


async def _facts(client: Client, model: str | None) -> dict[str, Any]:
    """Details of the server. Errors: `ClientError` if it cannot be reached."""
    from pdserve.client import ClientError

    served = [one.id for one in await client.models()]
    try:
        version = await client.version()
    except ClientError:
        # Servers other than pdserve may have no such endpoint.
        version = ""
    return {
        "url": client.url,
        "model": model or (served[0] if served else ""),
        "served": served,
        "version": version,
    }


class _Progress:
    """One progress line on a terminal's standard error; nothing elsewhere."""

    def __init__(self, total: int, duration: Seconds | None) -> None:
        self._total = total
        self._duration = duration
        self._shown = sys.stderr.isatty()
        self._next = 0.0

    def show(self, run: BenchRun) -> None:
        """Redraws the line now and then."""
        if self._shown and (moment := time.monotonic()) >= self._next:
            self._next = moment + _DRAW_EVERY
            sys.stderr.write(f"\r{self.line(run)}\x1b[K")
            sys.stderr.flush()

    def line(self, run: BenchRun) -> str:
        """The text of the line."""
        whole = run.ended / self._total if self._total else 0.0
        if self._duration:
            whole = max(whole, run.now() / self._duration)
        full = min(_BAR, int(_BAR * whole))
        of = f"/{self._total}" if self._total else ""
        return (
            f"[{'#' * full}{'.' * (_BAR - full)}] {run.ended}{of} requests, "
            f"{run.in_flight} in flight, {run.now():.0f} s"
        )

    def close(self) -> None:
        """Removes the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")


# ---------------------------------------------------------------- files


def _as_json(
    parsed: argparse.Namespace, server: dict[str, Any], numbers: dict[str, Any], measured: BenchRun
) -> str:
    hidden = ("json", "plot", "api_key", "compare", "url")
    settings = {name: value for name, value in vars(parsed).items() if name not in hidden}
    whole = {
        "settings": settings,
        "server": server,
        "client": {
            "version": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
        },
        "summary": numbers,
        "requests": [record_as_json(record) for record in measured.records],
    }
    return json.dumps(whole, indent=1) + "\n"


def _title(parsed: argparse.Namespace, server: dict[str, Any]) -> str:
    load = f"{parsed.rate}/s" if parsed.rate else f"concurrency {parsed.concurrency or 8}"
    if parsed.trace and not parsed.rate and not parsed.concurrency:
        load = f"{Path(parsed.trace).name} at {parsed.speed or 1}x"
    return f"{server['model']}, {load}, seed {parsed.seed}"


def _compared(first: Path, second: Path) -> str:
    numbers = []
    for path in (first, second):
        try:
            numbers.append(json.loads(path.read_bytes())["summary"])
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is not what --json writes") from None
    return comparison((first.name, second.name), *numbers)
