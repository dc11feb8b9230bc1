"""The engine core by hand: loading, refusals, failing executors, deadlines, what it reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.blocks.hashing import block_hashes, hash_secret_id, prompt_root
from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.kit import STATS_INTERVAL
from pdserve.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDied,
    EngineError,
    Overloaded,
    StepFailed,
)
from pdserve.messages.engine import (
    Abort,
    ClearCache,
    EngineSpec,
    QueryStats,
    SetHashSecret,
    StartCore,
    Stats,
    StepOutput,
)
from pdserve.messages.kv_events import BlockStored, PoolCleared
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.scripted import ENGINE, ScriptedExecutor, reference_tokens, reference_vector
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from pdserve.engine_core.executor import StepPlan, StepResult

SPEC = EngineSpec(
    engine=ENGINE,
    model="",
    block_size=4,
    max_batch_tokens=32,
    max_sequences=8,
    options={"blocks": "64", "raise_on": "90", "break_on": "91"},
)


def request(*prompt: int, **changes: Any) -> GenerateRequest:
    fields = SamplingParams.__struct_fields__
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(prompt or (11, 12, 13)),
        sampling=SamplingParams(**({"max_tokens": 8} | sampling)),
        **changes,
    )


class TimedExecutor(ScriptedExecutor):
    """Takes a second of somebody else's clock per step, and can be told to misbehave."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.too_few = False
        self.closed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.clock.advance(1.0)
        result = super().execute(plan)
        if self.too_few:
            result.tokens.pop()
        return result

    def close(self) -> None:
        self.closed += 1
        super().close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def executor(clock: ManualClock) -> TimedExecutor:
    return TimedExecutor(clock)


@pytest.fixture
def engine(executor: TimedExecutor, clock: ManualClock, watch_blocks):
    with InlineEngine.of(executor, SPEC, clock) as engine:
        yield engine
        watch_blocks(engine.pool)


def test_capabilities_are_what_was_loaded(engine: InlineEngine):
    capabilities = engine.capabilities
    assert (capabilities.num_blocks, capabilities.block_size) == (64, 4)
    assert capabilities.max_model_len == 256
    assert capabilities.eos_token_ids == (2,)
    assert capabilities.kv_events
    assert engine.stages == ["reading the script", "allocating KV blocks"]


def test_a_length_that_does_not_fit_is_reduced_loudly(
    executor: TimedExecutor,
):
    small = msgspec.structs.replace(SPEC, options=SPEC.options | {"blocks": "10"})
    with InlineEngine.of(executor, small) as engine:
        assert engine.capabilities.max_model_len == 40
        assert "reduced to 40" in engine.capabilities.reduced
        ledger = engine.submit(request(max_tokens=100))
        engine.run()
        assert len(ledger.tokens[0]) == 37


def test_a_load_that_fails_still_closes_the_executor(executor: TimedExecutor, clock: ManualClock):
    core = EngineCore(executor, clock)
    bad = msgspec.structs.replace(SPEC, options={"load_error": "no"})
    with pytest.raises(ConfigError):
        core.load(bad, lambda progress: None)
    assert core.close() == 0
    assert executor.closed == 1


def test_a_step_that_fails_ends_its_requests_and_the_rest_go_on(engine: InlineEngine):
    poisoned = engine.submit(request(90))
    engine.step()
    assert isinstance(poisoned.error, StepFailed)
    assert "the script says" in poisoned.error.message
    healthy = engine.submit(request())
    engine.run()
    assert healthy.error is None


def test_every_request_of_a_failed_step_may_go_on_elsewhere(engine: InlineEngine):
    company = [engine.submit(request(n=2)), engine.submit(request(max_tokens=20))]
    engine.step()
    engine.submit(request(90))
    engine.step()
    assert all(isinstance(ledger.error, StepFailed) for ledger in company)
    assert all(ledger.tokens[0] for ledger in company)


def test_what_goes_wrong_for_one_sequence_costs_no_other(executor: TimedExecutor):
    spoiling = msgspec.structs.replace(SPEC, options=SPEC.options | {"spoil_on": "93"})
    with InlineEngine.of(executor, spoiling) as engine:
        company = [engine.submit(request(n=2, prompt_logprobs=1)), engine.submit(request())]
        engine.step()
        spoilt = engine.submit(request(93, 10, 11, 12, 13, n=2, prompt_logprobs=0))
        late = engine.submit(request(prompt_logprobs=2))
        engine.step()
        assert isinstance(spoilt.error, StepFailed)
        engine.pool.check()
        engine.run()
        assert not any(ledger.error for ledger in (*company, late))
        assert [ledger.tokens[0] for ledger in (*company, late)] == [
            reference_tokens(ledger.request) for ledger in (*company, late)
        ]
        for _ in range(4):  # it does not count as a failure of the executor
            engine.submit(request(93))
            engine.step()
        assert engine.failure is None


def test_an_executor_that_says_it_died_is_broken(engine: InlineEngine):
    engine.submit(request(91))
    engine.step()
    assert isinstance(engine.failure, EngineDied)
    engine.submit(request())
    assert not engine.core.has_work


def test_three_failing_steps_in_a_row_are_a_broken_executor(engine: InlineEngine):
    for _ in range(2):
        engine.submit(request(90))
        engine.step()
        engine.submit(request())
        engine.run()  # a good step in between
    assert engine.failure is None
    for expected in (None, None, EngineDied):
        engine.submit(request(90))
        engine.step()
        assert type(engine.failure) is (expected or type(None))


def test_results_of_the_wrong_number_are_the_executors_failure(
    engine: InlineEngine, executor: TimedExecutor
):
    executor.too_few = True
    ledger = engine.submit(request())
    engine.step()
    assert isinstance(ledger.error, EngineError)
    assert "0 tokens" in ledger.error.message


def test_a_vector_that_is_missing_is_the_executors_failure(
    engine: InlineEngine, executor: TimedExecutor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(executor, "_pool", lambda chunk: b"")
    ledger = engine.submit(request(pooling="mean", max_tokens=1))
    engine.run()
    assert isinstance(ledger.error, StepFailed)


def test_a_vector_comes_with_its_costs_and_without_tokens(engine: InlineEngine):
    wants = request(*range(3, 43), pooling="mean", max_tokens=1)
    ledger = engine.submit(wants)
    engine.run()
    (finish,) = ledger.finishes
    assert finish is not None
    assert finish.embedding == reference_vector(wants)
    assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("stop", 40, 0)
    assert (finish.queue_seconds, finish.prefill_seconds) == (0.0, 2.0)
    assert ledger.starts[0] is not None


def test_a_deadline_passes_although_nothing_happens(engine: InlineEngine, clock: ManualClock):
    held = engine.pool.reserve(64)
    assert held
    waiting = engine.submit(request(deadline=5.0))
    engine.step()
    while engine.core.has_work:
        engine.step()
    assert engine.core.wake_at() == 105.0
    clock.advance(5.0)
    engine.step()
    assert isinstance(waiting.error, DeadlineExceeded)
    assert "waiting in the engine's queue" in waiting.error.message
    assert engine.core.wake_at() is None
    engine.pool.release(held)


def test_what_was_produced_before_the_deadline_comes_before_the_error(
    engine: InlineEngine, clock: ManualClock
):
    ledger = engine.submit(request(max_tokens=100, deadline=3.5))
    engine.run()
    assert isinstance(ledger.error, DeadlineExceeded)
    assert len(ledger.tokens[0]) == 4  # steps take a second each


def test_nothing_follows_an_abort_not_even_what_was_ready_to_be_said(engine: InlineEngine):
    refused = engine.submit(request(deadline=0.0))
    complete = engine.submit(request(n=2, output=[[7] * 8, []]))
    for ledger in (refused, complete):
        engine.abort(ledger)
    engine.step()
    assert refused.deltas == complete.deltas == 0


def test_clearing_the_cache_is_told_and_makes_the_next_prompt_new(engine: InlineEngine):
    engine.generate([request(*range(10, 22), max_tokens=1)])
    assert any(isinstance(event, BlockStored) for event in engine.kv_events)
    engine.core.handle(ClearCache())
    engine.run()
    assert engine.kv_events[-1] == PoolCleared()
    ledger = engine.submit(request(*range(10, 22), max_tokens=1))
    engine.run()
    assert ledger.finishes[0] is not None
    assert ledger.finishes[0].cached_tokens == 0


def test_without_prefix_cache_there_are_no_events(executor: TimedExecutor):
    with InlineEngine.of(executor, msgspec.structs.replace(SPEC, prefix_cache=False)) as engine:
        engine.generate([request(*range(10, 30))] * 2)
        assert engine.kv_events == []
        assert not engine.capabilities.kv_events


def test_hashes_repeat_with_a_secret_and_are_private_without(executor: TimedExecutor):
    def stored(spec: EngineSpec) -> list[bytes]:
        with InlineEngine.of(ScriptedExecutor(), spec) as engine:
            engine.generate([request(*range(10, 22), max_tokens=1)])
            return [h for e in engine.kv_events if isinstance(e, BlockStored) for h in e.hashes]

    secret = msgspec.structs.replace(SPEC, hash_secret=b"cluster")
    assert stored(secret) == stored(secret)
    assert stored(SPEC) != stored(SPEC)


def names_of(tokens: list[int], secret: bytes) -> list[bytes]:
    root = prompt_root(secret, "scripted", "")
    return [*block_hashes(tokens, 4, parent=root, secret=secret)]


def test_another_secret_renames_what_is_in_use_and_forgets_the_rest():
    spec = msgspec.structs.replace(SPEC, hash_secret=b"old")
    with InlineEngine.of(ScriptedExecutor(), spec) as engine:
        engine.generate([request(*range(40, 52), max_tokens=1)])  # cached, and soon forgotten
        prompt = list(range(10, 22))
        ledgers = [engine.submit(request(*prompt, n=2, max_tokens=6)) for _ in range(2)]
        for _ in range(3):
            engine.step()
        assert max(map(engine.pool.references, range(64))) > 1  # choices share blocks
        engine.core.handle(SetHashSecret(hash_secret=b"new"))
        engine.pool.check()
        assert engine.pool.match(names_of(prompt, b"new")[:2])
        assert not engine.pool.match(names_of(prompt, b"old"))
        assert not engine.pool.match(names_of(list(range(40, 52)), b"new"))
        engine.core.handle(SetHashSecret(hash_secret=b"new"))  # it has that one already
        assert len(engine.pool.match(names_of(prompt, b"new"))) >= 2
        engine.run()
        for ledger in ledgers:
            assert ledger.tokens == [
                reference_tokens(ledger.request, choice) for choice in range(2)
            ]
        cleared = engine.kv_events.index(PoolCleared())
        stored = [
            h for e in engine.kv_events[cleared:] if isinstance(e, BlockStored) for h in e.hashes
        ]
        assert stored[:3] == names_of(prompt, b"new")
        hit = engine.submit(request(*prompt, 5, max_tokens=1))
        engine.run()
        assert hit.finishes[0] is not None
        assert hit.finishes[0].cached_tokens == 12


def test_a_prompts_names_may_come_with_it():
    """All but the first are taken unseen, so here they lie: nothing else shows that they were."""
    spec = msgspec.structs.replace(SPEC, hash_secret=b"key")
    prompt = list(range(10, 23))
    lies = [names_of(prompt, b"key")[0], *(bytes([n]) * 16 for n in range(2))]
    named = request(
        *prompt, max_tokens=5, block_names=b"".join(lies), names_id=hash_secret_id(b"key")
    )
    with InlineEngine.of(ScriptedExecutor(), spec) as engine:
        engine.generate([named])
        assert engine.pool.match(lies) == engine.pool.match(lies[:3])
        assert len(engine.pool.match(lies)) == 3
        (generated,) = [
            e.hashes for e in engine.kv_events if isinstance(e, BlockStored) and len(e.hashes) == 1
        ]
        output = reference_tokens(named)
        tokens = [*prompt, *output][12:16]
        assert generated == block_hashes(tokens, 4, parent=lies[-1], secret=b"key")


@pytest.mark.parametrize(
    "changes",
    [
        {"names_id": hash_secret_id(b"another")},
        {"names_id": b""},
        {"block_names": b"x" * 32},
        {},  # of another model, or of blocks of another size
    ],
)
def test_names_of_another_making_are_ignored(changes: dict[str, Any]):
    spec = msgspec.structs.replace(SPEC, hash_secret=b"key")
    prompt = list(range(10, 22))
    named = request(*prompt, max_tokens=1, block_names=b"x" * 48, names_id=hash_secret_id(b"key"))
    with InlineEngine.of(ScriptedExecutor(), spec) as engine:
        engine.generate([msgspec.structs.replace(named, **changes)])
        assert len(engine.pool.match(names_of(prompt, b"key"))) == 3


def test_without_prefix_cache_a_secret_changes_nothing(executor: TimedExecutor):
    with InlineEngine.of(executor, msgspec.structs.replace(SPEC, prefix_cache=False)) as engine:
        engine.core.handle(SetHashSecret(hash_secret=b"new"))
        engine.generate([request(*range(10, 30))])
        assert engine.kv_events == []


def test_statistics_come_while_it_works_and_once_more_at_the_end(
    engine: InlineEngine, clock: ManualClock
):
    engine.submit(request(max_tokens=6))
    snapshots: list[Stats] = []
    while engine.core.has_work:
        snapshots += [event for event in engine.step() if isinstance(event, Stats)]
    assert len(snapshots) >= 2
    assert STATS_INTERVAL < 1.0
    last = snapshots[-1].stats
    assert (last.running, last.waiting, last.finished, last.output_tokens) == (0, 0, 1, 6)
    assert last.steps == 6
    assert last.step_seconds == 6.0
    assert last.blocks_total == 64 == last.blocks_free + last.blocks_cached
    engine.core.handle(QueryStats())
    assert engine.step() == [Stats(stats=last)]


def test_deltas_of_a_step_come_together(engine: InlineEngine):
    for n in range(5):
        engine.submit(request(n + 10))
    events = engine.step()
    assert [len(event.deltas) for event in events if isinstance(event, StepOutput)] == [5]


def test_refusals_carry_their_advice(executor: TimedExecutor):
    tight = msgspec.structs.replace(SPEC, max_waiting=1)
    with InlineEngine.of(executor, tight) as engine:
        engine.submit(request())
        refused = engine.submit(request())
        engine.run()
        assert isinstance(refused.error, Overloaded)
        assert refused.error.retry_after == 1.0


def test_ended_and_preempted_sequences_are_released_at_the_executor(executor: TimedExecutor):
    small = msgspec.structs.replace(
        SPEC, max_model_len=24, options=SPEC.options | {"blocks": "8"}, prefix_cache=False
    )
    with InlineEngine.of(executor, small) as engine:
        engine.generate([request(n, max_tokens=20) for n in (10, 11, 12)])
        aborted = engine.submit(request())
        engine.step()
        engine.abort(aborted)
        engine.run()
        assert executor.released[-1] == (4, 0), "an idle core still owes a release"
    handles = [handle for handle, _ in executor.released]
    assert set(handles) == {1, 2, 3, 4}
    assert len(handles) > 4, "a preempted sequence is released more than once"


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt(
    executor: TimedExecutor,
):
    small = msgspec.structs.replace(
        SPEC,
        max_model_len=40,
        max_batch_tokens=2,
        max_sequences=2,
        options=SPEC.options | {"blocks": "12"},
    )
    with InlineEngine.of(executor, small) as engine:
        engine.submit(request(10, 11, 12, max_tokens=20))
        wanting = engine.submit(request(*range(20, 53), max_tokens=2, prompt_logprobs=0))
        engine.run()
        assert wanting.finishes[0] is not None
        assert wanting.finishes[0].preemptions == 1
        assert wanting.prompt_logprobs[0] is not None  # the ledger has compared the tokens


def test_an_unknown_abort_and_a_command_for_the_host(engine: InlineEngine):
    engine.core.handle(Abort(handle=77))
    with pytest.raises(ValueError, match="for the host"):
        engine.core.handle(StartCore(spec=SPEC))


def test_closing_in_the_middle_of_things_frees_everything(executor: TimedExecutor):
    engine = InlineEngine.of(executor, SPEC)
    for n in range(20):
        engine.submit(request(n + 3, n=2, max_tokens=50))
    engine.step()
    engine.step()
    assert engine.close() == 0
    assert executor.closed == 1


def test_the_first_token_says_what_it_took(engine: InlineEngine):
    """Work is shared by tokens: what others computed in the same step is not one's own."""
    engine.submit(request(*range(10, 34)))  # 24 of a budget of 32
    long = engine.submit(request(*range(40, 64)))  # 8 with it, 16 in the next step
    engine.run()
    start = long.starts[0]
    assert start is not None
    assert start.cached_tokens == 0
    assert (start.queue_seconds, start.prefill_seconds) == (0.0, 2.0)
    assert start.work_seconds == pytest.approx(8 / 32 + 16 / 17)
    again = engine.submit(request(*range(40, 64)))
    engine.run()
    assert again.starts[0] is not None
    assert again.starts[0].cached_tokens == 20


def test_statistics_say_what_is_still_to_be_computed(engine: InlineEngine):
    engine.submit(request(*range(10, 34)))
    engine.submit(request(*range(40, 64)))
    assert isinstance(engine.core, EngineCore)
    stats = engine.core.stats()
    assert (stats.uncomputed_tokens, stats.kv_tokens, stats.itl) == (48, 0, 0.0)
    engine.step()
    stats = engine.core.stats()
    assert (stats.uncomputed_tokens, stats.kv_tokens) == (16, 32)
    engine.step()
    stats = engine.core.stats()
    assert (stats.uncomputed_tokens, stats.kv_tokens, stats.itl) == (0, 49, 1.0)


def test_every_abort_is_answered_with_what_the_request_was_doing(engine: InlineEngine):
    freed: list[tuple[int, str]] = []
    core = engine.core
    assert isinstance(core, EngineCore)
    core.on_freed = lambda handle, phase: freed.append((handle, phase))
    held = engine.pool.reserve(60)
    assert held is not None
    engine.submit(request(*[7] * 40))
    engine.submit(request(max_tokens=20))
    decoding = engine.submit(request(*[9] * 9, max_tokens=100, priority=1))
    engine.step()
    engine.pool.release(held)
    for handle in (1, 2, 3, 3, 77):
        core.handle(Abort(handle=handle))
    assert freed == [(1, "queued"), (2, "queued"), (3, "decoding"), (3, ""), (77, "")]
    assert decoding.tokens[0]
    engine.pool.check()
    freed.clear()
    prompt = engine.submit(request(*[5] * 40))
    engine.step()
    assert not prompt.tokens[0]
    core.handle(Abort(handle=4))
    assert freed == [(4, "prefilling")]
    assert engine.pool.counts().used == 0


def test_what_is_freed_is_looked_for_among_what_was_touched_only():
    """Not among all that was aborted: a step ends a few of them."""
    core = EngineCore(ScriptedExecutor(), ManualClock())
    freed: list[int] = []
    core.on_freed = lambda handle, phase: freed.append(handle)
    asked: list[int] = []

    class Receiving:
        def holds(self, handle: int) -> bool:
            asked.append(handle)
            return handle == 5

    core._incoming = Receiving()  # type: ignore[assignment]
    core._aborted = dict.fromkeys(range(1000), "prefilling")
    core._note_freed({5, 7, 2000})
    assert sorted(asked) == [5, 7]
    assert freed == [7]
    assert 5 in core._aborted


def test_a_preempted_request_is_aborted_as_such(executor: TimedExecutor):
    small = msgspec.structs.replace(SPEC, options=SPEC.options | {"blocks": "12"})
    with InlineEngine.of(executor, small) as engine:
        core = engine.core
        assert isinstance(core, EngineCore)
        freed: list[str] = []
        core.on_freed = lambda handle, phase: freed.append(phase)
        engine.submit(request(*[7] * 14, max_tokens=30))
        engine.submit(request(*[8] * 14, max_tokens=30))
        while not core.scheduler.counters.preemptions:
            engine.step()
        core.handle(Abort(handle=2))
        assert freed == ["preempted"]
        engine.ledgers[2].aborted = True
        engine.run()


def test_prompts_are_cut_where_steps_take_long(clock: ManualClock, executor: TimedExecutor):
    """Of a second each, here; the next one is to take what the target allows."""
    wide = msgspec.structs.replace(SPEC, max_batch_tokens=200, options={"blocks": "200"})
    with InlineEngine.of(executor, wide, clock) as engine:
        seen: list[int] = []
        executor._on_plan = lambda plan: seen.append(plan.num_tokens)
        engine.submit(request(*range(3, 93), *range(3, 93), *range(3, 53)))
        engine.run()
        assert seen[:2] == [200, 30]
        engine.submit(request(*range(4, 94), *range(4, 94), *range(4, 54)))
        engine.run()
        first = seen[seen.index(1) + 7 :]
        assert max(first) == 120
