"""The host: what it does with commands, idleness, slow readers and broken cores."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.clock import SystemClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.core_socket import CoreSocket
from pdserve.engine_core.engine_loader import load_core
from pdserve.engine_core.main import CoreLoop
from pdserve.errors import ConfigError, EngineDied
from pdserve.messages.engine import (
    Command,
    CoreFailed,
    CoreReady,
    CoreStopped,
    EngineCapabilities,
    EngineSpec,
    Event,
    LoadProgress,
    QueryStats,
    StartCore,
    Stats,
    StepOutput,
    StopCore,
    Submit,
)
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.scripted import ENGINE, ScriptedExecutor
from pdserve.token_ids import token_ids
from pdserve.wire.codec import encode
from pdserve.wire.length_prefixed import FrameDecoder, encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = EngineSpec(engine=ENGINE, model="", max_batch_tokens=256, block_size=4)
CAPABILITIES = EngineCapabilities(
    engine="fake",
    model_type="",
    dtype="",
    device="",
    max_model_len=1,
    vocab_size=1,
    block_size=1,
    num_blocks=1,
    block_bytes=1,
    max_batch_tokens=1,
    max_sequences=1,
)


class FakeCore:
    """A core whose steps are written by the test."""

    def __init__(self, step: Callable[[], list[Event]] | None = None) -> None:
        self.steps = 0
        self.closed = 0
        self.has_work = step is not None
        self.due: float | None = None
        self.on_step = step
        self.load_error: Exception | None = None

    def load(self, spec: EngineSpec, progress: Any) -> EngineCapabilities:
        progress(LoadProgress(stage="loading"))
        if self.load_error is not None:
            raise self.load_error
        return CAPABILITIES

    def handle(self, command: Command) -> None:
        raise KeyError("no such thing")

    def step(self) -> list[Event]:
        self.steps += 1
        return [] if self.on_step is None else self.on_step()

    def wake_at(self) -> float | None:
        return self.due

    def close(self) -> int:
        self.closed += 1
        return 3


class OverlappingCore(FakeCore):
    """A core that computes elsewhere. Each step reports its number; the test says what happens
    before and after the events of the step before are written, and how many steps there are."""

    def __init__(self, steps: int = 1000) -> None:
        super().__init__(self.compute)
        self.flush_events: Callable[[], None] = lambda: None
        self.rest = steps
        self.before: dict[int, Callable[[], None]] = {}
        self.after: dict[int, Callable[[], None]] = {}
        self.silent: set[int] = set()
        """Steps that do not write."""
        self.size = 0
        self.fails_at = 0
        """The step that reports a failure."""
        self.on_command: Callable[[], None] = lambda: None

    def handle(self, command: Command) -> None:
        self.on_command()

    def compute(self) -> list[Event]:
        number = self.steps
        self.before.get(number, lambda: None)()
        if number not in self.silent:
            self.flush_events()
        self.after.get(number, lambda: None)()
        self.has_work = number < self.rest
        return [self.report(number)]

    def report(self, number: int) -> Event:
        if number == self.fails_at:
            return CoreFailed(kind="EngineDied", message="broken")
        return LoadProgress(stage=f"{number:0>{self.size}}")


class Parent:
    """The other end: a blocking socket and a host in a thread."""

    def __init__(self, core: FakeCore | None = None, *, high_water: int = 4096) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(10)

        def make(spec: EngineSpec, clock: Any, mover: Any) -> Any:
            return load_core(spec.engine, clock, mover) if core is None else core

        self.link = CoreSocket(theirs, high_water=high_water)
        host = CoreLoop(self.link, SystemClock(), make)
        self.status: int | None = None
        self.frames = FrameDecoder()
        self.pending: list[Event] = []

        def run() -> None:
            self.status = host.run()

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def post(self, *commands: Command) -> None:
        for command in commands:
            self.sock.sendall(encode_frame(encode(command)))

    def read(self) -> Event | None:
        """The next event; None at the end."""
        while not self.pending:
            data = self.sock.recv(65536)
            if not data:
                return None
            bodies = self.frames.feed(data)
            self.pending = [msgspec.msgpack.decode(body, type=Event) for body in bodies]
        return self.pending.pop(0)

    def read_until(self, kind: type[Any]) -> list[Event]:
        events: list[Event] = []
        while (event := self.read()) is not None:
            events.append(event)
            if isinstance(event, kind):
                return events
        raise AssertionError(f"the host ended without {kind.__name__}: {events}")

    def end(self) -> int | None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.status


@pytest.fixture
def host(request: pytest.FixtureRequest):
    parents: list[Parent] = []

    def make(core: FakeCore | None = None, **options: int) -> Parent:
        parents.append(Parent(core, **options))
        return parents[-1]

    yield make
    for parent in parents:
        parent.sock.close()
        parent.end()


def test_a_life_from_start_to_stop(host):
    parent = host()
    parent.post(StartCore(spec=SPEC))
    events = parent.read_until(CoreReady)
    assert isinstance(events[0], LoadProgress)
    sampling = SamplingParams(max_tokens=3)
    request = GenerateRequest(request_id="r", model="m", prompt=token_ids([5]), sampling=sampling)
    parent.post(Submit(handle=1, request=request), QueryStats())
    assert isinstance(parent.read_until(Stats)[-1], Stats)
    parent.post(StopCore())
    events = parent.read_until(CoreStopped)
    assert events[-1] == CoreStopped(leaked_blocks=0)
    assert parent.read() is None
    assert parent.end() == 0


def test_stopping_tells_what_was_leaked(host):
    core = FakeCore()
    parent = host(core)
    parent.post(StartCore(spec=SPEC), StopCore())
    assert parent.read_until(CoreStopped)[-1] == CoreStopped(leaked_blocks=3)
    assert parent.end() == 0
    assert core.closed == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_parent_that_goes_away_ends_the_host(host, when: str):
    core = FakeCore()
    parent = host(core)
    if when == "after":
        parent.post(StartCore(spec=SPEC))
        parent.read_until(CoreReady)
    parent.sock.close()
    assert parent.end() == 0
    assert core.closed == (when == "after")


def test_an_idle_host_sleeps_until_the_core_wants_to_wake(host):
    core = FakeCore()
    core.due = SystemClock().now() + 0.1

    def woken() -> list[Event]:
        core.due = None
        return [LoadProgress(stage="woken")]

    core.on_step = woken
    parent = host(core)
    parent.post(StartCore(spec=SPEC))
    assert parent.read_until(CoreReady)
    assert parent.read() == LoadProgress(stage="woken")
    assert core.steps == 1


def test_a_slow_reader_stops_the_steps_and_loses_nothing(host):
    numbers = iter(range(10_000))
    core = FakeCore(lambda: [LoadProgress(stage=f"{next(numbers):0>1000}")])
    parent = host(core, high_water=10_000)
    parent.post(StartCore(spec=SPEC))
    parent.read_until(CoreReady)
    deadline = time.monotonic() + 10
    while not parent.link.congested:  # nobody reads
        assert time.monotonic() < deadline
    stalled = core.steps
    parent.thread.join(0.2)
    assert core.steps == stalled
    seen = [int(parent.read().stage) for _ in range(stalled + 100)]
    assert seen == list(range(stalled + 100))
    assert core.steps > stalled


def pause() -> tuple[Callable[[], None], threading.Event, threading.Event]:
    """(what a core calls, set when it has, set by the test to let it go on)."""
    reached, go_on = threading.Event(), threading.Event()

    def stop_here() -> None:
        reached.set()
        assert go_on.wait(10)

    return stop_here, reached, go_on


def test_a_step_is_reported_while_the_next_one_computes(host):
    core = OverlappingCore(2)
    core.before[2], reached, begin = pause()
    core.after[2], computing, end = pause()
    parent = host(core)
    parent.post(StartCore(spec=SPEC))
    parent.read_until(CoreReady)
    assert reached.wait(10)
    assert parent.link.unsent
    begin.set()
    assert computing.wait(10)
    assert parent.read() == core.report(1)
    end.set()
    assert parent.read() == core.report(2)


def test_a_core_without_work_reports_at_once(host):
    core = OverlappingCore(1)
    parent = host(core)
    parent.post(StartCore(spec=SPEC))
    parent.read_until(CoreReady)
    assert parent.read() == core.report(1)
    assert core.steps == 1


def test_a_step_that_does_not_write_is_reported_when_it_ends(host):
    core = OverlappingCore(3)
    core.silent = {2, 3}
    core.before[3], reached, go_on = pause()
    parent = host(core)
    parent.post(StartCore(spec=SPEC))
    parent.read_until(CoreReady)
    assert reached.wait(10)
    assert [parent.read(), parent.read()] == [core.report(1), core.report(2)]
    go_on.set()
    assert parent.read() == core.report(3)


def test_a_step_is_reported_before_a_command_is_handled(host):
    core = OverlappingCore(2)
    core.after[1], reached, go_on = pause()
    handled: list[int] = []
    core.on_command = lambda: handled.append(parent.link.unsent)
    core.before[2] = lambda: handled.append(parent.link.unsent)
    parent = host(core)
    parent.post(StartCore(spec=SPEC))
    parent.read_until(CoreReady)
    assert reached.wait(10)
    parent.post(QueryStats())
    go_on.set()
    assert [parent.read(), parent.read()] == [core.report(1), core.report(2)]
    assert handled == [0, 0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_breaks_down_does_not_take_the_last_one_along(host, when: str):
    core = OverlappingCore()

    def fail() -> None:
        raise RuntimeError("no")

    getattr(core, when)[3] = fail
    parent = host(core)
    parent.post(StartCore(spec=SPEC))
    parent.read_until(CoreReady)
    events = parent.read_until(CoreFailed)
    assert events[:-1] == [core.report(1), core.report(2)]
    assert parent.end() == 1


def test_an_overlapping_core_that_gives_up_has_reported_all(host):
    core = OverlappingCore()
    core.fails_at = 3
    parent = host(core)
    parent.post(StartCore(spec=SPEC))
    parent.read_until(CoreReady)
    assert [parent.read() for _ in range(3)] == [core.report(n) for n in (1, 2, 3)]
    assert parent.read() is None
    assert parent.end() == 1


def test_a_parent_that_goes_away_within_a_step_ends_the_host(host):
    core = OverlappingCore()
    core.before[2], reached, go_on = pause()
    parent = host(core)
    parent.post(StartCore(spec=SPEC))
    assert reached.wait(10)
    parent.sock.close()
    go_on.set()
    assert parent.end() == 0
    assert (core.steps, core.closed) == (2, 1)


def test_a_slow_reader_stops_the_steps_of_an_overlapping_core_too(host):
    core = OverlappingCore(10_000)
    core.size = 1000
    parent = host(core, high_water=10_000)
    parent.post(StartCore(spec=SPEC))
    parent.read_until(CoreReady)
    deadline = time.monotonic() + 10
    while not parent.link.congested:  # nobody reads
        assert time.monotonic() < deadline
    parent.thread.join(0.1)
    stalled = core.steps
    parent.thread.join(0.2)
    assert core.steps == stalled
    assert parent.link.unsent < 10_000 + 2 * 1100
    assert [parent.read() for _ in range(stalled + 100)] == [
        core.report(number) for number in range(1, stalled + 101)
    ]


def test_commands_are_taken_although_nobody_reads(host):
    core = FakeCore(lambda: [LoadProgress(stage="x" * 1000)])
    parent = host(core, high_water=1000)
    parent.post(StartCore(spec=SPEC))
    parent.read_until(CoreReady)
    parent.thread.join(0.1)
    parent.post(StopCore())
    parent.read_until(CoreStopped)
    assert parent.end() == 0


def test_a_core_that_breaks_down_says_so_and_is_closed(host, caplog):
    core = FakeCore()
    parent = host(core)
    parent.post(StartCore(spec=SPEC), QueryStats())
    event = parent.read_until(CoreFailed)[-1]
    assert event == CoreFailed(kind="EngineError", message="KeyError: 'no such thing'")
    assert parent.end() == 1
    assert core.closed == 1
    assert "broke down" in caplog.text


def test_a_core_that_gives_up_ends_the_host(host):
    core = FakeCore(
        lambda: [StepOutput(deltas=[]), CoreFailed(kind="EngineDied", message="broken")]
    )
    parent = host(core)
    parent.post(StartCore(spec=SPEC))
    assert parent.read_until(CoreFailed)[-1] == CoreFailed(kind="EngineDied", message="broken")
    assert parent.read() is None
    assert parent.end() == 1
    assert (core.steps, core.closed) == (1, 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("no"), "ConfigError"),
        (RuntimeError("no"), "EngineError"),
        (ImportError("libfoo.so: no"), "ConfigError"),
    ],
)
def test_a_load_that_fails_is_told_by_name(host, error: Exception, kind: str):
    core = FakeCore()
    core.load_error = error
    parent = host(core)
    parent.post(StartCore(spec=SPEC))
    failed = parent.read_until(CoreFailed)[-1]
    assert failed.kind == kind
    assert "no" in failed.message
    assert parent.end() == 1
    assert core.closed == 1


def test_anything_before_start_is_a_protocol_error(host):
    parent = host()
    parent.post(QueryStats())
    assert parent.read_until(CoreFailed)[-1].kind == "ProtocolError"
    assert parent.end() == 1


def test_a_core_without_transports_says_so(host):
    parent = host()
    parent.post(StartCore(spec=SPEC))
    assert parent.read_until(CoreReady)[-1].transports is False
    parent.post(StopCore())
    assert parent.end() == 0


class Watched(ScriptedExecutor):
    """Computes with another process, which is lost at the third check."""

    health_interval = 0.01
    checks = 0

    def check_health(self) -> None:
        self.checks += 1
        if self.checks == 3:
            raise EngineDied("rank 1 is lost")


@pytest.mark.parametrize("due", [None, 0.001])
def test_an_idle_core_notices_that_another_process_is_lost(host, due: float | None):
    """Also if requests' deadlines wake it more often."""
    executor = Watched()
    core = EngineCore(executor, SystemClock())
    if due is not None:
        core.wake_at = lambda: SystemClock().now() + due  # type: ignore[method-assign]
    parent = host(core)
    parent.post(StartCore(spec=SPEC))
    failed = parent.read_until(CoreFailed)[-1]
    assert (failed.kind, failed.message) == ("EngineDied", "rank 1 is lost")
    assert parent.end() == 1
    assert executor.checks == 3


def test_a_core_that_computes_by_itself_needs_no_checks():
    assert EngineCore(ScriptedExecutor(), SystemClock()).health_interval is None
