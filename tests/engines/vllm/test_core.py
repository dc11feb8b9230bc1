"""The core over a fake of vLLM: the suite of engines, and what only this core promises."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.clock import ManualClock
from pdserve.engine.client import CoreClient
from pdserve.errors import EngineDied, InvalidRequest, Overloaded, StepFailed
from pdserve.messages.engine import ClearCache, EngineSpec, KvEvents, SetHashSecret
from pdserve.messages.kv_events import BlockStored, PoolCleared
from pdserve.messages.lora import LoraAdapter
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.thread_launcher import ThreadLauncher
from pdserve.token_ids import token_ids
from pdserve_engines.vllm.core import VllmCore
from tests.engines.vllm import fake_vllm
from tests.engines.vllm.real import BUNDLED
from tests.engines.vllm.suite import VllmConformance
from tests.engines.vllm.vllm_pool import Router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.engine.port import Engine
    from pdserve.messages.engine import EngineStats, Event

SPEC = EngineSpec(
    engine="vllm",
    model=str(BUNDLED),
    block_size=4,
    max_model_len=120,
    max_batch_tokens=32,
    max_sequences=8,
    hash_secret=b"secret",
)


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)


class TestFakeVllm(VllmConformance):
    prompt = (17, 42, 8)

    def make_engine(self) -> Engine:
        return CoreClient(SPEC, make_launcher=ThreadLauncher)


# ------------------------------------------------------------------ tools


def request(prompt: tuple[int, ...] = (17, 42, 8), **changes: Any) -> GenerateRequest:
    fields = SamplingParams.__struct_fields__
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    defaults: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(prompt),
        sampling=SamplingParams(**(defaults | sampling)),
        **changes,
    )


class Inline(InlineEngine):
    """The core in the test's thread, with a clock that only the test moves."""

    def __init__(self, **changes: Any) -> None:
        self.clock = ManualClock()
        spec = {name: getattr(SPEC, name) for name in SPEC.__struct_fields__} | changes
        self.vllm_core = VllmCore(self.clock)
        super().__init__(self.vllm_core, EngineSpec(**spec))

    def __enter__(self) -> Inline:
        return self

    def stats(self) -> EngineStats:
        return self.vllm_core.stats()

    @property
    def vllm(self) -> fake_vllm.EngineCore:
        return fake_vllm.InprocClient.last.engine_core

    @property
    def inside(self) -> set[str]:
        """Requests that vLLM has."""
        return set(self.vllm.scheduler.requests)

    def run(self) -> None:
        """Step until all is done; waits for grammars take the clock's time."""
        for _ in range(20_000):
            if not self.core.has_work and self.core.wake_at() is None:
                return
            if not self.core.has_work:
                self.clock.advance(0.001)
            self.step()
            assert self.failure is None, self.failure
        raise AssertionError("the core makes no progress")

    def assert_empty(self) -> None:
        """Nothing is kept of any request."""
        core = self.vllm_core
        assert core._choices == {}
        assert core._submissions_here == {}
        assert core._submissions == {}
        assert core.sequences == 0
        assert self.inside == set()
        assert core._vllm.faulty() == []
        assert core.stats().blocks_used == 0


# ------------------------------------------------------------------ choices


def test_choices_after_the_first_wait_for_its_first_token() -> None:
    """So that the prompt is computed once, also if that takes several steps."""
    with Inline() as engine:
        ledger = engine.submit(request(tuple(range(4, 74)), n=3))
        for _ in range(2):
            engine.step()
            assert engine.inside == {"1.0"}
            assert engine.stats().waiting == 2
        engine.step()
        assert ledger.tokens[0]
        assert engine.inside == {"1.0", "1.1", "1.2"}
        engine.run()
        finishes = [finish for finish in ledger.finishes if finish is not None]
        assert [finish.cached_tokens for finish in finishes] == [0, 68, 68]
        engine.assert_empty()


def test_choices_that_continue_begin_together() -> None:
    """Their prompts differ by what was given."""
    with Inline() as engine:
        engine.submit(request(n=2, output=[[5], [6, 7]]))
        assert engine.inside == {"1.0", "1.1"}
        engine.run()
        engine.assert_empty()


def test_ended_choices_are_not_submitted() -> None:
    with Inline() as engine:
        engine.submit(request(n=3, ended=(0, 2)))
        assert engine.inside == {"1.1"}
        engine.run()
        engine.assert_empty()


def test_a_first_choice_that_ends_at_once_lets_the_others_begin() -> None:
    with Inline() as engine:
        ledger = engine.submit(request(n=3, max_tokens=1))
        engine.run()
        assert [len(tokens) for tokens in ledger.tokens] == [1, 1, 1]
        engine.assert_empty()


# ------------------------------------------------------------------ aborts and errors


def test_an_abort_frees_in_the_same_call() -> None:
    with Inline() as engine:
        freed: list[tuple[int, str]] = []
        core = engine.vllm_core
        core.on_freed = lambda handle, phase: freed.append((handle, phase))
        ledger = engine.submit(request(n=2, max_tokens=50))
        other = engine.submit(request((9, 9, 9), max_tokens=50))
        engine.step()
        engine.step()
        assert engine.inside == {"1.0", "1.1", "2.0"}
        engine.abort(ledger)
        assert engine.inside == {"2.0"}
        assert freed == [(1, "decoding")]
        engine.abort(other)
        assert core.stats().blocks_used == 0
        engine.run()
        engine.assert_empty()


def test_an_abort_before_the_first_token_ends_the_choices_that_wait() -> None:
    with Inline() as engine:
        engine.abort(engine.submit(request(n=4)))
        engine.run()
        engine.assert_empty()


def test_what_vllm_refuses_rejects_one_request() -> None:
    with Inline() as engine:
        refused = engine.submit(request(logit_bias={fake_vllm.VOCAB: 1.0}, n=2))
        served = engine.submit(request())
        engine.run()
        assert isinstance(refused.error, InvalidRequest)
        assert "out of the vocabulary" in refused.error.message
        assert served.error is None
        assert served.done
        engine.assert_empty()


def test_a_grammar_that_does_not_compile_rejects_one_request() -> None:
    with Inline() as engine:
        refused = engine.submit(request(grammar="start: nonsense", n=2))
        served = engine.submit(request())
        engine.run()
        assert refused.error is not None
        assert "grammar" in refused.error.message
        assert served.done
        engine.assert_empty()


def test_a_request_that_vllm_ends_with_an_error_is_rejected() -> None:
    """Such as one whose KV could not be loaded; another worker may serve it."""
    with Inline() as engine:
        failed, served = (engine.submit(request(max_tokens=9, n=2)) for _ in range(2))
        engine.step()
        scheduler = engine.vllm.scheduler
        scheduler.failed_grammars.append(scheduler.requests["1.0"])
        engine.step()
        assert isinstance(failed.error, StepFailed)
        engine.run()
        assert served.done
        assert served.error is None
        engine.assert_empty()


def test_output_that_leaves_its_grammar_ends_one_request() -> None:
    """As tokens of an earlier attempt by another model would."""
    with Inline() as engine:
        shape: dict[str, Any] = {"grammar": 'start: "1"', "eos_token_ids": (3,)}
        refused = engine.submit(request(output=[[500]], ignore_eos=False, **shape))
        served = engine.submit(request(ignore_eos=False, **shape))
        engine.run()
        assert refused.error is not None
        assert served.done
        assert served.error is None
        engine.assert_empty()


def test_an_unknown_adapter_rejects_one_request() -> None:
    adapter = LoraAdapter(name="a", path="/adapters/a", revision="1", rank=8)
    with Inline(loras=(adapter,)) as engine:
        refused = engine.submit(request(lora="a@2"))
        plain, adapted = engine.submit(request()), engine.submit(request(lora="a@1"))
        engine.run()
        assert isinstance(refused.error, InvalidRequest)
        assert plain.tokens != adapted.tokens
        engine.assert_empty()


def test_an_unknown_adapter_is_found_before_a_peer_computes_anything() -> None:
    """Later, looking for its cached blocks would end the core."""
    with Inline() as engine:
        with pytest.raises(InvalidRequest, match="no LoRA adapter"):
            engine.vllm_core.check_submission(request(lora="unknown"))
        engine.vllm_core.check_submission(request())


def test_an_exception_of_a_step_ends_the_core() -> None:
    with Inline() as engine:
        engine.submit(request())

        def fail() -> None:
            raise RuntimeError("a step failed")

        engine.vllm.before_step = fail
        with pytest.raises(RuntimeError, match="a step failed"):
            engine.step()


def test_a_step_that_a_dead_worker_ends_names_it() -> None:
    with Inline() as engine:
        engine.submit(request())

        def fail() -> None:
            engine.vllm.model_executor.is_failed = True
            raise RuntimeError("cancelled")

        engine.vllm.before_step = fail
        with pytest.raises(EngineDied, match="worker process"):
            engine.step()


def test_a_worker_process_that_dies_ends_the_core() -> None:
    """vLLM tells so from a thread of its own."""
    with Inline() as engine:
        engine.submit(request())
        woken = threading.Event()
        core = engine.vllm_core
        core.wake = woken.set
        thread = threading.Thread(target=fake_vllm.InprocClient.last.fail)
        thread.start()
        thread.join()
        assert woken.is_set()
        assert core.has_work
        engine.step()
        assert isinstance(engine.failure, EngineDied)


def test_events_are_flushed_in_each_step_once_the_workers_have_it() -> None:
    with Inline() as engine:
        happened: list[str] = []
        engine.vllm.on_execute = lambda: happened.append("given")
        engine.vllm_core.flush_events = lambda: happened.append("flushed")
        ledger = engine.submit(request(max_tokens=3))
        engine.run()
        assert ledger.done
        assert happened == ["given", "flushed"] * (len(happened) // 2)
        assert len(happened) >= 6


def test_a_step_that_the_workers_do_not_get_flushes_nothing() -> None:
    with Inline() as engine:
        engine.submit(request())

        def fail() -> None:
            raise RuntimeError("Executor failed.")

        flushed: list[bool] = []
        engine.vllm_core.flush_events = lambda: flushed.append(True)
        engine.vllm.on_execute = fail
        with pytest.raises(RuntimeError, match="failed"):
            engine.step()
        assert not flushed


def test_closing_ends_vllm_and_drops_what_runs() -> None:
    with Inline() as engine:
        engine.submit(request(max_tokens=50, n=2))
        engine.step()
    assert engine.vllm.ended


def test_held_prefixes_are_given_up_for_a_request_that_nothing_else_would_let_begin() -> None:
    """It needs all blocks, some are held, and what would let them go stands behind it."""
    with Inline(block_size=16, options={"num_blocks": "9"}, max_model_len=128) as engine:
        pool = engine.vllm.scheduler.pool
        held = [pool.allocate() for _ in range(2)]
        given: list[int] = []

        def give_up() -> int:
            pool.release(held)
            given.extend(held)
            return len(held)

        holds = SimpleNamespace(give_up=give_up)
        engine.vllm_core._staged = SimpleNamespace(holds=holds, events=list)  # type: ignore[assignment]
        ledger = engine.submit(request(tuple(range(5, 115)), max_tokens=4))
        engine.step()
        assert not given, "nothing is given up while something runs"
        engine.run()
        assert given == held
        assert ledger.done
        assert ledger.error is None
        engine.assert_empty()


# ------------------------------------------------------------------ limits


def test_more_than_may_wait_are_refused() -> None:
    with Inline(max_sequences=2, max_waiting=3) as engine:
        taken = [engine.submit(request(n=n)) for n in (2, 3)]
        refused = engine.submit(request())
        engine.step()
        assert isinstance(refused.error, Overloaded)
        assert engine.inside <= {"1.0", "1.1", "2.0", "2.1", "2.2"}
        engine.run()
        assert all(ledger.done and ledger.error is None for ledger in taken)
        assert engine.submit(request()).error is None
        engine.run()
        engine.assert_empty()


def test_the_most_urgent_request_is_first() -> None:
    with Inline(max_sequences=1) as engine:
        low, high = engine.submit(request(priority=-1)), engine.submit(request(priority=1))
        engine.submit(request(priority=0))
        for _ in range(4):
            engine.step()
        assert (high.done, low.done) == (True, False)
        engine.run()


def test_nothing_is_kept_of_ten_thousand_requests() -> None:
    """Ended by themselves, aborted early and late, refused, faulty and continued."""
    with Inline() as engine:
        for number in range(2500):
            prompt = (number % 50 + 4, number % 7 + 4, number % 3 + 4)
            engine.submit(request(prompt, max_tokens=2, stop_token_ids=(number % 99,)))
            aborted = engine.submit(request(prompt, n=2, max_tokens=9))
            engine.submit(request(prompt, logit_bias={5000: 1.0}))
            engine.submit(request(prompt, output=[[5, 6]], max_tokens=3))
            for _ in range(number % 3):
                engine.step()
            if not aborted.done:
                engine.abort(aborted)
            if number % 50 == 0:
                engine.run()
        engine.run()
        assert len(engine.ledgers) == 10_000
        assert all(ledger.done for ledger in engine.ledgers.values())
        engine.assert_empty()
        names = engine.vllm_core._names
        assert names is not None
        assert len(names) <= fake_vllm.BLOCKS


# ------------------------------------------------------------------ blocks


def hear(router: Router, events: list[Event]) -> None:
    for event in events:
        if isinstance(event, KvEvents):
            router.hear(event.events)


def test_routers_know_the_pool_after_evictions_and_preemptions() -> None:
    router = Router()
    with Inline(options={"num_blocks": "20"}) as engine:
        for number in range(60):
            prompt = tuple((number * 7 + i) % 13 + 4 for i in range(number % 30 + 3))
            engine.submit(request(prompt, max_tokens=number % 20 + 1, priority=number % 3))
            hear(router, engine.step())
        for _ in range(5000):
            if not engine.core.has_work:
                break
            hear(router, engine.step())
        assert engine.stats().preemptions > 0
        cached = engine.vllm.scheduler.pool.cached_block_hash_to_block
        assert len(router.device) == len(cached) > 0
        engine.assert_empty()


def test_statistics_count_vllms_blocks() -> None:
    with Inline() as engine:
        engine.submit(request(tuple(range(4, 30)), max_tokens=30))
        engine.step()
        stats = engine.stats()
        assert (stats.blocks_used, stats.blocks_total) == (7, fake_vllm.BLOCKS - 1)
        assert stats.blocks_used + stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert stats.kv_tokens == 26
        engine.run()
        stats = engine.stats()
        assert (stats.blocks_used, stats.blocks_cached) == (0, 13)
        assert (stats.prompt_tokens, stats.computed_tokens) == (26, 55)


def test_a_cache_that_is_cleared_is_told_at_once() -> None:
    """An engine at rest makes no step, which would bring vLLM's own event."""
    with Inline() as engine:
        engine.submit(request(tuple(range(4, 30))))
        engine.run()
        assert any(isinstance(event, BlockStored) for event in engine.kv_events)
        engine.core.handle(ClearCache())
        engine.run()
        assert engine.kv_events[-1] == PoolCleared("device")
        assert engine.stats().blocks_cached == 0


def test_a_cache_in_use_stays_and_nothing_is_told() -> None:
    with Inline() as engine:
        engine.submit(request(tuple(range(4, 30)), max_tokens=9))
        engine.step()
        engine.core.handle(ClearCache())
        engine.run()
        assert not any(isinstance(event, PoolCleared) for event in engine.kv_events)


@pytest.mark.parametrize("busy", [False, True])
def test_a_new_secret_makes_new_names(busy: bool) -> None:
    router = Router()
    prompt = tuple(range(4, 30))
    with Inline() as engine:
        engine.submit(request(prompt, max_tokens=20))
        if not busy:
            engine.run()
        engine.step()
        engine.core.handle(SetHashSecret(hash_secret=b"another"))
        engine.run()
        router.hear(engine.kv_events)
        assert router.device == set()
        again = engine.submit(request(prompt))
        engine.run()
        assert again.finishes[0] is not None
        assert again.finishes[0].cached_tokens == 0, "old blocks are not found under the new name"
        router = Router()
        router.hear(engine.kv_events)
        assert len(router.device) == 7


def test_without_a_prefix_cache_there_are_no_events() -> None:
    with Inline(prefix_cache=False) as engine:
        assert not engine.capabilities.kv_events
        for _ in range(2):
            ledger = engine.submit(request(tuple(range(4, 30))))
            engine.run()
            assert ledger.finishes[0] is not None
            assert ledger.finishes[0].cached_tokens == 0
        assert engine.kv_events == []


# ------------------------------------------------------------------ waiting


@contextlib.contextmanager
def grammars_wait(engine: Inline) -> Iterator[threading.Event]:
    """No grammar is compiled until the event is set."""
    hold = threading.Event()
    engine.vllm.structured_output_manager.executor.submit(hold.wait)
    try:
        yield hold
    finally:
        hold.set()


def test_a_step_that_computes_nothing_pauses() -> None:
    """Requests that wait for a grammar must not make the core spin."""
    with Inline() as engine, grammars_wait(engine) as hold:
        ledger = engine.submit(request(grammar='start: "1"', eos_token_ids=(3,), ignore_eos=False))
        assert engine.core.has_work
        engine.step()
        assert not engine.core.has_work
        due = engine.core.wake_at()
        assert due is not None
        assert 0 < due - engine.clock.now() <= 0.01
        hold.set()
        engine.run()
        assert ledger.done
        engine.assert_empty()


def test_a_new_request_ends_the_pause() -> None:
    with Inline() as engine, grammars_wait(engine) as hold:
        engine.submit(request(grammar='start: "1"', eos_token_ids=(3,), ignore_eos=False))
        engine.step()
        other = engine.submit(request())
        assert engine.core.has_work
        engine.step()
        assert other.tokens[0]
        hold.set()
        engine.run()
