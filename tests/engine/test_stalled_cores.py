"""Real cores that are stopped, hang or are paused with their node: who is ended, and who is not."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from pdserve.engine.client import CoreClient, CoreClientOptions
from pdserve.engine.launcher import ProcessLauncher
from pdserve.engine.port import EngineState
from pdserve.engine.restart import CoreRestartPolicy
from pdserve.engine.shared_process import SharedCoreProcess
from pdserve.errors import EngineDied, EngineStalled
from pdserve.messages.engine import EngineSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.scripted import ENGINE, reference_tokens
from pdserve.testing.sinks import CheckingSink, until
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HANG = 93
OFTEN = CoreRestartPolicy(max_restarts=50, first_delay=0.01, max_delay=0.05)
TIMEOUT = 2.0
"""Long enough for what else this machine does."""


def spec(**options: str) -> EngineSpec:
    known = {"hang_on": str(HANG), "step_ms": "20"} | options
    return EngineSpec(
        engine=ENGINE, model="", block_size=4, max_batch_tokens=32, max_sequences=8, options=known
    )


def request(*prompt: int, **sampling: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"max_tokens": 8} | sampling
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(prompt or (11, 12, 13)),
        sampling=SamplingParams(**fields),
    )


class Watched:
    """A client and the processes of its cores."""

    def __init__(self, given: EngineSpec, stall_timeout: float, canary_interval: float) -> None:
        self.launchers: list[ProcessLauncher] = []
        self.reasons: list[str] = []
        self.client = CoreClient(
            given,
            CoreClientOptions(
                restart=OFTEN, stall_timeout=stall_timeout, canary_interval=canary_interval
            ),
            make_launcher=self.launcher,
            on_state=lambda state, reason: self.reasons.append(f"{state.value}: {reason}"),
        )

    def launcher(self) -> ProcessLauncher:
        self.launchers.append(ProcessLauncher(on_line=lambda line: None))
        return self.launchers[-1]

    def send(self, what: signal.Signals) -> None:
        pid = self.launchers[-1].pid
        assert pid is not None
        os.kill(pid, what)

    def rests(self) -> bool:
        page = self.launchers[-1].page
        return page is not None and page.look().what == "its sleep"

    async def ready_again(self) -> None:
        await until(lambda: self.client.state is EngineState.READY)

    async def serves(self) -> None:
        ledger = await CheckingSink(self.client, request()).wait()
        assert ledger.tokens[0] == reference_tokens(request())


@asynccontextmanager
async def running(
    stall_timeout: float = TIMEOUT, canary_interval: float = 0.0
) -> AsyncIterator[Watched]:
    watched = Watched(spec(), stall_timeout, canary_interval)
    await watched.client.start()
    try:
        yield watched
    finally:
        await watched.client.stop()


async def test_a_stopped_core_is_found_out_and_replaced_while_it_has_work():
    async with running() as watched:
        sinks = [CheckingSink(watched.client, request(n, max_tokens=200)) for n in range(20, 40)]
        await sinks[0].some()
        watched.send(signal.SIGSTOP)
        began = time.monotonic()
        ledgers = [await sink.wait() for sink in sinks]
        took = time.monotonic() - began
        assert TIMEOUT * 0.9 <= took <= TIMEOUT + 5.0
        for ledger in ledgers:
            assert type(ledger.error) is EngineStalled
            assert "stalled for" in ledger.error.message
        assert any("restarting: the engine stalled" in reason for reason in watched.reasons)
        await watched.ready_again()
        await watched.serves()
        assert (watched.client.stalls, watched.client.restarts) == (1, 1)
        assert watched.client.stalled_for < TIMEOUT


async def test_an_idle_core_that_was_stopped_is_found_out_by_the_next_request():
    async with running(stall_timeout=1.0) as watched:
        await watched.serves()
        await until(watched.rests)
        watched.send(signal.SIGSTOP)
        await asyncio.sleep(2.5)
        assert watched.client.stalls == 0
        assert watched.client.state is EngineState.READY
        assert type((await CheckingSink(watched.client, request()).wait()).error) is EngineStalled
        await watched.ready_again()
        await watched.serves()


async def test_a_canary_finds_out_an_idle_core_that_was_stopped():
    async with running(stall_timeout=1.0, canary_interval=0.3) as watched:
        await watched.serves()
        before = watched.client.stats()
        await asyncio.sleep(1.5)
        watched.client.query_stats()
        await until(lambda: watched.client.stats().steps > before.steps)  # it was at work
        stats = watched.client.stats()
        counters = ("prompt_tokens", "output_tokens", "finished", "aborted")
        assert [getattr(stats, name) for name in counters] == [
            getattr(before, name) for name in counters
        ]
        assert await watched.client.drain(0.0)  # nobody waits for a canary
        watched.send(signal.SIGSTOP)
        await until(lambda: watched.client.stalls == 1)
        await watched.ready_again()


async def test_a_core_that_is_stopped_for_less_goes_on_as_if_nothing_had_happened():
    async with running(stall_timeout=10.0) as watched:
        sink = CheckingSink(watched.client, request(max_tokens=50))
        await sink.some()
        watched.send(signal.SIGSTOP)
        await until(lambda: watched.client.stalled_for > 1.0)
        watched.send(signal.SIGCONT)
        ledger = await sink.wait()
        assert ledger.tokens[0] == reference_tokens(request(max_tokens=50))
        assert watched.client.stalls == 0


async def test_cores_that_stall_again_and_again_leave_no_descriptor():
    async with running(stall_timeout=0.6) as watched:
        await watched.serves()
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1, 4):
            watched.send(signal.SIGSTOP)
            error = (await CheckingSink(watched.client, request()).wait()).error
            assert type(error) is EngineStalled
            await until(lambda number=number: watched.client.restarts >= number)  # type: ignore[misc]
            await watched.ready_again()
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_a_core_that_stalls_takes_those_of_its_process_with_it():
    """Nothing less can be ended; whoever was there meanwhile hears of a death, not of a stall."""
    shared = SharedCoreProcess(2, on_line=lambda line: None)
    clients = [
        CoreClient(
            spec(),
            CoreClientOptions(restart=OFTEN, stall_timeout=TIMEOUT),
            make_launcher=functools.partial(shared.launcher, member),
        )
        for member in range(2)
    ]
    await asyncio.gather(*(client.start() for client in clients))
    try:
        other = CheckingSink(clients[1], request(max_tokens=250))
        hung = CheckingSink(clients[0], request(HANG))
        assert type((await hung.wait()).error) is EngineStalled
        ledger = await other.wait()
        assert type(ledger.error) is EngineDied
        assert ledger.tokens[0]
        for client in clients:
            await until(lambda c=client: c.state is EngineState.READY)  # type: ignore[misc]
            done = await CheckingSink(client, request()).wait()
            assert done.tokens[0] == reference_tokens(request())
        assert [client.stalls for client in clients] == [1, 0]
    finally:
        await asyncio.gather(*(client.stop() for client in clients))


def test_a_pause_of_node_and_core_is_no_stall():
    """A laptop that sleeps, a container that is frozen: nobody did anything, nobody looked."""
    node = textwrap.dedent(f"""
        import asyncio
        from pdserve.engine.launcher import ProcessLauncher
        from pdserve.engine.client import CoreClientOptions, CoreClient
        from pdserve.messages.engine import EngineSpec
        from pdserve.messages.request import GenerateRequest, SamplingParams
        from pdserve.testing.scripted import ENGINE
        from pdserve.testing.sinks import CheckingSink

        async def main():
            launchers = []
            def make():
                launchers.append(ProcessLauncher())
                return launchers[-1]
            spec = EngineSpec(engine=ENGINE, model="", options={{"step_ms": "20"}})
            options = CoreClientOptions(stall_timeout={TIMEOUT})
            client = CoreClient(spec, options, make_launcher=make)
            await client.start()
            sampling = SamplingParams(max_tokens=150)
            request = GenerateRequest(request_id="r", model="m", prompt=[5], sampling=sampling)
            sink = CheckingSink(client, request)
            await sink.some()
            print(launchers[0].pid, flush=True)
            ledger = await sink.wait()
            print(client.stalls, client.restarts, len(ledger.tokens[0]), flush=True)
            await client.stop()

        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", node], stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        core = int(ran.stdout.readline())
        try:
            for pid in (ran.pid, core):
                os.kill(pid, signal.SIGSTOP)
            time.sleep(2 * TIMEOUT)
            for pid in (ran.pid, core):
                os.kill(pid, signal.SIGCONT)
            assert ran.stdout.readline().split() == ["0", "0", "150"]
            assert ran.wait(20) == 0
        finally:
            ran.kill()
