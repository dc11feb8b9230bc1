"""The client keeps its promises when the core does not: crashes, hangs, garbage, restarts."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.engine.client import CoreClient, CoreClientOptions
from pdserve.engine.launcher import ProcessLauncher
from pdserve.engine.port import EngineState
from pdserve.engine.restart import CoreRestartPolicy
from pdserve.errors import (
    ConfigError,
    Draining,
    EngineDied,
    EngineError,
    EngineStalled,
    NotReady,
    Overloaded,
    PayloadTooLarge,
    StepFailed,
)
from pdserve.messages.engine import CoreReady, EngineSpec
from pdserve.messages.kv_events import TIERS, BlockStored, KvEvent, PoolCleared
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.scripted import ENGINE, reference_tokens
from pdserve.testing.sinks import CheckingSink, until
from pdserve.token_ids import token_ids
from pdserve.wire.length_prefixed import encode_frame
from tests.engine.test_core_run import PlayedCarrier
from tests.engine_core.test_main import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from pdserve.messages.request import TokenDelta

RAISE, BREAK, DIE, HANG = 90, 91, 92, 93
FAST = CoreRestartPolicy(max_restarts=3, first_delay=0.01, max_delay=0.01)


def spec(**options: str) -> EngineSpec:
    """`step_ms` where a test must come between two steps."""
    faults = {"raise_on": RAISE, "break_on": BREAK, "die_on": DIE, "hang_on": HANG}
    return EngineSpec(
        engine=ENGINE,
        model="",
        block_size=4,
        max_batch_tokens=32,
        max_sequences=8,
        options={name: str(token) for name, token in faults.items()} | options,
    )


def request(*prompt: int, **sampling: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"max_tokens": 8} | sampling
    tokens = list(prompt) or [11, 12, 13]
    return GenerateRequest(
        request_id="r", model="m", prompt=token_ids(tokens), sampling=SamplingParams(**fields)
    )


class Watched:
    """A client with its launchers and states on record."""

    def __init__(
        self,
        given: EngineSpec | None = None,
        oom_kills: Callable[[], int] = lambda: 0,
        **options: Any,
    ) -> None:
        self.launchers: list[ProcessLauncher] = []
        self.states: list[EngineState] = []
        self.client = CoreClient(
            given or spec(),
            CoreClientOptions(**({"restart": FAST} | options)),
            on_state=lambda state, reason: self.states.append(state),
            make_launcher=self.launcher,
            oom_kills=oom_kills,
        )

    def launcher(self) -> ProcessLauncher:
        self.launchers.append(ProcessLauncher(on_line=lambda line: None))
        return self.launchers[-1]

    @property
    def pid(self) -> int:
        pid = self.launchers[-1].pid
        assert pid is not None
        return pid

    def be_patient(self) -> None:
        """From now on a core may be as slow as this machine makes it."""
        client = self.client
        client._options = dataclasses.replace(client._options, stall_timeout=600.0)
        if client._life is not None:
            client._life._options = client._options

    async def ready_again(self) -> None:
        await until(lambda: self.client.state is EngineState.READY)

    async def ready_for_the(self, time: int) -> None:
        await until(lambda: self.states.count(EngineState.READY) == time)

    async def serves(self) -> None:
        ledger = await CheckingSink(self.client, request()).wait()
        assert ledger.tokens[0] == reference_tokens(request())


@asynccontextmanager
async def running(given: EngineSpec | None = None, **options: Any) -> AsyncIterator[Watched]:
    watched = Watched(given, **options)
    await watched.client.start()
    try:
        yield watched
    finally:
        await watched.client.stop()


# ------------------------------------------------------------------ crashes


async def test_the_pool_is_known_before_the_core_reports():
    played = PlayedCarrier()
    client = CoreClient(spec(), make_launcher=lambda: played)
    starting = asyncio.ensure_future(client.start())
    await until(lambda: played.core is not None)
    assert client.stats().blocks_total == 0
    await played.hear()
    played.say(CoreReady(capabilities=CAPABILITIES))
    await starting
    assert client.stats().blocks_total == client.stats().blocks_free == CAPABILITIES.num_blocks > 0
    played.end()
    await client.stop()
    assert client.stats().blocks_total == 0


async def test_a_killed_core_ends_every_request_once_and_comes_back():
    async with running(spec(step_ms="20")) as watched:
        client, events = watched.client, list[KvEvent]()
        client.subscribe_kv(events.extend)
        await watched.serves()
        sinks = [CheckingSink(client, request(n, max_tokens=200)) for n in range(20, 60)]
        await sinks[0].some()
        os.kill(watched.pid, signal.SIGKILL)
        for sink in sinks:
            ledger = await sink.wait()
            assert type(ledger.error) is EngineDied
            assert ledger.error.message == "the engine process was killed by SIGKILL"
        assert events[-len(TIERS) :] == [PoolCleared(tier) for tier in TIERS]
        assert client.capabilities is None
        assert client.stats().running == 0
        await watched.ready_again()
        await watched.serves()
        assert client.restarts == 1
        assert [sink.checked().deltas >= 0 for sink in sinks]  # nothing came after the error
    assert watched.states == [
        EngineState.LOADING,
        EngineState.READY,
        EngineState.RESTARTING,  # the connection was lost
        EngineState.RESTARTING,  # the reason is known
        EngineState.RESTARTING,  # the successor starts
        EngineState.READY,
        EngineState.STOPPED,
    ]


async def test_a_secret_reaches_the_core_and_its_successor():
    async with running(msgspec.structs.replace(spec(), hash_secret=b"first")) as watched:
        client, stored = watched.client, list[bytes]()

        def note(events: Sequence[KvEvent]) -> None:
            for event in events:
                stored.extend(event.hashes if isinstance(event, BlockStored) else ())

        client.subscribe_kv(note)

        async def names(secret: bytes) -> None:
            stored.clear()
            wanted = request(*range(10, 10 + 3 * 4))
            await CheckingSink(client, wanted).wait()
            await until(lambda: len(stored) >= 3)
            root = prompt_root(secret, "scripted", "")
            expected = block_hashes(wanted.prompt, 4, parent=root, secret=secret)
            assert stored[:3] == expected

        await names(b"first")
        client.rekey(b"second")
        await names(b"second")
        os.kill(watched.pid, signal.SIGKILL)
        await until(lambda: client.state is EngineState.RESTARTING)
        client.rekey(b"third")
        await watched.ready_again()
        await names(b"third")
        os.kill(watched.pid, signal.SIGKILL)
        await until(lambda: client.state is EngineState.RESTARTING)
        await watched.ready_again()
        await names(b"third")


async def test_the_last_line_of_stderr_is_in_the_error():
    async with running() as watched:
        ledger = await CheckingSink(watched.client, request(DIE)).wait()
        assert ledger.error is not None
        assert ledger.error.message == (
            "the engine process was killed by SIGKILL: the script says: die"
        )


async def test_while_it_restarts_requests_are_turned_away_with_a_time():
    slow = CoreRestartPolicy(first_delay=30.0, max_delay=30.0)
    async with running(restart=slow) as watched:
        os.kill(watched.pid, signal.SIGKILL)
        await until(lambda: watched.client.state is EngineState.RESTARTING)
        with pytest.raises(NotReady) as caught:
            CheckingSink(watched.client, request())
        assert caught.value.retry_after
        await until(lambda: "SIGKILL" in watched.client.state_reason)
    # stop() did not wait for the back-off


async def test_a_core_that_keeps_dying_is_given_up(caplog):
    caplog.set_level("INFO", "pdserve.engine.client")
    async with running() as watched:
        client = watched.client
        for _ in range(FAST.max_restarts + 1):
            await watched.ready_again()
            assert isinstance((await CheckingSink(client, request(DIE)).wait()).error, EngineDied)
        await until(lambda: client.state is EngineState.FAILED)
        assert client.restarts == FAST.max_restarts
        assert "SIGKILL" in client.state_reason
        with pytest.raises(EngineDied, match="is not restarted"):
            CheckingSink(client, request())
        await client.stop()
        assert client.state is EngineState.FAILED
    restarted = [line for line in caplog.messages if line.startswith("the engine is ready again")]
    assert len(restarted) == FAST.max_restarts
    assert caplog.messages[-1] == (
        f"the engine is not restarted after {FAST.max_restarts + 1} deaths within 60 s: "
        "the engine process was killed by SIGKILL: the script says: die (if no one killed it "
        "on purpose, memory ran out: see the system's log, and try a smaller --kv-memory)"
    )


async def test_a_failed_step_costs_its_requests_only():
    async with running(spec(step_ms="20")) as watched:
        bystander = CheckingSink(watched.client, request(max_tokens=200))
        await bystander.some()
        ledger = await CheckingSink(watched.client, request(RAISE)).wait()
        assert type(ledger.error) is StepFailed
        assert "RuntimeError: the script says" in ledger.error.message
        await watched.serves()
        assert watched.client.restarts == 0
        # It was in the same step, whose results are lost.
        assert type((await bystander.wait()).error) is StepFailed


async def test_a_broken_executor_restarts_the_core():
    async with running() as watched:
        ledger = await CheckingSink(watched.client, request(BREAK)).wait()
        assert isinstance(ledger.error, EngineError)
        await until(lambda: watched.client.restarts == 1)
        await watched.ready_again()
        await watched.serves()


async def test_a_core_that_hangs_is_killed_and_replaced():
    async with running(stall_timeout=0.4) as watched:
        ledger = await CheckingSink(watched.client, request(HANG)).wait()
        assert isinstance(ledger.error, EngineStalled)
        assert "stalled for" in ledger.error.message
        assert "in step" in ledger.error.message
        assert watched.client.stalls == 1
        watched.be_patient()
        await watched.ready_again()
        await watched.serves()


async def test_long_silence_without_work_is_no_hang():
    async with running(stall_timeout=1.0) as watched:  # more than a busy machine takes
        await asyncio.sleep(2.5)
        watched.be_patient()
        await watched.serves()
        assert watched.client.restarts == 0


async def test_a_long_step_is_no_hang_as_long_as_it_ends():
    async with running(spec(step_ms="400"), stall_timeout=3.0) as watched:  # ten steps
        sinks = [CheckingSink(watched.client, request(n, max_tokens=8)) for n in range(3)]
        for sink in sinks:
            assert (await sink.wait()).error is None
        assert watched.client.restarts == 0


# ------------------------------------------------------------------ loading


async def test_a_load_error_is_raised_by_start_and_not_repeated():
    watched = Watched(spec(load_error="this checkpoint is not for us"))
    with pytest.raises(ConfigError, match="not for us"):
        await watched.client.start()
    assert watched.client.state is EngineState.FAILED
    assert len(watched.launchers) == 1
    with pytest.raises(EngineDied, match="not for us"):
        CheckingSink(watched.client, request())


async def test_what_was_loaded_once_is_tried_again_though_it_cannot_be_at_once():
    """As when memory is short for a moment."""
    async with running() as watched:
        good = watched.client._spec
        watched.client._spec = spec(load_error="memory is short")
        os.kill(watched.pid, signal.SIGKILL)
        await until(lambda: "memory is short" in watched.client.state_reason)
        assert watched.client.state is EngineState.RESTARTING
        watched.client._spec = good
        await watched.ready_again()
        await watched.serves()


async def test_a_core_that_dies_while_loading_fails_the_start():
    watched = Watched(spec(load_ms="60000"))
    starting = asyncio.ensure_future(watched.client.start())
    await until(lambda: watched.client.state_reason == "reading the script")
    os.kill(watched.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="killed by SIGKILL"):
        await starting


async def test_loading_has_a_deadline():
    watched = Watched(spec(load_ms="60000"), load_timeout=0.2)
    with pytest.raises(EngineDied, match=r"not ready within 0\.2 s"):
        await watched.client.start()


async def test_cancelling_the_start_kills_the_core():
    watched = Watched(spec(load_ms="60000"))
    starting = asyncio.ensure_future(watched.client.start())
    await until(lambda: watched.client.state_reason == "reading the script")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert watched.client.state is EngineState.STOPPED


async def test_a_client_starts_once():
    async with running() as watched:
        with pytest.raises(RuntimeError, match="starts once"):
            await watched.client.start()


async def test_an_unknown_engine_is_the_operators_mistake():
    client = CoreClient(EngineSpec(engine="tooorch", model=""))
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        await client.start()


# ------------------------------------------------------------------ ends


async def test_a_core_that_does_not_stop_is_ended_by_force():
    async with running(stop_timeout=0.1, kill_timeout=1.0) as watched:
        sink = CheckingSink(watched.client, request(HANG))
        await asyncio.sleep(0.05)
        pid = watched.pid
    assert isinstance((await sink.wait()).error, Draining)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_an_orderly_stop_accounts_for_every_block():
    async with running(spec(step_ms="20")) as watched:
        sinks = [CheckingSink(watched.client, request(n, max_tokens=200)) for n in range(8)]
        await sinks[0].some()
    assert watched.client.leaked_blocks == 0
    assert watched.client.state is EngineState.STOPPED
    assert [type((await sink.wait()).error) for sink in sinks] == [Draining] * 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_are_the_parents_affair(number):
    async with running() as watched:
        os.kill(watched.pid, number)
        await watched.serves()
        assert watched.client.restarts == 0


def test_a_core_does_not_outlive_its_parent():
    parent = textwrap.dedent(f"""
        import asyncio, os, signal
        from pdserve.engine.launcher import ProcessLauncher
        from pdserve.engine.client import CoreClient
        from pdserve.messages.engine import EngineSpec

        async def main():
            launchers = []
            def make():
                launchers.append(ProcessLauncher())
                return launchers[-1]
            await CoreClient(EngineSpec(engine={ENGINE!r}, model=""), make_launcher=make).start()
            print(launchers[0].pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """)
    ran = subprocess.run(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, timeout=30, check=False
    )
    assert ran.returncode == -signal.SIGKILL
    child = int(ran.stdout)

    async def gone() -> None:
        await until(lambda: not _runs(child), patience=5.0)

    asyncio.run(gone())


def _runs(pid: int) -> bool:
    """A zombie whose parent died has not been collected yet, but runs no more."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ------------------------------------------------------------------ bounds and bad neighbours


async def test_more_in_flight_than_the_core_could_queue_is_refused_at_once():
    small = EngineSpec(
        engine=ENGINE, model="", max_batch_tokens=32, max_sequences=2, max_waiting=3, block_size=4
    )
    async with running(small) as watched:
        sinks = [CheckingSink(watched.client, request(max_tokens=50)) for _ in range(5)]
        with pytest.raises(Overloaded) as caught:
            CheckingSink(watched.client, request())
        assert caught.value.retry_after
        outcomes = [(await sink.wait()).error for sink in sinks]
        assert all(error is None or isinstance(error, Overloaded) for error in outcomes)
        await watched.serves()


async def test_a_request_that_no_frame_holds_is_refused_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
):
    async with running() as watched:
        small = functools.partial(encode_frame, limit=1000)
        monkeypatch.setattr("pdserve.engine.core_connection.encode_frame", small)
        with pytest.raises(PayloadTooLarge, match="too large"):
            CheckingSink(watched.client, request(*[70_000] * 1000))
        await watched.serves()
        assert await watched.client.drain(0.0)


async def test_a_core_that_reads_too_slowly_is_sent_no_more():
    played = PlayedCarrier()
    client = CoreClient(spec(), make_launcher=lambda: played)
    starting = asyncio.ensure_future(client.start())
    await until(lambda: played.core is not None)
    await played.hear()
    played.say(CoreReady(capabilities=CAPABILITIES))
    await starting
    first = CheckingSink(client, request())
    for _ in range(40):  # 0.5 MB each, against a bound of 8 MB
        CheckingSink(client, request(*range(60_000, 160_000)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="does not keep up"):
        CheckingSink(client, request())
    first.abort()  # taking back is always possible
    played.end()
    await client.stop()


async def test_a_sink_that_raises_loses_its_request_and_nothing_else():
    class Bad:
        calls = 0
        error: Exception | None = None

        def on_delta(self, delta: TokenDelta) -> None:
            self.calls += 1
            raise RuntimeError("bad sink")

        def on_error(self, error: Exception) -> None:
            assert self.error is None
            self.error = error

    async with running() as watched:
        bad = Bad()
        watched.client.submit(request(max_tokens=100), bad)
        good = CheckingSink(watched.client, request(max_tokens=100))
        assert (await good.wait()).error is None
        await until(lambda: watched.client.stats().running == 0)
        assert bad.calls == 1
        assert isinstance(bad.error, EngineError)
        # Dropped there too, unless the core was done before the word reached it.
        ends = watched.client.stats()
        assert ends.aborted + ends.finished == 2


async def test_a_sink_may_abort_and_submit_from_inside():
    async with running() as watched:
        client, sinks = watched.client, list[CheckingSink]()

        class Hasty:
            def on_delta(self, delta: TokenDelta) -> None:
                client.abort(delta.handle)
                sinks.append(CheckingSink(client, request()))

            def on_error(self, error: Exception) -> None:
                raise AssertionError(error)

        client.submit(request(max_tokens=100), Hasty())
        await until(lambda: bool(sinks))
        assert (await sinks[0].wait()).error is None
        assert len(sinks) == 1


async def test_a_listener_that_raises_does_not_stop_the_tokens():
    def listen(events: object) -> None:
        raise RuntimeError("bad listener")

    async with running() as watched:
        watched.client.subscribe_kv(listen)
        await watched.serves()


async def test_waiting_for_stop_can_be_given_up_while_the_stop_goes_on():
    async with running(stop_timeout=0.3) as watched:
        CheckingSink(watched.client, request(HANG))
        await asyncio.sleep(0.05)
        impatient = asyncio.ensure_future(watched.client.stop())
        await asyncio.sleep(0.05)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        await watched.client.stop()


def test_it_works_on_the_standard_event_loop_too():
    async def main() -> None:
        async with running() as watched:
            await watched.serves()
            os.kill(watched.pid, signal.SIGKILL)
            await until(lambda: watched.client.restarts == 1)
            await watched.ready_again()
            await watched.serves()

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(main())
    gc.collect()  # an unclosed transport would warn here


async def test_how_long_cancelling_took_is_told_by_what_the_request_was_doing():
    told: list[tuple[str, float]] = []
    client = CoreClient(
        spec(step_ms="20"),
        CoreClientOptions(restart=FAST),
        on_cancelled=lambda phase, seconds: told.append((phase, seconds)),
    )
    await client.start()
    try:
        sinks = [CheckingSink(client, request(n, max_tokens=200)) for n in range(20, 32)]
        await sinks[0].some()  # of twelve, eight have a place
        for sink in reversed(sinks):
            sink.abort()
        await until(lambda: len(told) == 12)
        assert {phase for phase, _ in told} <= {"queued", "prefilling", "decoding"}
        assert sum(phase == "decoding" for phase, _ in told) >= 7
        assert all(0.0 < seconds < 10.0 for _, seconds in told)
        client.abort(sinks[0].handle)
        assert client._cancelled == {}
    finally:
        await client.stop()


# ------------------------------------------------------------------ memory


async def test_a_core_that_ran_out_of_memory_comes_back_with_less_kv(caplog):
    kills = [0]
    watched = Watched(spec(blocks="64", max_len="40"), oom_kills=lambda: kills[0])
    await watched.client.start()
    try:
        had = watched.client.capabilities
        assert had is not None
        assert (had.num_blocks, had.max_model_len, had.reduced) == (64, 40, "")
        for blocks in (48, 36):
            kills[0] += 1
            os.kill(watched.pid, signal.SIGKILL)
            await watched.ready_for_the(kills[0] + 1)
            had = watched.client.capabilities
            assert had is not None
            assert (had.num_blocks, had.max_model_len) == (blocks, 40)
            assert "KV has been lowered" in had.reduced
        await watched.serves()
        assert "memory ran out" in caplog.text
        assert "from now on; starting it again" in caplog.text
    finally:
        await watched.client.stop()


async def test_a_core_that_cannot_do_with_less_is_given_up_with_the_remedy():
    """It would be killed again, for ever."""
    kills = [0]
    watched = Watched(spec(blocks="10", max_len="40"), oom_kills=lambda: kills[0])
    await watched.client.start()
    try:
        kills[0] += 1
        os.kill(watched.pid, signal.SIGKILL)
        await until(lambda: watched.client.state is EngineState.FAILED)
        assert len(watched.launchers) == 1
        assert "memory ran out" in watched.client.state_reason
        assert "lower --kv-memory and --max-model-len" in watched.client.state_reason
    finally:
        await watched.client.stop()


async def test_running_out_of_memory_while_loading_names_the_remedy():
    kills = [0]
    watched = Watched(spec(load_ms="60000"), oom_kills=lambda: kills[0])
    start = asyncio.ensure_future(watched.client.start())
    await until(lambda: bool(watched.launchers) and watched.launchers[0].pid is not None)
    kills[0] += 1
    os.kill(watched.pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match=r"memory ran out .* take a smaller model"):
        await start
