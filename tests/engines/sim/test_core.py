"""The sim core by hand: when steps end, and what may happen while they are under way."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.engine_loader import load_core
from pdserve.errors import EngineDied
from pdserve.messages.engine import (
    ClearCache,
    CoreFailed,
    QueryStats,
    Rejected,
    Stats,
    StepOutput,
    Submit,
)
from pdserve.perf_model.step_time import preset_of
from pdserve_engines.sim import SimCore, SimExecutor
from tests.engines.sim.driver import Driver, request, spec

if TYPE_CHECKING:
    from pdserve.engine_core.executor import StepPlan, StepResult

MODEL = preset_of("h100-8b").timing
ROOM = 1600


def prompt_seconds(tokens: int, start: int = 0) -> float:
    return MODEL.step([(start, tokens)], 0, 0, ROOM)


def decode_seconds(batch: int, kv_tokens: int) -> float:
    return MODEL.step((), batch, kv_tokens, ROOM)


def test_it_is_found_by_name_with_the_clock_it_is_given():
    clock = ManualClock()
    core = load_core("sim", clock)
    assert isinstance(core, SimCore)
    core.load(spec(), lambda progress: None)
    core.handle(QueryStats())
    assert core.step()
    assert core.close() == 0


def test_each_step_ends_when_the_model_says():
    with Driver(spec()) as driver:
        handle = driver.submit(request(range(4, 24), max_tokens=3))
        ledger = driver.story.ledgers[handle]
        first = prompt_seconds(20)
        assert driver.core.wake_at() == first
        driver.run_until(first)
        assert ledger.tokens == [[]]
        driver.run_until(first + 1e-6)
        assert len(ledger.tokens[0]) == 1
        driver.run()
        expected = first + decode_seconds(1, 20) + decode_seconds(1, 21)
        assert driver.story.ended[(handle, 0)] == expected
        (finish,) = ledger.finishes
        assert finish is not None
        assert (finish.queue_seconds, finish.prefill_seconds) == (0.0, first)


def test_a_slow_worker_takes_longer_and_says_the_same():
    def end(slowdown: float) -> tuple[float, list[list[int]]]:
        with Driver(spec(slowdown=slowdown)) as driver:
            handle = driver.submit(request())
            story = driver.run()
            return story.ended[(handle, 0)], story.ledgers[handle].tokens

    (fast, tokens), (slow, same) = end(1.0), end(2.0)
    assert slow == pytest.approx(2 * fast)
    assert same == tokens
    assert end(0.0)[0] == 0.0


def test_long_prompts_are_chunked_and_decodes_go_on_beside_them():
    with Driver(spec(max_batch_tokens=16)) as driver:
        one = driver.submit(request(max_tokens=40))
        driver.run_until(0.03)
        before = len(driver.story.ledgers[one].tokens[0])
        two = driver.submit(request(range(4, 54), max_tokens=1))
        driver.run_until(0.2)
        assert driver.story.ledgers[two].done
        driver.run()
        assert before > 1
        start = driver.story.ledgers[two].starts[0]
        assert start is not None
        # 50 tokens beside one decode: three chunks of 15 and one of 5; each ends in a step
        assert start.prefill_seconds == pytest.approx(
            sum(
                MODEL.step([(s, c)], 1, 8, ROOM) for s, c in [(0, 15), (15, 15), (30, 15), (45, 5)]
            ),
            rel=1e-2,
        )


@pytest.mark.parametrize("target", [0.0, 0.025])
def test_streams_keep_a_target_beside_a_long_prompt(target: float):
    """Sixteen streams, and a prompt of 16,384 tokens on one H100 that serves 8B."""
    long = 16_384
    wide = spec(
        itl_target=target,
        max_batch_tokens=2048,
        max_sequences=32,
        max_model_len=20_000,
        blocks=8000,
    )
    with Driver(wide) as driver:
        streams = [driver.submit(request(max_tokens=2000)) for _ in range(16)]
        driver.run_until(1.0)
        prompt = driver.submit(request([4 + n % 80 for n in range(long)], max_tokens=1))
        one, ends = driver.story.ledgers[streams[0]], [1.0]
        while not driver.story.ledgers[prompt].done:
            before = len(one.tokens[0])
            driver.run_until(driver.clock.now() + 1e-3)
            if len(one.tokens[0]) > before:
                ends.append(driver.clock.now())
        gaps = sorted(b - a for a, b in itertools.pairwise(ends))
        alone = prompt_seconds(long)
        assert driver.story.ended[(prompt, 0)] - 1.0 < 4 * alone
        for handle in streams:
            driver.abort(handle)
        driver.run()
    p99 = gaps[int(0.99 * len(gaps))]
    assert p99 <= 1.2 * 0.025 if target else p99 > 0.05


def test_who_comes_during_a_step_waits_for_its_end():
    with Driver(spec()) as driver:
        driver.submit(request(range(4, 30), max_tokens=2))
        due = driver.core.wake_at()
        assert due is not None
        driver.run_until(due / 2)
        handle = driver.submit(request(max_tokens=1))
        assert driver.core.wake_at() == due
        driver.run()
        start = driver.story.ledgers[handle].starts[0]
        assert start is not None
        assert start.queue_seconds == pytest.approx(due / 2)


def test_an_abort_takes_effect_at_the_end_of_the_step():
    with Driver(spec()) as driver:
        handle = driver.submit(request(range(4, 30), max_tokens=50))
        due = driver.core.wake_at()
        assert due is not None
        driver.run_until(due / 2)
        driver.abort(handle)
        assert driver.core.pool.counts().used > 0  # a step that is under way writes to them
        driver.run()  # a delta after the abort would fail the ledger
        assert driver.clock.now() == due
        assert driver.core.pool.counts().used == 0
        assert driver.core.stats().aborted == 1


def test_a_cache_is_cleared_between_steps():
    with Driver(spec()) as driver:
        driver.submit(request(range(4, 30), max_tokens=1))
        driver.run()
        assert driver.core.pool.counts().cached > 0
        driver.submit(request(range(40, 70), max_tokens=1))
        driver.tell(ClearCache())
        assert driver.core.pool.counts().cached > 0
        driver.run()
        assert driver.core.stats().cached_tokens == 0


def test_a_deadline_in_the_queue_passes_at_the_end_of_a_step():
    with Driver(spec(max_sequences=1, max_batch_tokens=64)) as driver:
        driver.submit(request(range(4, 54), max_tokens=30))
        late = driver.submit(request(deadline=0.01))
        driver.run()
        when, kind, message = driver.story.rejected[late]
        assert kind == "DeadlineExceeded"
        assert "waiting in the engine's queue" in message
        first = prompt_seconds(50)
        assert when == first + decode_seconds(1, 50)


def test_a_refusal_does_not_wait_for_the_step():
    with Driver(spec(max_waiting=1)) as driver:
        driver.submit(request(max_tokens=20))
        driver.submit(request())
        refused = driver.submit(request())
        assert driver.story.rejected[refused][1] == "Overloaded"
        assert driver.clock.now() == 0.0
        driver.run()


def test_statistics_may_be_asked_for_during_a_step():
    with Driver(spec()) as driver:
        driver.submit(request())
        driver.core.handle(QueryStats())
        assert driver.core.has_work
        (event,) = driver.step()
        assert isinstance(event, Stats)
        assert event.stats.running == 1
        assert not driver.core.has_work
        driver.run()


def test_a_flight_of_many_steps_is_cut_by_who_comes():
    with Driver(spec(steps_at_once=1000)) as driver:
        one = driver.submit(request(max_tokens=60))
        driver.run_until(prompt_seconds(3) + 1e-6)
        whole = driver.core.wake_at()
        assert whole is not None
        assert whole > 0.3  # all the rest is one flight
        driver.run_until(0.1)
        assert len(driver.story.ledgers[one].tokens[0]) == 1
        two = driver.submit(request((9, 9), max_tokens=1))
        cut = driver.core.wake_at()
        assert cut is not None
        assert cut - 0.1 < decode_seconds(1, 60)
        driver.run_until(cut + 1e-6)
        done = len(driver.story.ledgers[one].tokens[0])
        assert 10 < done < 30
        start = driver.run().ledgers[two].starts[0]
        assert start is not None
        assert start.queue_seconds == cut - 0.1


def test_few_events_tell_of_many_steps():
    with Driver(spec(steps_at_once=1000, blocks=400)) as driver:
        for number in range(4):
            driver.submit(request((number + 4,), max_tokens=90))
        story = driver.run()
        assert driver.core.stats().steps > 90
        assert story.calls < 20


@pytest.mark.parametrize("late", [0.004, 5.0])
def test_a_host_that_is_late_keeps_the_pace_unless_it_stood_still(late: float):
    with Driver(spec()) as driver:
        handle = driver.submit(request(max_tokens=30))
        ideal = prompt_seconds(3) + sum(decode_seconds(1, 3 + i) for i in range(29))
        while (due := driver.core.wake_at()) is not None:
            driver.clock.advance(max(0.0, due + late - driver.clock.now()))
            driver.step()
            driver.settle()
        end = driver.story.ended[(handle, 0)]
        if late < 0.1:
            assert end == pytest.approx(ideal + late)
        else:
            assert end > 29 * late


class Broken(Exception):
    """What an executor might raise."""


def test_a_failing_step_costs_its_requests_and_three_the_core(monkeypatch):
    driver = Driver(spec())

    def fail(plan: object) -> None:
        raise Broken

    monkeypatch.setattr(driver.executor, "execute", fail)
    for number in range(3):
        handle = driver.submit(request())
        assert driver.core.wake_at() is not None
        driver.clock._now += 1.0
        events = driver.core.step()
        assert [e.handle for e in events if isinstance(e, Rejected)] == [handle]
        assert isinstance(events[-1], CoreFailed) == (number == 2)
    assert not driver.core.has_work
    assert driver.core.wake_at() is None
    assert driver.core.close() == 0


def test_an_executor_that_died_ends_the_core(monkeypatch):
    driver = Driver(spec())

    def die(plan: object) -> None:
        raise EngineDied("dead")

    monkeypatch.setattr(driver.executor, "execute", die)
    driver.submit(request())
    driver.clock.advance(1.0)
    assert isinstance(driver.core.step()[-1], CoreFailed)
    assert driver.core.close() == 0


def test_it_can_be_closed_in_the_middle_of_a_step():
    driver = Driver(spec(block_size=8))
    driver.submit(request(range(4, 30), n=3, temperature=1.0, max_tokens=20))
    driver.run_until(prompt_seconds(26) + 1e-9)  # the choices copy a block in this step
    assert driver.core.pool.counts().used > 0
    assert driver.core.close() == 0


def test_close_before_load_and_twice():
    clock = ManualClock()
    core = load_core("sim", clock)
    assert core.close() == 0
    driver = Driver(spec(content="on"))
    assert driver.core.close() == 0
    assert driver.core.close() == 0


def test_times_are_those_of_a_core_that_waits():
    """The same steps in an `EngineCore` whose executor takes the time itself."""
    settings = spec(max_sequences=4)
    commands = [
        Submit(handle=n, request=request((n + 4,) * 9, max_tokens=3 + n, priority=n % 2))
        for n in range(12)
    ]
    clock = ManualClock()
    core = SimExecutor().make_core(clock)
    core.load(settings, lambda progress: None)
    for command in commands:
        core.handle(command)
    ends = ends_of(core, clock)
    clock = ManualClock()
    waiting = EngineCore(BusyExecutor(clock), clock)
    waiting.load(settings, lambda progress: None)
    for command in commands:
        waiting.handle(command)
    assert ends_of(waiting, clock) == ends
    assert len(ends) == 12


class BusyExecutor(SimExecutor):
    """Its steps take time while it computes them."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.clock._now += self.seconds(plan, self.steps)
        self.steps += 1
        return super().execute(plan)


def ends_of(core: EngineCore, clock: ManualClock) -> dict[int, float]:
    ends: dict[int, float] = {}
    while core.has_work or core.wake_at() is not None:
        if not core.has_work:
            clock._now = max(clock.now(), core.wake_at() or 0.0)
        for event in core.step():
            if isinstance(event, StepOutput):
                ends |= {d.handle: clock.now() for d in event.deltas if d.finish is not None}
    assert core.close() == 0
    return ends


def test_trouble_breaks_one_step(tmp_path):
    trouble = tmp_path / "trouble"
    with Driver(spec(trouble=trouble)) as driver:
        spoilt = driver.submit(request())
        trouble.write_text("fail")
        driver.run_until(0.1)
        assert spoilt in driver.story.rejected
        assert not trouble.exists()
        fine = driver.story.ledgers[driver.submit(request())]
        trouble.write_text("hang 0.01")
        driver.run_until(0.5)
        assert len(fine.tokens[0]) == 8
        assert not trouble.exists()
