"""The host: what it does with commands, idleness, slow readers and broken cores."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.clock import SystemClock
from pdserve.engine_core.core_socket import CoreSocket
from pdserve.engine_core.engine_loader import load_core
from pdserve.engine_core.main import CoreLoop
from pdserve.errors import ConfigError
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
from pdserve.testing.scripted import ENGINE
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
            self.sock.sendall(encode_frame(msgspec.msgpack.encode(command)))

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
    request = GenerateRequest(request_id="r", model="m", prompt=[5], sampling=sampling)
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
