"""Carriers start a core, say how it ended, and end it by force."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest

from pdserve.engine.launcher import CoreLauncher, ProcessLauncher
from pdserve.messages.engine import EngineSpec, StartCore, StopCore
from pdserve.testing.scripted import ENGINE
from pdserve.testing.thread_launcher import ThreadLauncher
from pdserve.wire.length_prefixed import encode_frame, encode_frames

SPEC = EngineSpec(engine=ENGINE, model="", max_batch_tokens=256)
START = encode_frame(msgspec.msgpack.encode(StartCore(spec=SPEC)))
STOP = encode_frame(msgspec.msgpack.encode(StopCore()))


@pytest.fixture(params=[ProcessLauncher, ThreadLauncher])
def launcher(request: pytest.FixtureRequest) -> CoreLauncher:
    made: CoreLauncher = request.param()
    return made


async def test_a_core_that_is_told_to_stop_ends_with_status_0(launcher: CoreLauncher):
    with await launcher.launch() as sock:
        sock.sendall(START + STOP)
        async with asyncio.timeout(20):
            text = await launcher.ended()
    assert "0" in text


async def test_a_core_ends_when_the_socket_closes(launcher: CoreLauncher):
    (await launcher.launch()).close()
    launcher.kill()  # a thread's second handle on the socket
    async with asyncio.timeout(20):
        await launcher.ended()


async def test_killing_is_possible_at_any_time_and_twice(launcher: CoreLauncher):
    assert await launcher.ended() == "never started"
    launcher.kill()
    with await launcher.launch():
        launcher.kill()
        async with asyncio.timeout(20):
            await launcher.ended()
        launcher.kill()
        assert await launcher.ended()


async def test_waiting_for_the_end_can_be_cancelled_and_repeated(launcher: CoreLauncher):
    with await launcher.launch():
        waiting = asyncio.ensure_future(launcher.ended())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        launcher.kill()
        async with asyncio.timeout(20):
            await launcher.ended()


async def test_the_exit_is_told_by_signal_and_by_code():
    launcher = ProcessLauncher()
    with await launcher.launch():
        assert launcher.pid is not None
        os.kill(launcher.pid, signal.SIGKILL)
        assert "was killed by SIGKILL" in await launcher.ended()


async def test_lines_of_stderr_are_passed_on_and_the_last_one_kept():
    lines: list[str] = []
    launcher = ProcessLauncher(on_line=lines.append)
    with await launcher.launch() as sock:
        sock.sendall(encode_frames([b"not msgpack"]))
        text = await launcher.ended()
    assert text == "exited with code 1: what it logged before says why"
    assert launcher.pid is not None


async def test_a_process_that_starts_early_waits_for_its_launch():
    launcher = ProcessLauncher(engine=ENGINE)
    await launcher.start_early()
    pid = launcher.pid
    with await launcher.launch() as sock:
        assert launcher.pid == pid
        sock.sendall(START + STOP)
        async with asyncio.timeout(20):
            assert "0" in await launcher.ended()


async def test_a_process_that_ends_before_its_launch_is_started_again():
    launcher = ProcessLauncher()
    await launcher.start_early()
    first = launcher.pid
    launcher.kill()
    async with asyncio.timeout(20):
        await launcher.ended()
    with await launcher.launch() as sock:
        assert launcher.pid != first
        sock.sendall(START + STOP)
        async with asyncio.timeout(20):
            assert "exited with code 0" in await launcher.ended()


async def test_a_process_that_is_never_launched_is_discarded():
    launcher = ProcessLauncher()
    await launcher.discard()
    await launcher.start_early()
    async with asyncio.timeout(20):
        await launcher.discard()
        assert "SIGKILL" in await launcher.ended()
