"""`pdserve bench`: its parts as plain functions, and runs against servers, real and scripted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

import pdserve
from pdserve.cli.bench.arrivals import arrival_times, parse_burstiness
from pdserve.cli.bench.command import _parser, _plan
from pdserve.cli.bench.plot import timeline
from pdserve.cli.bench.record import BenchRecord
from pdserve.cli.bench.report import comparison, report
from pdserve.cli.bench.runner import BenchRun, LoadConfig, RequestTemplate, measure
from pdserve.cli.bench.summary import (
    BenchSlo,
    GeneratorStats,
    percentiles,
    result_warnings,
    summarise,
)
from pdserve.cli.bench.workload import (
    SampleRequest,
    build_prompt,
    length_sampler,
    random_requests,
    requests_from_file,
    requests_from_trace,
)
from pdserve.client import Client
from pdserve.errors import ConfigError
from pdserve.launch import exit_codes
from pdserve.sim.capacity.objective import SloLimit
from pdserve.sim.workloads.trace_file import open_trace
from pdserve.sim.workloads.trace_request import TraceRequest, length_of
from tests.client.scripted import failure, scripted, stream
from tests.e2e.model import write_model
from tests.e2e.server import PATIENCE, Server, serving
from tests.sim.workloads.test_published import trace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

BENCH = (sys.executable, "-m", "pdserve", "bench", "--vocabulary", "250", "--warmup", "1")

# ---------------------------------------------------------------- arrivals


def first(count: int, *args: Any) -> list[float]:
    return list(itertools.islice(arrival_times(*args), count))


def test_even_arrivals_are_even():
    assert first(4, 2.0, parse_burstiness("even"), 0) == [0.0, 0.5, 1.0, 1.5]


def test_arrivals_have_their_rate_and_spread_and_a_seed():
    for text, spread in (("poisson", 1.0), ("gamma:0.25", 2.0), ("gamma:4", 0.5)):
        moments = first(20_000, 5.0, parse_burstiness(text), 7)
        gaps = [b - a for a, b in itertools.pairwise(moments)]
        assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
        assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.05)
    assert first(9, 5.0, 1.0, 7) == first(9, 5.0, 1.0, 7) != first(9, 5.0, 1.0, 8)


@pytest.mark.parametrize("text", ["", "gamma", "gamma:0", "gamma:-1", "gamma:nan", "poison"])
def test_other_arrivals_are_refused(text):
    with pytest.raises(ConfigError, match="--arrivals"):
        parse_burstiness(text)


# ---------------------------------------------------------------- workloads


@pytest.mark.parametrize(
    ("text", "mean", "least", "most"),
    [
        ("7", 7, 7, 7),
        ("uniform:10:20", 15, 10, 20),
        ("normal:100:10", 100, 1, 200),
        ("lognormal:100:0.1", 100.5, 1, 400),
        ("exponential:50", 50, 1, 2000),
    ],
)
def test_lengths(text, mean, least, most):
    draw, random = length_sampler("--x", text), Random(1)
    values = [draw(random) for _ in range(5000)]
    assert statistics.mean(values) == pytest.approx(mean, rel=0.05)
    assert least <= min(values) <= max(values) <= most


@pytest.mark.parametrize(
    "text", ["", "0", "x", "uniform:5", "uniform:9:5", "normal:a:b", "zipf:3", "-4", "nan", "7:8"]
)
def test_other_lengths_are_refused(text):
    with pytest.raises(ConfigError, match="--input-tokens"):
        length_sampler("--input-tokens", text)


def made(seed: int = 1, count: int = 30, **options: Any) -> list[SampleRequest]:
    options = {"shared_prefix": 10, "words": False, "vocabulary": 300, **options}
    lengths = length_sampler("", "uniform:5:50"), length_sampler("", "4")
    return list(itertools.islice(random_requests(*lengths, seed=seed, **options), count))


def test_made_up_prompts_share_their_prefix_and_nothing_else():
    prompts: list[Any] = [ask.prompt for ask in made()]
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    assert len({tuple(prompt[10:14]) for prompt in prompts}) == len(prompts)
    assert all(16 <= token < 300 for prompt in prompts for token in prompt)
    assert {15 <= len(prompt) <= 60 for prompt in prompts} == {True}


def test_a_seed_makes_the_same_prompts_again():
    assert made(1) == made(1)
    assert made(1) != made(2)
    text = made(1, words=True)[0].prompt
    assert isinstance(text, str)
    assert len(text.split()) == len(made(1)[0].prompt)


@pytest.mark.parametrize("words", [True, False])
def test_no_prompt_has_a_block_of_another_one_or_of_its_own(words):
    lengths = length_sampler("", "256"), length_sampler("", "4")
    asks = random_requests(*lengths, shared_prefix=0, words=words, vocabulary=1000, seed=3)
    blocks = [
        tuple(tokens[at : at + 16])
        for ask in itertools.islice(asks, 400)
        for tokens in (ask.prompt.split() if isinstance(ask.prompt, str) else ask.prompt,)
        for at in range(0, 256, 16)
    ]
    assert len(blocks) == 400 * 16
    assert len(set(blocks)) == len(blocks)


def test_a_shorter_piece_is_the_beginning_of_a_longer_one():
    long, short = (build_prompt(((9, n),), words=False, vocabulary=300) for n in (40, 11))
    assert long[:11] == short


def test_a_traces_prompts_are_others_under_another_seed():
    trace = [TraceRequest(0, 0.0, ((5, 512),), 9)]
    one, two = (
        next(requests_from_trace(trace, words=False, vocabulary=99, seed=n)).prompt for n in (1, 2)
    )
    assert one[:16] != two[:16]


def test_a_trace_keeps_its_moments_lengths_and_prefixes():
    trace = [
        TraceRequest(0, 0.0, ((5, 512), (6, 100)), 9),
        TraceRequest(1, 2.5, ((5, 512), (7, 200)), 8),
    ]
    one, two = requests_from_trace(trace, words=False, vocabulary=1000, seed=0)
    assert (one.at, one.max_tokens, len(one.prompt)) == (0.0, 9, 612)
    assert (two.at, two.max_tokens, len(two.prompt)) == (2.5, 8, 712)
    assert one.prompt[:512] == two.prompt[:512]
    assert one.prompt[512:520] != two.prompt[512:520]


def test_contents_do_not_collide_in_a_small_vocabulary():
    prompts = {tuple(build_prompt(((n, 4),), words=False, vocabulary=64)) for n in range(50_000)}
    assert len(prompts) == 50_000


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts"
    path.write_text(
        'hello\n\n{"prompt": [1, 2], "max_tokens": 3}\n{"messages": [{"role": "user"}]}\n'
    )
    asks = requests_from_file(path, length_sampler("", "7"), 0)
    assert [(ask.number, ask.prompt, ask.max_tokens) for ask in asks] == [
        (0, "hello", 7),
        (1, [1, 2], 3),
        (2, [{"role": "user"}], 7),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "no prompts"), ("ok\n{}\n", "line 2: has neither"), ('{"prompt": 5}\n', "line 1")],
)
def test_files_that_are_no_prompts(tmp_path, text, says):
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        requests_from_file(path, length_sampler("", "7"), 0)


# ---------------------------------------------------------------- numbers


def test_gaps_of_chunks_with_several_tokens():
    record = BenchRecord(0, 0.0, sent=1.0)
    record.on_chunk(1.5, 0, content=False)  # a role
    record.on_chunk(2.0, 1, content=True)
    record.on_chunk(2.9, 4, content=True)
    record.on_chunk(3.0, 4, content=False)  # the finish reason
    record.on_chunk(3.1, 5, content=False)  # a token without text
    record.output_tokens, record.ended = 5, 3.2
    assert record.ttft == 1.0
    assert record.gaps == pytest.approx([0.3, 0.3, 0.3, 0.2])
    assert record.tpot == pytest.approx(1.1 / 4)
    assert record.e2e == pytest.approx(2.2)


def test_without_usage_a_chunk_with_text_is_a_token():
    record = BenchRecord(0, 0.0)
    for now in (1.0, 2.0):
        record.on_chunk(now, None, content=True)
    record.on_chunk(9.0, None, content=False)
    assert (record.seen, record.gaps, record.counted) == (2, [1.0], False)


def test_percentiles_are_by_nearest_rank():
    found = percentiles(range(1, 101))
    assert found == {"mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    assert percentiles([3.0])["p50"] == percentiles([3.0])["p99"] == 3.0
    assert percentiles([]) == {}


def done(sent: float, first: float, ended: float, tokens: int = 11, **more: Any) -> BenchRecord:
    record = BenchRecord(0, sent, sent=sent, first=first, last=ended, ended=ended, counted=True)
    record.output_tokens = tokens
    for name, value in more.items():
        setattr(record, name, value)
    return record


def test_a_summary_counts_exactly():
    records = [
        done(0.0, 0.1, 1.1, prompt_tokens=5, cached_tokens=2, worker="a"),
        done(1.0, 1.6, 2.0, attempts=3, worker="b"),
        done(2.0, 2.0, 4.0, error="429 overloaded", message="later,\nplease", tokens=0),
    ]
    pace = GeneratorStats(dropped=1, cpu_share=0.2)
    numbers = summarise(records, pace, BenchSlo(SloLimit(0.5), SloLimit(0.15, 0.25), SloLimit(5.0)))
    assert (numbers["requests"], numbers["completed"], numbers["retries"]) == (3, 2, 2)
    assert numbers["errors"] == {"429 overloaded": 1}
    assert numbers["seconds"] == 4.0
    assert numbers["output_tokens_per_second"] == 22 / 4
    assert (numbers["good"], numbers["good_share"], numbers["goodput"]) == (1, 0.25, 0.25)
    assert (numbers["cached_tokens"], numbers["workers"]) == (2, {"a": 1, "b": 1})
    assert "1 requests were not sent" in "".join(result_warnings(numbers))
    assert "1 failed: 429 overloaded, such as: later, please" in report(numbers)


def test_a_generator_that_limits_says_so():
    late = [done(2.0, 2.1, 3.0, intended=1.0)]
    said = " ".join(
        result_warnings(summarise(late, GeneratorStats(cpu_share=0.97, lags=[0.5]), None))
    )
    assert "sent late (p99 1000 ms)" in said
    assert "97% of a core" in said
    assert "event loop was late" in said
    assert result_warnings(summarise([done(0.0, 0.1, 1.0)], GeneratorStats(), None)) == []


def test_a_share_of_a_limit_is_judged_alone():
    slo = BenchSlo(ttft=SloLimit(0.5, 0.5), itl=SloLimit(0.05, 0.9))
    records = [done(0.0, 0.1, 0.2), done(0.0, 0.4, 5.0), done(0.0, 0.1, 0.2, error="lost")]
    numbers = summarise(records, GeneratorStats(dropped=1), slo)
    assert numbers["slo"]["ttft"] == {"limit": 0.5, "kept": 0.5, "wanted": 0.5, "met": True}
    assert numbers["slo"]["itl"] == {"limit": 0.05, "kept": 0.25, "wanted": 0.9, "met": False}
    assert "ttft        50.0% within 500 ms, 50% wanted: kept" in report(numbers)
    assert "itl         25.0% within 50 ms, 90% wanted: MISSED" in report(numbers)


def test_two_runs_side_by_side():
    one = summarise([done(0.0, 0.1, 1.0)], GeneratorStats(), None)
    two = summarise([done(0.0, 0.2, 1.0)], GeneratorStats(), None)
    lines = comparison(("a", "b"), one, two).splitlines()
    assert next(ln for ln in lines if ln.startswith("first token, ms p50")).endswith("2.000")


def test_prompts_that_an_earlier_run_left_in_the_cache_are_named():
    cached = summarise(
        [done(0.0, 0.1, 1.0, prompt_tokens=100, cached_tokens=60)], GeneratorStats(), None
    )
    assert result_warnings(cached) == []
    [said] = result_warnings(cached | {"expect_uncached": True})
    assert said.startswith("60% of the prompt tokens came from the server's cache")


def test_a_timeline_has_each_token_where_it_came():
    record = done(0.0, 0.5, 10.0, tokens=4, gaps=[4.0, 5.0], seen=4)
    points = timeline([record])
    width = points[1][0] - points[0][0]
    came = [(round(at, 1), round(rate * width, 6)) for at, rate, _ in points if rate]
    assert came == [(0.6, 2.0), (4.6, 1.0), (9.6, 1.0)]


def test_a_timeline_keeps_every_token_and_second():
    records = [done(0.0, 0.1, 1.5), done(0.5, 1.0, 3.0)]
    points = timeline(records)
    width = points[1][0] - points[0][0]
    assert sum(rate for _, rate, _ in points) * width == pytest.approx(22)
    assert sum(flight for _, _, flight in points) * width == pytest.approx(1.5 + 2.5)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--rate", "-1"], "--rate"),
        (["--concurrency", "1", "--rate", "1"], "not allowed with"),
        (["--trace", "/none"], "the trace /none cannot be read"),
        (["--prompts", "/none"], "the file of prompts /none cannot be read"),
        (["--timeout", "1x"], "--timeout"),
        (["--requests", "0"], "--requests"),
        (["--speed", "2"], "--speed has no effect here"),
        (["--arrivals", "even"], "--arrivals has no effect here: it is of --rate"),
        (["--trace", "x", "--input-tokens", "8"], "--input-tokens has no effect here: --trace"),
        (["--trace", "x", "--concurrency", "2", "--speed", "2"], "--speed has no effect here"),
        (["--prompts", "x", "--shared-prefix", "8"], "--shared-prefix has no effect here"),
    ],
)
def test_flags_that_make_no_sense(flags, says):
    with pytest.raises(ConfigError, match=says):
        _plan(_parser().parse(flags))


LINE = '{"timestamp": %d, "input_length": 600, "output_length": 4, "hash_ids": [1, %d]}\n'
"""Of a trace."""


@pytest.mark.parametrize(("flags", "lengths"), [([], [4]), (["--output-tokens", "9"], [9])])
def test_answers_of_a_trace_are_its_own_unless_told_otherwise(tmp_path, flags, lengths):
    path = tmp_path / "trace"
    path.write_text(LINE % (0, 2))
    plan = _plan(_parser().parse(["--trace", str(path), *flags]))
    assert [ask.max_tokens for ask in plan.asks] == lengths


def test_the_conversation_trace_is_asked_as_it_is():
    path = trace("conversation_trace.jsonl")
    plan = _plan(_parser().parse(["--trace", str(path), "--requests", "300", "--speed", "2"]))
    wanted = list(itertools.islice(open_trace(path), 300))
    asked = list(plan.asks)
    assert plan.total == 300
    assert [ask.at for ask in asked] == pytest.approx([one.at / 2 for one in wanted])
    assert [len(ask.prompt) for ask in asked] == [length_of(one.pieces) for one in wanted]
    assert [ask.max_tokens for ask in asked] == [one.output_tokens for one in wanted]


def test_a_traces_moments_are_spread_by_a_seed(tmp_path):
    path = tmp_path / "trace"
    path.write_text("".join(LINE % (3000 * (number // 9), number + 2) for number in range(18)))

    def moments(seed: str) -> list[float | None]:
        flags = ["--trace", str(path), "--jitter", "3s", "--speed", "3", "--seed", seed]
        return [ask.at for ask in _plan(_parser().parse(flags)).asks]

    spread = moments("0")
    assert len(set(spread)) == 18
    assert spread == sorted(spread, key=lambda at: at or 0.0) == moments("0") != moments("1")
    assert all(at is not None and 0 <= at < 2 for at in spread)


# ---------------------------------------------------------------- loops


@contextlib.asynccontextmanager
async def client_of(url: str, **options: Any) -> AsyncIterator[Client]:
    async with Client(url, model="m", retries=options.pop("retries", 0), **options) as client:
        yield client


def asks(count: int, every: float = 0.0) -> Iterator[SampleRequest]:
    return (SampleRequest(number, "hello", 3, number * every) for number in range(count))


CHAT = RequestTemplate(endpoint="chat")


async def test_a_closed_loop_has_so_many_under_way_and_counts_them_all():
    async with scripted(stream("a", "b")) as server, client_of(server.url) as client:
        most = 0

        def seen(run: Any) -> None:
            nonlocal most
            most = max(most, run.in_flight)

        run = await measure(client, CHAT, LoadConfig(concurrency=3), asks(40), seen)
    assert len(server.requests) == len(run.records) == run.ended == 40
    assert all(record.completed and record.seen == 2 for record in run.records)
    assert most <= 3
    assert run.in_flight == 0


async def test_an_open_loop_keeps_its_rate_while_no_answer_comes():
    silent = scripted(b"HTTP/1.1 200 OK\r\n", hold=True)
    async with silent as server, client_of(server.url, timeout=1.5) as client:
        run = await measure(client, CHAT, LoadConfig(most_in_flight=15), asks(20, every=0.01))
    assert len(run.records) == 15
    assert run.pace.dropped == 5
    assert {record.error for record in run.records} == {"Timeout"}
    assert [record.intended for record in run.records] == [n * 0.01 for n in range(15)]
    early = 0.001  # uvloop counts in whole milliseconds
    assert all(record.sent >= record.intended - early for record in run.records)


async def test_errors_by_kind_and_retries_are_counted():
    answers = (failure(503, code="draining"), stream("a"), stream("a", end=b""), failure(400))
    async with scripted(*answers) as server, client_of(server.url, retries=1) as client:
        run = await measure(client, CHAT, LoadConfig(concurrency=1), asks(3))
    numbers = summarise(run.records, run.pace, None)
    assert numbers["errors"] == {"StreamBroken": 1, "400 c": 1}
    assert (numbers["completed"], numbers["retries"]) == (1, 1)
    assert len(server.requests) == 4


async def test_cancelling_gives_what_there_is():
    task: asyncio.Task[BenchRun] | None = None

    def stop(run: BenchRun) -> None:
        if len(run.records) == 2 and task is not None:
            task.cancel()

    silent = scripted(stream("a"), b"HTTP/1.1 200 OK\r\n", hold=True)
    async with silent as server, client_of(server.url, timeout=60.0) as client:
        task = asyncio.create_task(measure(client, CHAT, LoadConfig(concurrency=1), asks(9), stop))
        run = await task
    assert run.pace.interrupted
    assert [record.error for record in run.records] == ["", "cancelled"]


async def test_a_duration_ends_the_sending():
    async with scripted(stream("a")) as server, client_of(server.url) as client:
        endless = (SampleRequest(number, "hello", 1) for number in itertools.count())
        run = await measure(client, CHAT, LoadConfig(concurrency=2, duration=0.1), endless)
        planned = await measure(client, CHAT, LoadConfig(duration=0.1), asks(1000, every=0.02))
    assert run.records
    assert max(record.sent for record in run.records) <= max(r.ended or 0 for r in run.records)
    assert [record.intended for record in planned.records] == pytest.approx(
        [0.0, 0.02, 0.04, 0.06, 0.08]
    )


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    with serving(model, "--engine", "instant") as server:
        yield server


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *flags], capture_output=True, text=True, timeout=PATIENCE)


def test_a_run_says_the_same_as_the_server(server, tmp_path):
    file = tmp_path / "run.json"
    lengths = ("--input-tokens", "uniform:10:40", "--output-tokens", "uniform:3:9")
    flags = (*lengths, "--ignore-eos", "--seed", "5")
    done = bench("--url", server.url, *flags, "--requests", "12", "--json", str(file))
    assert done.returncode == exit_codes.OK, done.stderr
    assert done.stderr == ""
    assert "12 of 12 requests answered" in done.stdout
    whole = json.loads(file.read_text())
    plan = _plan(_parser().parse([*BENCH[4:], *flags, "--requests", "12"]))
    wanted: dict[int, Any] = {ask.number: (len(ask.prompt), ask.max_tokens) for ask in plan.asks}
    found = {
        one["number"]: (one["prompt_tokens"], one["output_tokens"]) for one in whole["requests"]
    }
    assert found == wanted
    assert whole["summary"]["output_tokens"] == sum(tokens for _, tokens in wanted.values())
    assert whole["summary"]["tokens_from_usage"]
    assert whole["server"]["model"] == "tiny"


@pytest.fixture(scope="module")
def caching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps prompts in its cache."""
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    with serving(model, "--engine", "sim", "--aggregated") as server:
        yield server


def test_a_second_run_draws_other_prompts_and_the_same_seed_is_warned_of(caching, tmp_path):
    flags = ("--url", caching.url, "--endpoint", "chat", "--input-tokens", "60", "--requests", "40")
    seeds: list[int] = []
    cached: list[float] = []
    for number, more in enumerate(((), (), ("--seed",))):
        file = tmp_path / str(number)
        seed = (*more, str(seeds[-1])) if more else ()
        run = bench(*flags, *seed, "--output-tokens", "1", "--json", str(file))
        assert run.returncode == exit_codes.OK, run.stderr
        numbers = json.loads(file.read_text())["summary"]
        seeds.append(numbers["seed"])
        cached.append(numbers["cached_tokens"] / numbers["prompt_tokens"])
        assert f"seed          {seeds[-1]}" in run.stdout
        assert ("an earlier run had the same --seed" in run.stdout) == bool(more)
    assert seeds[0] != seeds[1] == seeds[2]
    assert max(cached[:2]) < 0.05 < cached[2]


def test_chat_from_a_file_and_an_open_loop(server, tmp_path):
    path = tmp_path / "prompts"
    path.write_text("hello\nworld\n")
    done = bench("--url", server.url, "--prompts", str(path), "--rate", "200", "--requests", "5")
    assert done.returncode == exit_codes.OK, done.stderr
    assert "5 of 5 requests answered" in done.stdout


def test_a_trace_with_its_moments(server, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINE % (number * 100, number + 2) for number in range(4)))
    file = tmp_path / "run.json"
    done = bench("--url", server.url, "--trace", str(path), "--speed", "10", "--json", str(file))
    assert done.returncode == exit_codes.OK, done.stderr
    whole = json.loads(file.read_text())
    assert [one["intended"] for one in whole["requests"]] == pytest.approx([0, 0.01, 0.02, 0.03])
    assert {one["prompt_tokens"] for one in whole["requests"]} == {600}


def test_plots(server, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "run.png"
    done = bench("--url", server.url, "--requests", "3", "--plot", str(file))
    assert done.returncode == exit_codes.OK, done.stderr
    assert file.read_bytes().startswith(b"\x89PNG")


def test_when_all_fail_the_status_says_so(server):
    done = bench("--url", server.url, "--requests", "2", "--model", "nobody")
    assert done.returncode == exit_codes.FAILED
    assert "2 failed: 404 model_not_found, such as: " in done.stdout
    assert "first token" not in done.stdout, "no table of nothing"


def test_the_bundled_model_knows_the_ids_that_are_made_up():
    config = json.loads((Path(pdserve.__file__).parent / "bundled" / "config.json").read_bytes())
    plan = _plan(_parser().parse([]))
    asked = [*plan.warm, *plan.asks]
    prompts: list[Any] = [ask.prompt for ask in asked]
    assert max(map(max, prompts)) < config["vocab_size"]


def test_nobody_there_is_one_line():
    done = bench("--url", "http://127.0.0.1:1", "--requests", "2")
    assert done.returncode == exit_codes.FAILED
    assert "no server answers" in done.stderr
    assert "start one with `pdserve`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_reports_what_there_is(server):
    flags = ("--url", server.url, "--duration", "600s", "--concurrency", "1")
    with subprocess.Popen(
        [*BENCH, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            name = "pdserve_http_requests_in_flight"
            deadline = time.monotonic() + PATIENCE / 3
            while not server.metric(name):
                assert time.monotonic() < deadline, "it sent nothing"
            os.kill(process.pid, signal.SIGINT)
            said, wrong = process.communicate(timeout=PATIENCE / 3)
        finally:
            process.kill()
    assert "interrupted" in said, wrong
    assert wrong == ""
