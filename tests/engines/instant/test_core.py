"""The instant core by hand: what it honours, and when each token is due."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.clock import ManualClock
from pdserve.errors import DeadlineExceeded, Overloaded
from pdserve.messages.engine import EngineSpec, StepOutput, Submit
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.inline_engine import InlineEngine
from pdserve.token_ids import token_ids
from pdserve.wire.length_prefixed import encode_frames
from pdserve_engines.instant import InstantCore
from tests.conformance.test_engines import write_model

if TYPE_CHECKING:
    from pathlib import Path

CYCLE = (4, 5, 6)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make(tmp_path: Path, clock: ManualClock):
    write_model(tmp_path)

    def make(core: InstantCore | None = None, **options: str) -> InlineEngine:
        options = {"tokens": "4,5,6"} | options
        spec = EngineSpec(engine="instant", model=str(tmp_path), options=options)
        spec = msgspec.structs.replace(spec, max_sequences=64, max_waiting=64)
        return InlineEngine(core or InstantCore(clock), spec)

    return make


def request(**changes: Any) -> GenerateRequest:
    fields = SamplingParams.__struct_fields__
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([1, 2]),
        sampling=SamplingParams(**({"max_tokens": 7} | sampling)),
        **changes,
    )


def test_tokens_cycle_one_per_delta(make):
    engine = make()
    ledger = engine.submit(request(n=2))
    engine.run()
    assert ledger.tokens == [[4, 5, 6, 4, 5, 6, 4]] * 2
    assert ledger.deltas == 14


def test_streams_advance_together(make):
    engine = make()
    ledgers = [engine.submit(request(max_tokens=100)) for _ in range(64)]
    engine.step()
    lengths = {len(ledger.tokens[0]) for ledger in ledgers}
    assert len(lengths) == 1
    assert lengths != {100}


@pytest.mark.parametrize(
    ("sampling", "given", "expected"),
    [
        ({"stop_token_ids": (6,)}, [], ("stop", 6, 3)),
        ({"stop_token_ids": (6,), "min_tokens": 3}, [], ("stop", 6, 6)),
        ({"eos_token_ids": (5,)}, [], ("stop", None, 2)),
        ({"eos_token_ids": (5,), "ignore_eos": True}, [], ("length", None, 7)),
        ({"stop_token_ids": (9,)}, [], ("length", None, 7)),
        ({"stop_token_ids": (6,)}, [4, 5], ("stop", 6, 3)),
        ({"stop_token_ids": (6,)}, [4, 5, 6], ("stop", 6, 3)),
        ({}, [4] * 7, ("length", None, 7)),
        ({"max_tokens": 1000}, [], ("length", None, 118)),
        ({"stop_token_ids": (6,), "min_tokens": 40, "max_tokens": 60}, [], ("stop", 6, 42)),
    ],
)
def test_ends_are_honoured(make, sampling, given, expected):
    engine = make()
    ledger = engine.submit(request(**sampling, output=[given] if given else []))
    engine.run()
    finish = ledger.finishes[0]
    assert (finish.reason, finish.stop_reason, finish.completion_tokens) == expected


def test_every_token_has_its_own_due_time(make, clock):
    engine = make(tokens_per_second="10", ttft_ms="500")
    ledgers = [engine.submit(request(max_tokens=4)) for _ in range(3)]
    assert not engine.core.has_work
    times = []
    while (due := engine.core.wake_at()) is not None:
        clock.advance(due - clock.now())
        deltas = [d for e in engine.step() if isinstance(e, StepOutput) for d in e.deltas]
        assert len(deltas) == 1, "streams are not staggered"
        times.append((clock.now(), deltas[0].handle))
    for handle in (1, 2, 3):
        own = [at for at, whose in times if whose == handle]
        assert 0.5 <= own[0] < 0.6
        assert [b - a for a, b in itertools.pairwise(own)] == pytest.approx([0.1] * 3)
    assert all(ledger.done for ledger in ledgers)


def test_a_core_that_fell_behind_catches_up_without_losing_tokens(make, clock):
    engine = make(tokens_per_second="1000")
    ledgers = [engine.submit(request(max_tokens=100)) for _ in range(60)]
    clock.advance(10.0)
    steps = 0
    while not all(ledger.done for ledger in ledgers):
        engine.step()
        steps += 1
    assert 1 < steps < 10
    assert all(len(ledger.tokens[0]) == 100 for ledger in ledgers)


def test_only_the_first_token_waits_when_there_is_no_pace(make, clock):
    engine = make(ttft_ms="200")
    ledger = engine.submit(request())
    assert engine.core.wake_at() == pytest.approx(0.2)
    clock.advance(0.2)
    engine.step()
    assert ledger.done
    assert ledger.finishes[0].prefill_seconds == pytest.approx(0.2)


def test_a_deadline_ends_a_slow_stream(make, clock):
    engine = make(tokens_per_second="1")
    ledger = engine.submit(request(deadline=2.5))
    while not ledger.done:
        clock.advance(engine.core.wake_at() - clock.now())
        engine.step()
    assert isinstance(ledger.error, DeadlineExceeded)
    assert len(ledger.tokens[0]) in (2, 3)
    assert engine.core.wake_at() is None or engine.core.wake_at() > 2.5


@pytest.mark.parametrize("options", [{}, {"tokens_per_second": "1"}])
def test_aborted_streams_do_not_pile_up(make, clock, options):
    engine = make(**options)
    for _ in range(3000):
        engine.abort(engine.submit(request(max_tokens=100)))
    core = engine.core
    assert len(core._due) + len(core._ready) < 1500
    assert core.sequences == 0
    survivor = engine.submit(request(max_tokens=3))
    while not survivor.done:
        clock.advance(1.0)
        engine.step()
    assert len(core._due) + len(core._ready) < 1500
    assert engine.close() == 0


def test_streams_are_bounded(make):
    engine = make()
    for _ in range(128):
        engine.submit(request(max_tokens=100))
    refused = engine.submit(request())
    engine.step()
    assert isinstance(refused.error, Overloaded)


def test_made_up_logprobs_are_plausible(make):
    engine = make()
    ledger = engine.submit(request(logprobs=2, prompt_logprobs=0, max_tokens=3))
    engine.run()
    assert next((p.token, p.rank, p.top) for p in ledger.logprobs[0]) == (
        4,
        1,
        [(4, -0.25), (5, -1.25)],
    )
    assert ledger.prompt_logprobs[0][0].token == 2


def test_it_is_far_from_being_the_bottleneck(make, tmp_path):
    """Encoded and framed; the limit is what a whole frontend must reach, with room to spare."""
    engine = make(InstantCore(ManualClock()))
    core, encode = engine.core, msgspec.msgpack.Encoder().encode
    for handle in range(64):
        core.handle(Submit(handle=handle, request=request(max_tokens=118)))
    started, count = time.process_time(), 0
    while core.has_work:
        events = core.step()
        encode_frames(map(encode, events))
        count += sum(len(event.deltas) for event in events if isinstance(event, StepOutput))
    assert count == 64 * 118
    assert count / (time.process_time() - started) > 150_000  # several times that when quiet
