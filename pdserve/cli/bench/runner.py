"""Sends requests and measures times: closed loop with N callers, or open loop by schedule.

An open loop never waits for answers: at `most_in_flight` a request is dropped and counted, and the
delay between intended and actual send times is measured. Cancellation ends running requests and
returns the results so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.cli.bench.record import BenchRecord
from pdserve.cli.bench.summary import GeneratorStats
from pdserve.client import ClientError
from pdserve.client.errors import APIError, StreamBroken
from pdserve.protocols.completion_responses import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.cli.bench.workload import SampleRequest
    from pdserve.client import Client
    from pdserve.ids import Seconds
    from pdserve.protocols.completion_responses import Usage

__all__ = ["BenchRun", "LoadConfig", "RequestTemplate", "measure"]

_TICK: Seconds = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTemplate:
    """What all requests of a run have in common."""

    endpoint: str = "completions"
    """chat, completions or embeddings."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of every request, such as `ignore_eos`."""
    exact: bool = False
    """True if answers have exactly the requested length, by `ignore_eos` and `min_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """The times at which requests are sent."""

    concurrency: int = 0
    """Number of callers, each with one request at a time; 0: an open loop, with the workload's
    arrival times."""
    most_in_flight: int = 1024
    duration: Seconds | None = None
    """Seconds after which no request is sent; None: no limit."""


@dataclass(slots=True)
class BenchRun:
    """The results so far."""

    records: list[BenchRecord] = field(default_factory=list)
    pace: GeneratorStats = field(default_factory=GeneratorStats)
    in_flight: int = 0
    ended: int = 0
    begin: Seconds = field(default_factory=time.perf_counter)

    def now(self) -> Seconds:
        """Seconds since the start."""
        return time.perf_counter() - self.begin


async def measure(
    client: Client,
    target: RequestTemplate,
    load: LoadConfig,
    asks: Iterator[SampleRequest],
    show: Callable[[BenchRun], None] = lambda run: None,
) -> BenchRun:
    """Sends all requests and returns the results. Cancellation: ends the running requests and
    returns the results so far."""
    run = BenchRun()
    cpu = time.process_time()
    watch = asyncio.create_task(_watch(run, show))
    try:
        async with asyncio.TaskGroup() as group:
            if load.concurrency:
                for _ in range(load.concurrency):
                    group.create_task(_caller(client, target, load, asks, run))
            else:
                await _schedule(group, client, target, load, asks, run)
    except asyncio.CancelledError:
        run.pace.interrupted = True
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
    run.pace.cpu_share = (time.process_time() - cpu) / max(run.now(), 1e-9)
    return run


async def _caller(
    client: Client,
    target: RequestTemplate,
    load: LoadConfig,
    asks: Iterator[SampleRequest],
    run: BenchRun,
) -> None:
    for ask in asks:
        if load.duration is not None and run.now() >= load.duration:
            return
        run.in_flight += 1
        await _one(client, target, ask, run, run.now())


async def _schedule(
    group: asyncio.TaskGroup,
    client: Client,
    target: RequestTemplate,
    load: LoadConfig,
    asks: Iterator[SampleRequest],
    run: BenchRun,
) -> None:
    for ask in asks:
        at = ask.at or 0.0
        if load.duration is not None and at >= load.duration:
            return
        # It sleeps even when it is late, because answers must be read while requests are sent.
        await asyncio.sleep(max(0.0, at - run.now()))
        if run.in_flight >= load.most_in_flight:
            run.pace.dropped += 1
            continue
        run.in_flight += 1
        group.create_task(_one(client, target, ask, run, at))


async def _one(
    client: Client, target: RequestTemplate, ask: SampleRequest, run: BenchRun, intended: Seconds
) -> None:
    record = BenchRecord(ask.number, intended, sent=run.now())
    run.records.append(record)
    try:
        if target.endpoint == "embeddings":
            await _embed(client, ask, record)
        else:
            await _generate(client, target, ask, record, run)
    except ClientError as error:
        record.error, record.message = _kind(error), error.message
        record.attempts = error.attempts
    except asyncio.CancelledError:
        record.error = "cancelled"
        raise
    finally:
        record.ended = run.now()
        run.in_flight -= 1
        run.ended += 1


async def _generate(
    client: Client, target: RequestTemplate, ask: SampleRequest, record: BenchRecord, run: BenchRun
) -> None:
    fields = _fields(target, ask)
    prompt: Any = ask.prompt
    stream: Any = (
        client.chat_stream(prompt, **fields)
        if target.endpoint == "chat"
        else client.complete_stream(prompt, **fields)
    )
    async with stream:
        record.attempts = stream.attempts
        record.worker = stream.headers.get("x-pdserve-worker", "")
        length = 0
        async for chunk in stream:
            running = None if chunk.usage is None else chunk.usage.completion_tokens
            brought = stream.length > length
            length = stream.length
            record.on_chunk(run.now(), running, brought)
    record.finish_reason = stream.finish_reason or ""
    _on_usage(record, stream.usage)


def _fields(target: RequestTemplate, ask: SampleRequest) -> dict[str, Any]:
    fields = {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **target.fields,
    }
    if ask.max_tokens is not None:
        fields["max_tokens"] = ask.max_tokens
        if target.exact:
            fields |= {"ignore_eos": True, "min_tokens": ask.max_tokens}
    return fields


def _on_usage(record: BenchRecord, usage: Usage | None) -> None:
    record.output_tokens = record.seen
    if usage is None:
        return
    record.prompt_tokens = usage.prompt_tokens
    record.output_tokens = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens
    # If the headers were sent before a worker was found, the usage names it.
    if isinstance(usage.pdserve, Served):
        record.worker = record.worker or usage.pdserve.worker


async def _embed(client: Client, ask: SampleRequest, record: BenchRecord) -> None:
    prompt: Any = ask.prompt
    answer = await client.embed(prompt)
    if answer.usage is not None:
        record.prompt_tokens = answer.usage.prompt_tokens


def _kind(error: ClientError) -> str:
    if isinstance(error, APIError):
        return f"{error.status} {error.code or type(error).__name__}"
    if isinstance(error, StreamBroken) and error.error is not None:
        return f"stream broken: {error.error.code or type(error.error).__name__}"
    return type(error).__name__


async def _watch(run: BenchRun, show: Callable[[BenchRun], None]) -> None:
    """Measures the event loop's lag and updates the progress line."""
    while True:
        before = run.now()
        await asyncio.sleep(_TICK)
        run.pace.lags.append(max(0.0, run.now() - before - _TICK))
        show(run)
