"""One life of a core that a test plays itself: what it is said to have died of."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.clock import ManualClock, SystemClock
from pdserve.engine.life import CoreLife, LifeOptions
from pdserve.errors import ConfigError, EngineDied, PdserveError
from pdserve.messages.engine import (
    Command,
    EngineSpec,
    Event,
    Failed,
    Progress,
    QueryStats,
    Ready,
    Start,
    Stats,
)
from pdserve.messages.engine import EngineStats as Snapshot
from pdserve.testing.sinks import until
from pdserve.wire.frames import FrameDecoder, encode_frame
from tests.engine.test_host import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.clock import Clock

SPEC = EngineSpec(engine="played", model="")
QUICK = LifeOptions(load_timeout=600.0, hang_timeout=600.0, stop_timeout=0.05, kill_timeout=0.05)


class PlayedCarrier:
    """A core whose every word is the test's; it ends when killed, unless it is immortal."""

    def __init__(self) -> None:
        self.core: socket.socket | None = None
        self.kills = 0
        self.immortal = False
        self.refuse: OSError | None = None
        self._ended = asyncio.Event()
        self._frames = FrameDecoder()

    async def launch(self) -> socket.socket:
        if self.refuse is not None:
            raise self.refuse
        ours, self.core = socket.socketpair()
        self.core.setblocking(False)
        return ours

    async def ended(self) -> str:
        await self._ended.wait()
        return "was played to the end"

    def kill(self) -> None:
        self.kills += 1
        if not self.immortal:
            self.end()

    def end(self) -> None:
        self._ended.set()
        if self.core is not None:
            self.core.close()

    def say(self, event: Event) -> None:
        assert self.core is not None
        self.core.sendall(encode_frame(msgspec.msgpack.encode(event)))

    async def hear(self) -> Command:
        """The next command; the test sends one at a time."""
        while True:
            assert self.core is not None
            data = await asyncio.get_running_loop().sock_recv(self.core, 65536)
            for body in self._frames.feed(data):
                return msgspec.msgpack.decode(body, type=Command)


class Stage:
    """A life under way with its played core."""

    def __init__(self, options: LifeOptions, clock: Clock | None = None) -> None:
        self.carrier = PlayedCarrier()
        self.events: list[Event] = []
        self.lost = 0
        self.busy = True
        self.life = CoreLife(
            self.carrier,
            options,
            clock or SystemClock(),
            on_event=self.events.append,
            on_lost=self.note_lost,
            busy=lambda: self.busy,
        )
        self.run = asyncio.ensure_future(self.life.run(SPEC))

    def note_lost(self) -> None:
        self.lost += 1

    async def died(self) -> PdserveError:
        async with asyncio.timeout(10):
            return await self.run


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage(QUICK)
    await asyncio.sleep(0)
    yield stage
    stage.carrier.immortal = False
    stage.carrier.kill()
    await asyncio.wait({stage.run}, timeout=10)


async def test_start_is_the_first_command_and_events_are_passed_on(stage: Stage):
    assert await stage.carrier.hear() == Start(spec=SPEC)
    stage.carrier.say(Progress(stage="one"))
    stage.carrier.say(Ready(capabilities=CAPABILITIES))
    stage.carrier.end()
    error = await stage.died()
    assert stage.events == [Progress(stage="one"), Ready(capabilities=CAPABILITIES)]
    assert type(error) is EngineDied
    assert error.message == "the engine process was played to the end"
    assert stage.lost == 1


async def test_before_it_was_ready_its_own_words_are_the_error(stage: Stage):
    await stage.carrier.hear()
    stage.carrier.say(Failed(kind="ConfigError", message="wrong file"))
    stage.carrier.end()
    error = await stage.died()
    assert type(error) is ConfigError
    assert error.message == "wrong file"


async def test_once_it_was_ready_it_died_whatever_it_says(stage: Stage):
    await stage.carrier.hear()
    stage.carrier.say(Ready(capabilities=CAPABILITIES))
    stage.carrier.say(Failed(kind="ConfigError", message="out of memory"))
    stage.carrier.end()
    error = await stage.died()
    assert type(error) is EngineDied
    assert error.message == "the engine process gave up: out of memory"


async def test_a_core_that_failed_but_does_not_end_is_killed(stage: Stage):
    await stage.carrier.hear()
    stage.carrier.say(Failed(kind="EngineError", message="broken"))
    assert "broken" in (await stage.died()).message
    assert stage.carrier.kills >= 1


async def test_a_core_that_hangs_up_but_does_not_end_is_killed(stage: Stage):
    await stage.carrier.hear()
    assert stage.carrier.core is not None
    stage.carrier.core.close()
    assert type(await stage.died()) is EngineDied
    assert stage.carrier.kills == 1


async def test_a_process_that_nothing_ends_is_left_behind_with_an_error(
    stage: Stage, caplog: pytest.LogCaptureFixture
):
    await stage.carrier.hear()
    stage.carrier.immortal = True
    assert stage.carrier.core is not None
    stage.carrier.core.close()
    assert "does not end" in (await stage.died()).message
    assert "left behind" in caplog.text


async def test_garbage_is_named_as_the_reason(stage: Stage):
    await stage.carrier.hear()
    assert stage.carrier.core is not None
    stage.carrier.core.sendall(encode_frame(b"\xc1"))
    assert "sent what cannot be read" in (await stage.died()).message


async def test_a_process_that_cannot_be_started_is_an_error_not_an_exception():
    stage = Stage(QUICK)
    stage.carrier.refuse = OSError("no more processes")
    assert "cannot be started: no more processes" in (await stage.died()).message


async def test_a_kill_during_the_launch_takes_effect_after_it():
    stage = Stage(QUICK)
    stage.life.kill()
    assert type(await stage.died()) is EngineDied
    assert stage.carrier.kills >= 2


async def test_cancelling_kills_the_core(stage: Stage):
    await stage.carrier.hear()
    stage.run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stage.run
    assert stage.carrier.kills == 1


async def test_a_silent_core_is_asked_first_and_killed_later():
    options = LifeOptions(load_timeout=5.0, hang_timeout=0.3, stop_timeout=0.05, kill_timeout=0.05)
    stage = Stage(options)
    await asyncio.sleep(0)
    await stage.carrier.hear()
    stage.carrier.say(Ready(capabilities=CAPABILITIES))
    for _ in range(8):  # it answers: longer than the timeout in total
        assert await stage.carrier.hear() == QueryStats()
        stage.carrier.say(Stats(stats=Snapshot()))
    assert stage.carrier.kills == 0
    assert "has not answered" in (await stage.died()).message


async def test_a_silent_core_owes_an_answer_even_when_its_requests_have_given_up():
    options = LifeOptions(load_timeout=5.0, hang_timeout=0.2, stop_timeout=0.05, kill_timeout=0.05)
    stage = Stage(options)
    await asyncio.sleep(0)
    await stage.carrier.hear()
    stage.carrier.say(Ready(capabilities=CAPABILITIES))
    assert await stage.carrier.hear() == QueryStats()
    stage.busy = False
    assert "has not answered" in (await stage.died()).message


async def test_time_in_which_nobody_looked_is_not_the_cores_silence():
    """Whoever was stopped and goes on again has not read yet what the core has said meanwhile."""
    clock = ManualClock()
    options = LifeOptions(load_timeout=5.0, hang_timeout=0.4, stop_timeout=0.05, kill_timeout=0.05)
    stage = Stage(options, clock)
    await asyncio.sleep(0)
    await stage.carrier.hear()
    stage.carrier.say(Ready(capabilities=CAPABILITIES))
    assert await stage.carrier.hear() == QueryStats()
    for _ in range(3):
        clock.advance(1000.0)
        await until(lambda: stage.life._looked == clock.now())
        assert stage.carrier.kills == 0
    clock.advance(1000.0)
    assert "has not answered" in (await stage.died()).message


async def test_a_silent_core_that_owes_nothing_is_left_in_peace():
    options = LifeOptions(load_timeout=5.0, hang_timeout=0.05, stop_timeout=0.05, kill_timeout=0.05)
    stage = Stage(options)
    stage.busy = False
    await asyncio.sleep(0)
    await stage.carrier.hear()
    stage.carrier.say(Ready(capabilities=CAPABILITIES))
    await asyncio.wait({stage.run}, timeout=0.3)
    assert not stage.run.done()
    stage.carrier.end()
    await stage.died()
