"""One life of a core that a test plays itself: what it is said to have died of."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.clock import ManualClock, SystemClock
from pdserve.engine.core_run import CoreRun, CoreTimeouts
from pdserve.errors import ConfigError, EngineDied, EngineStalled, PdserveError
from pdserve.messages.engine import (
    Command,
    ControlEvent,
    CoreFailed,
    CoreReady,
    EngineSpec,
    Event,
    LoadProgress,
    QueryStats,
    StartCore,
)
from pdserve.observe.heartbeat import HeartbeatPage
from pdserve.testing.sinks import until
from pdserve.wire.length_prefixed import FrameDecoder, encode_frame
from tests.engine_core.test_main import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.clock import Clock

SPEC = EngineSpec(engine="played", model="")
QUICK = CoreTimeouts(load_timeout=600.0, stall_timeout=600.0, stop_timeout=0.05, kill_timeout=0.05)


class PlayedCarrier:
    """A core whose every word is the test's; it ends when killed, unless it is immortal."""

    def __init__(self) -> None:
        self.core: socket.socket | None = None
        self.page = HeartbeatPage.in_memory()
        self.pid: int | None = None
        self.kills = 0
        self.immortal = False
        self.refuse: OSError | None = None
        self.transports: list[socket.socket] = []
        """The transports' end of their socket, once it has come."""
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
        self.hang_up_transports()
        if self.core is not None:
            self.core.close()

    def say(self, event: Event) -> None:
        assert self.core is not None
        self.core.sendall(encode_frame(msgspec.msgpack.encode(event)))

    async def hear(self) -> Command:
        """The next command; the test sends one at a time. Keeps the descriptor that comes along."""
        while True:
            assert self.core is not None
            try:
                data, fds, _, _ = socket.recv_fds(self.core, 65536, 1)
            except BlockingIOError:
                await asyncio.sleep(0.001)
                continue
            self.transports += [socket.socket(fileno=fd) for fd in fds]
            for body in self._frames.feed(data):
                return msgspec.msgpack.decode(body, type=Command)

    def hang_up_transports(self) -> None:
        for sock in self.transports:
            sock.close()


class Stage:
    """A life under way with its played core."""

    def __init__(
        self, options: CoreTimeouts, clock: Clock | None = None, spec: EngineSpec = SPEC
    ) -> None:
        self.launcher = PlayedCarrier()
        self.events: list[Event | ControlEvent] = []
        self.lost: list[EngineStalled | None] = []
        self.on_look: Callable[[], None] = lambda: None
        self.life = CoreRun(
            self.launcher,
            options,
            clock or SystemClock(),
            on_event=self.events.append,
            on_lost=self.lost.append,
            on_look=lambda: self.on_look(),
        )
        self.run = asyncio.ensure_future(self.life.run(spec))

    async def died(self) -> PdserveError:
        async with asyncio.timeout(10):
            return await self.run


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage(QUICK)
    await asyncio.sleep(0)
    yield stage
    stage.launcher.immortal = False
    stage.launcher.kill()
    await asyncio.wait({stage.run}, timeout=10)


async def test_start_is_the_first_command_and_events_are_passed_on(stage: Stage):
    assert await stage.launcher.hear() == StartCore(spec=SPEC)
    stage.launcher.say(LoadProgress(stage="one"))
    stage.launcher.say(CoreReady(capabilities=CAPABILITIES))
    stage.launcher.end()
    error = await stage.died()
    assert stage.events == [LoadProgress(stage="one"), CoreReady(capabilities=CAPABILITIES)]
    assert type(error) is EngineDied
    assert error.message == "the engine process was played to the end"
    assert stage.lost == [None]


async def test_before_it_was_ready_its_own_words_are_the_error(stage: Stage):
    await stage.launcher.hear()
    stage.launcher.say(CoreFailed(kind="ConfigError", message="wrong file"))
    stage.launcher.end()
    error = await stage.died()
    assert type(error) is ConfigError
    assert error.message == "wrong file"


async def test_once_it_was_ready_it_died_whatever_it_says(stage: Stage):
    await stage.launcher.hear()
    stage.launcher.say(CoreReady(capabilities=CAPABILITIES))
    stage.launcher.say(CoreFailed(kind="ConfigError", message="out of memory"))
    stage.launcher.end()
    error = await stage.died()
    assert type(error) is EngineDied
    assert error.message == "the engine process gave up: out of memory"


async def test_a_core_that_failed_but_does_not_end_is_killed(stage: Stage):
    await stage.launcher.hear()
    stage.launcher.say(CoreFailed(kind="EngineError", message="broken"))
    assert "broken" in (await stage.died()).message
    assert stage.launcher.kills >= 1


async def test_a_core_that_hangs_up_but_does_not_end_is_killed(stage: Stage):
    await stage.launcher.hear()
    assert stage.launcher.core is not None
    stage.launcher.core.close()
    assert type(await stage.died()) is EngineDied
    assert stage.launcher.kills == 1


async def test_a_process_that_nothing_ends_is_left_behind_with_an_error(
    stage: Stage, caplog: pytest.LogCaptureFixture
):
    await stage.launcher.hear()
    stage.launcher.immortal = True
    assert stage.launcher.core is not None
    stage.launcher.core.close()
    assert "does not end" in (await stage.died()).message
    assert "left behind" in caplog.text


async def test_garbage_is_named_as_the_reason(stage: Stage):
    await stage.launcher.hear()
    assert stage.launcher.core is not None
    stage.launcher.core.sendall(encode_frame(b"\xc1"))
    assert "sent an unreadable message" in (await stage.died()).message


async def test_a_process_that_cannot_be_started_is_an_error_not_an_exception():
    stage = Stage(QUICK)
    stage.launcher.refuse = OSError("no more processes")
    assert "cannot be started: no more processes" in (await stage.died()).message


async def test_a_kill_during_the_launch_takes_effect_after_it():
    stage = Stage(QUICK)
    stage.life.kill()
    assert type(await stage.died()) is EngineDied
    assert stage.launcher.kills >= 2


async def test_cancelling_kills_the_core(stage: Stage):
    await stage.launcher.hear()
    stage.run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stage.run
    assert stage.launcher.kills == 1


IMPATIENT = CoreTimeouts(
    load_timeout=600.0, stall_timeout=0.4, stop_timeout=0.05, kill_timeout=0.05
)


async def ready(options: CoreTimeouts, clock: Clock | None = None) -> Stage:
    """A core that has loaded and rests."""
    stage = Stage(options, clock)
    await asyncio.sleep(0)
    await stage.launcher.hear()
    stage.launcher.page.heard(1)
    stage.launcher.page.rest(None)
    stage.launcher.say(CoreReady(capabilities=CAPABILITIES))
    await until(lambda: bool(stage.events))
    return stage


def work(stage: Stage) -> None:
    """The core hears a command and computes. Without the command the check might be ten seconds
    away, since a core that rests gets work in no other way."""
    stage.life.post(QueryStats())
    stage.launcher.page.heard(2)
    stage.launcher.page.compute()


async def test_a_core_that_stands_still_at_work_is_killed():
    stage = await ready(IMPATIENT)
    work(stage)
    stage.launcher.page.tick(3)
    error = await stage.died()
    assert type(error) is EngineStalled
    assert "stalled for" in error.message
    assert error.message.endswith("s in step 1, after layer 3")
    assert stage.lost == [error]
    assert stage.launcher.kills >= 1


@pytest.mark.long(one_in=3)
async def test_it_is_known_to_have_stalled_before_it_has_ended():
    stage = await ready(IMPATIENT)
    stage.launcher.immortal = True
    work(stage)
    await until(lambda: bool(stage.lost))
    assert not stage.run.done()
    stage.launcher.end()
    assert await stage.died() is stage.lost[0]


async def test_a_core_that_does_not_hear_its_commands_has_stalled():
    stage = await ready(IMPATIENT)
    stage.life.post(QueryStats())
    error = await stage.died()
    assert type(error) is EngineStalled
    assert error.message.endswith("in its sleep")


async def test_a_core_that_gets_a_command_at_a_check_does_not_rest():
    """A canary is posted there. At the clock's zero the next check of a resting core is ten seconds
    ahead."""
    stage = await ready(IMPATIENT, ManualClock())
    posted: list[bool] = []

    def post_once() -> None:
        if not posted:
            posted.append(True)
            stage.life.post(QueryStats())

    stage.on_look = post_once
    stage.life.post(QueryStats())  # ends the present rest
    stage.launcher.page.heard(1)
    stage.launcher.page.rest(None)
    await until(lambda: bool(posted))
    await until(lambda: stage.life._stall._owes, 3.0)
    stage.launcher.end()
    await stage.died()


@pytest.mark.long(one_in=3)
async def test_a_core_that_oversleeps_has_stalled():
    stage = await ready(IMPATIENT)
    work(stage)
    stage.launcher.page.rest(0.0)
    assert type(await stage.died()) is EngineStalled


async def test_a_core_that_rests_or_ticks_is_left_in_peace():
    stage = await ready(IMPATIENT)
    await asyncio.wait({stage.run}, timeout=0.8)
    work(stage)
    for layer in range(20):
        stage.launcher.page.tick(layer)
        await asyncio.wait({stage.run}, timeout=0.05)
    stage.launcher.page.rest(600.0)
    await asyncio.wait({stage.run}, timeout=0.8)
    assert not stage.run.done()
    stage.launcher.end()
    assert type(await stage.died()) is EngineDied


@pytest.mark.long(one_in=3)
async def test_time_in_which_nobody_looked_is_not_held_against_the_core():
    """Whoever was stopped and goes on again has not seen yet what the core has done meanwhile."""
    clock = ManualClock()
    stage = await ready(IMPATIENT, clock)
    work(stage)
    before = -1.0
    for _ in range(3):
        await until(lambda before=before: stage.life._stall._looked > before)  # type: ignore[misc]
        before = clock.now()
        clock.advance(1000.0)
    assert stage.launcher.kills == 0
    assert 0.0 < stage.life.stalled_for < 0.4
    stage.launcher.page.tick()
    clock.advance(1000.0)
    await until(lambda: stage.life.stalled_for == 0.0)
    stage.launcher.kill()
    await stage.died()


async def test_patience_without_end():
    options = CoreTimeouts(stall_timeout=0.0, stop_timeout=0.05, kill_timeout=0.05)
    stage = await ready(options)
    work(stage)
    await until(lambda: stage.life.stalled_for > 0.6)
    assert not stage.run.done()
    stage.launcher.end()
    await stage.died()


async def test_a_core_that_loads_may_take_its_time():
    stage = Stage(CoreTimeouts(load_timeout=0.5, stall_timeout=0.1, kill_timeout=0.05))
    error = await stage.died()
    assert type(error) is EngineDied
    assert "not ready within 0.5 s" in error.message


async def test_a_core_that_reads_late_does_not_stop_the_loop():
    large = EngineSpec(engine="played", model="", options={"list": "x" * 2_000_000})
    stage = Stage(QUICK, spec=large)
    for _ in range(10):
        await asyncio.sleep(0.01)
    assert await stage.launcher.hear() == StartCore(spec=large)
    stage.life.post(QueryStats())
    assert await stage.launcher.hear() == QueryStats()
    stage.launcher.end()
    await stage.died()


async def test_a_core_that_cannot_be_told_has_died(monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object) -> int:
        raise OSError(errno.ETOOMANYREFS, "too many references")

    monkeypatch.setattr(socket, "send_fds", refuse)
    stage = Stage(QUICK)
    assert "too many references" in (await stage.died()).message
    assert stage.launcher.kills == 1
    assert stage.launcher.core is not None


async def test_a_core_whose_transports_hang_up_is_killed_unless_it_ends():
    stage = await ready(QUICK)
    stage.launcher.hang_up_transports()
    assert type(await stage.died()) is EngineDied
    assert stage.launcher.kills >= 1


async def test_garbage_from_the_transports_is_named_as_the_reason():
    stage = await ready(QUICK)
    (theirs,) = stage.launcher.transports
    theirs.sendall(encode_frame(b"\xc1"))
    assert "sent an unreadable message" in (await stage.died()).message


async def test_a_core_without_transports_may_drop_their_socket():
    stage = Stage(QUICK)
    await asyncio.sleep(0)
    await stage.launcher.hear()
    stage.launcher.page.heard(1)
    stage.launcher.page.rest(None)
    stage.launcher.say(CoreReady(capabilities=CAPABILITIES, transports=False))
    await until(lambda: bool(stage.events))
    stage.launcher.hang_up_transports()
    await asyncio.wait({stage.run}, timeout=0.3)
    assert not stage.run.done()
    stage.launcher.end()
    await stage.died()
