"""Several cores in one process: they serve side by side, end apart, and die together."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace

import pdserve
from pdserve.engine.client import CoreClient, CoreClientOptions
from pdserve.engine.port import EngineState
from pdserve.engine.restart import CoreRestartPolicy
from pdserve.engine.shared_process import SharedCoreProcess
from pdserve.engine_core.weight_sharing import WeightSharingGroup
from pdserve.errors import ConfigError, EngineDied
from pdserve.messages.engine import EngineSpec, StartCore, StopCore
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.scripted import ENGINE, reference_tokens
from pdserve.testing.sinks import CheckingSink, until
from pdserve.testing.thread_launcher import ThreadLauncher
from pdserve.token_ids import token_ids
from pdserve.wire.length_prefixed import encode_frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BUNDLED = str(Path(pdserve.__file__).parent / "bundled")
BREAK, DIE = 91, 92
FAST = CoreRestartPolicy(max_restarts=20, first_delay=0.01, max_delay=0.05)
START = encode_frame(msgspec.msgpack.encode(StartCore(spec=EngineSpec(engine=ENGINE, model=""))))
STOP = encode_frame(msgspec.msgpack.encode(StopCore()))


def spec(**changes: Any) -> EngineSpec:
    plain = EngineSpec(
        engine=ENGINE,
        model="",
        block_size=4,
        options={"break_on": str(BREAK), "die_on": str(DIE), "step_ms": "5"},
    )
    return replace(plain, **changes)


def request(*prompt: int, **sampling: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"max_tokens": 8} | sampling
    return GenerateRequest(
        request_id="r", model="m", prompt=token_ids(prompt), sampling=SamplingParams(**fields)
    )


async def serves(*clients: CoreClient) -> None:
    """All of them at once, and rightly."""
    wanted = [request(11, 12, 13 + number) for number in range(8)]
    sinks = [(CheckingSink(client, one), one) for one in wanted for client in clients]
    for sink, one in sinks:
        assert (await sink.wait()).tokens[0] == reference_tokens(one)


async def ready(*clients: CoreClient) -> None:
    await until(lambda: all(client.state is EngineState.READY for client in clients))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class Pair:
    """Two clients and the process they share."""

    def __init__(self, first: EngineSpec, second: EngineSpec, *policies: CoreRestartPolicy) -> None:
        self.shared = SharedCoreProcess(2, on_line=lambda line: None)
        self.clients = [
            CoreClient(
                given,
                CoreClientOptions(restart=policy),
                make_launcher=functools.partial(self.shared.launcher, member),
            )
            for member, (given, policy) in enumerate(
                zip((first, second), policies or (FAST, FAST), strict=True)
            )
        ]

    @property
    def pid(self) -> int:
        assert self.shared.pid is not None
        return self.shared.pid


@asynccontextmanager
async def running(
    first: EngineSpec | None = None, second: EngineSpec | None = None, *policies: CoreRestartPolicy
) -> AsyncIterator[Pair]:
    pair = Pair(first or spec(), second or first or spec(), *policies)
    await asyncio.gather(*(client.start() for client in pair.clients))
    try:
        yield pair
    finally:
        await asyncio.gather(*(client.stop() for client in pair.clients))
        assert is_gone(pair.pid)


# ------------------------------------------------------------------ clients


async def test_two_cores_serve_side_by_side_in_one_process():
    async with running() as pair:
        await serves(*pair.clients)
        assert [client.restarts for client in pair.clients] == [0, 0]
    assert [client.leaked_blocks for client in pair.clients] == [0, 0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_both_compute_what_one_alone_would(seed: int, kernels: str):
    """The real engine, other pools and limits, both busy at once: token for token."""
    pytest.importorskip("torch")
    rng = random.Random(seed)
    prompts = [rng.choices(range(300, 900), k=rng.randint(3, 120)) for _ in range(4)]
    wanted = [request(*prompt, max_tokens=12, temperature=0.0) for prompt in prompts]
    common = EngineSpec(
        engine="torch",
        model=BUNDLED,
        device="cpu",
        threads=1,
        kv_memory=16 << 20,
        max_model_len=256,
        options={"kernels": kernels},
    )
    small = replace(common, kv_memory=8 << 20, max_batch_tokens=48, max_sequences=3)

    async def outputs(client: CoreClient) -> list[list[int]]:
        ledgers = await asyncio.gather(*(CheckingSink(client, one).wait() for one in wanted))
        assert [ledger.error for ledger in ledgers] == [None] * len(wanted)
        return [ledger.tokens[0] for ledger in ledgers]

    alone = CoreClient(common, CoreClientOptions())
    await alone.start()
    expected = await outputs(alone)
    await alone.stop()
    async with running(common, small) as pair:
        found = await asyncio.gather(*map(outputs, pair.clients))
        assert found == [expected, expected]
        await pair.clients[0].stop()
        assert await outputs(pair.clients[1]) == expected  # the weights are still there


async def test_stopping_one_leaves_the_other_at_work():
    async with running() as pair:
        first, second = pair.clients
        long = CheckingSink(second, request(11, 12, max_tokens=100))
        await long.some()
        pid = pair.pid
        await first.stop()
        assert first.leaked_blocks == 0
        assert (await long.wait()).error is None
        await serves(second)
        assert (pair.pid, second.restarts) == (pid, 0)


@pytest.mark.parametrize("how", ["kill", "die", "break"])
async def test_what_ends_the_process_ends_both_and_both_come_back(how: str):
    async with running() as pair:
        first, second = pair.clients
        pid = pair.pid
        bystander = CheckingSink(second, request(11, 12, max_tokens=200))
        await bystander.some()
        if how == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            CheckingSink(first, request(DIE if how == "die" else BREAK))
        assert type((await bystander.wait()).error) is EngineDied
        await until(lambda: first.restarts > 0 < second.restarts)
        await ready(first, second)
        assert pair.pid != pid
        assert is_gone(pid)
        await serves(first, second)


async def test_one_that_is_given_up_does_not_keep_the_other_from_coming_back():
    never = CoreRestartPolicy(max_restarts=0)
    async with running(spec(), spec(), never, FAST) as pair:
        first, second = pair.clients
        os.kill(pair.pid, signal.SIGKILL)
        await until(lambda: first.state is EngineState.FAILED)
        await ready(second)
        await serves(second)
    # and the process ended with the second, although a host still waited for the first


async def test_one_may_come_alone_and_late():
    pair = Pair(spec(), spec())
    first, second = pair.clients
    await second.start()
    await serves(second)
    pid = pair.pid
    await first.start()
    await serves(first, second)
    assert pair.pid == pid
    await second.stop()
    await serves(first)
    await first.stop()
    assert is_gone(pid)


async def test_specs_that_differ_are_refused_and_the_first_comes_back():
    pair = Pair(spec(), spec(dtype="bfloat16"))
    first, second = pair.clients
    await first.start()
    with pytest.raises(ConfigError, match="must agree on dtype: 'auto' is loaded, 'bfloat16'"):
        await second.start()
    await until(lambda: first.restarts == 1)
    await ready(first)
    await serves(first)
    await first.stop()
    assert is_gone(pair.pid)


async def test_a_start_that_is_cancelled_leaves_nothing_behind():
    slow = spec(options={"load_ms": "60000"})
    pair = Pair(slow, slow)
    starting = [asyncio.ensure_future(client.start()) for client in pair.clients]
    waits = "waiting for another worker of this process to load"
    await until(lambda: waits in {client.state_reason for client in pair.clients})
    pid = pair.pid
    for task in starting:
        task.cancel()
    await asyncio.wait(starting)
    assert is_gone(pid)


async def test_threads_share_a_family_too():
    family = WeightSharingGroup()
    clients = [
        CoreClient(spec(), CoreClientOptions(), make_launcher=lambda: ThreadLauncher(family))
        for _ in range(2)
    ]
    await asyncio.gather(*(client.start() for client in clients))
    await serves(*clients)
    await clients[0].stop()
    await serves(clients[1])
    await clients[1].stop()


# ------------------------------------------------------------------ launchers


@pytest.fixture
def shared() -> SharedCoreProcess:
    return SharedCoreProcess(2, on_line=lambda line: None)


async def ended(*launchers: Any) -> list[str]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*(launcher.ended() for launcher in launchers))


async def test_the_first_who_launches_starts_the_process_for_all(shared: SharedCoreProcess):
    launchers = [shared.launcher(member) for member in range(2)]
    assert shared.pid is None
    socks = await asyncio.gather(*(launcher.launch() for launcher in launchers))
    pid = shared.pid
    for sock in socks:
        sock.sendall(START + STOP)
    texts = await ended(*launchers)
    # Who ends first does not wait for the process, which the other still needs.
    goes_on = "has ended this core and goes on"
    assert all(text == goes_on or text.startswith("exited with code 0") for text in texts)
    assert texts != [goes_on, goes_on]
    assert pid is not None
    assert is_gone(pid)
    for sock in socks:
        sock.close()


async def test_a_process_that_starts_early_waits_for_all(shared: SharedCoreProcess):
    await shared.start_early()
    pid = shared.pid
    assert pid is not None
    launchers = [shared.launcher(member) for member in range(2)]
    socks = [await launcher.launch() for launcher in launchers]
    assert shared.pid == pid
    await shared.discard()
    assert not is_gone(pid)
    for sock in socks:
        sock.sendall(START + STOP)
    await ended(*launchers)
    assert is_gone(pid)
    for sock in socks:
        sock.close()


async def test_a_process_in_which_no_core_was_launched_is_discarded(shared: SharedCoreProcess):
    await shared.discard()
    await shared.start_early()
    pid = shared.pid
    assert pid is not None
    async with asyncio.timeout(20):
        await shared.discard()
    assert is_gone(pid)


async def test_killing_by_one_ends_all(shared: SharedCoreProcess):
    launchers = [shared.launcher(member) for member in range(2)]
    assert await ended(launchers[0]) == ["never started"]
    launchers[0].kill()
    socks = [await launcher.launch() for launcher in launchers]
    launchers[1].kill()
    assert await ended(*launchers) == ["was killed by SIGKILL"] * 2
    for sock in socks:
        sock.close()


async def test_generations_do_not_mix(shared: SharedCoreProcess):
    """A member that comes again gets a new process, in which the other's old hand has no power."""
    old = [shared.launcher(member) for member in range(2)]
    socks = [await launcher.launch() for launcher in old]
    first = shared.pid
    new = shared.launcher(0)
    socks.append(await new.launch())
    second = shared.pid
    assert first != second
    assert await ended(*old) == ["was killed by SIGKILL"] * 2
    for launcher in old:
        launcher.kill()
    late = shared.launcher(1)
    socks.append(await late.launch())
    assert shared.pid == second
    for sock in socks[2:]:
        sock.sendall(START + STOP)
    assert any(text.startswith("exited with code 0") for text in await ended(new, late))
    for sock in socks:
        sock.close()


async def test_a_member_that_comes_after_the_end_begins_a_generation(shared: SharedCoreProcess):
    alone = shared.launcher(0)
    with await alone.launch() as sock:
        sock.sendall(START + STOP)
        assert await ended(alone) == ["exited with code 0"]  # nobody came to the other host
    other = shared.launcher(1)
    with await other.launch() as sock:
        sock.sendall(START + STOP)
        assert await ended(other) == ["exited with code 0"]


async def test_waiting_for_the_end_may_be_cancelled_and_repeated(shared: SharedCoreProcess):
    launchers = [shared.launcher(member) for member in range(2)]
    socks = [await launcher.launch() for launcher in launchers]
    waiting = asyncio.ensure_future(launchers[0].ended())
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    launchers[0].kill()
    assert await ended(*launchers) == ["was killed by SIGKILL"] * 2
    for sock in socks:
        sock.close()


async def test_a_process_that_cannot_be_started_leaves_nothing(
    shared: SharedCoreProcess, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        await shared.launcher(0).launch()
    assert shared.pid is None
