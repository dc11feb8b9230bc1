"""Prompts handed over between sim engines: in simulated time, with and without content."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.messages.engine import (
    EngineSpec,
    OpenAttemptBlocks,
    PrefillForPeer,
    SubmitRemote,
    TransferSpec,
)
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.sim.executor import SimExecutor
from tests.support.disagg_pair import DisaggPair, make_pair

if TYPE_CHECKING:
    from pdserve.clock import ManualClock
    from pdserve.engine_core.executor import Executor
    from pdserve.engine_core.kit import Core
    from pdserve.testing.fake_mover import FakeMover

BLOCK = 8


def make_core(executor: Executor, clock: ManualClock, mover: FakeMover) -> Core:
    assert isinstance(executor, SimExecutor)
    return executor.make_core(clock, mover)


def pair(**options: str) -> DisaggPair:
    spec = EngineSpec(
        engine="sim",
        model="",
        block_size=BLOCK,
        max_batch_tokens=32,
        max_sequences=8,
        hash_secret=b"secret",
        options={"vocab": "300", "blocks": "80", "max_len": "200"} | options,
        transfer=TransferSpec(verify="all"),
    )
    return make_pair(SimExecutor, spec, core=make_core)


def request(length: int, seed: int = 0, **changes: Any) -> GenerateRequest:
    fields = SamplingParams.__struct_fields__
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(random.Random(seed).choices(range(4, 300), k=length)),
        sampling=SamplingParams(**({"max_tokens": 12, "temperature": 0.0} | sampling)),
        **changes,
    )


@pytest.mark.parametrize("options", [{"content": "on"}, {}, {"steps_at_once": "16"}], ids=str)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 40, 65])
@pytest.mark.parametrize("changes", [{}, {"n": 3, "temperature": 1.0, "seed": 1}], ids=str)
def test_the_tokens_are_those_of_one_engine(
    options: dict[str, str], length: int, changes: dict[str, Any]
):
    both = pair(**options)
    wanted = request(length, **changes)
    (ledger,) = both.generate([wanted])
    stats = both.d.stats
    assert stats.computed_tokens == wanted.n * 11
    assert stats.received_tokens == length
    assert stats.received_blocks == -(-length // BLOCK)
    alone = both.d.engine.submit(wanted)
    both.run()
    assert ledger.tokens == alone.tokens
    both.close()


def test_a_changed_byte_changes_the_answer_of_an_engine_with_content():
    both = pair(content="on")
    both.net.faults = ["corrupt"]
    both.submit(request(60))
    both.run()
    assert [event.kind for event in both.lost] == ["TransferCorrupt"]
    both.close()


def test_what_moves_during_many_steps_at_once_is_taken_in_at_the_end_of_one(seed: int):
    """Times, tokens and counters are those of single steps."""
    results = []
    for steps in ("1", "64"):
        both = pair(steps_at_once=steps)
        both.d.engine.submit(request(20, 1, max_tokens=150))
        both.d.engine.submit(request(20, 2, max_tokens=90))
        wanted = [request(40, n, max_tokens=30) for n in range(3, 6)]
        ledgers = both.generate(wanted, random.Random(seed))
        both.run()
        assert both.d.stats.received_tokens == 120
        results.append([ledger.tokens for ledger in [*ledgers, *both.d.engine.ledgers.values()]])
        both.close()
    assert results[0] == results[1]


def test_commands_of_a_handover_during_a_flight_are_not_lost():
    both = pair()
    core, engine = both.d.core, both.d.engine
    engine.submit(request(30, 1))
    engine.step()
    assert core.wake_at() is not None
    handle, _ = both.submit(request(20))
    core.handle(OpenAttemptBlocks(handle, 1, "p", 1))
    engine.step()
    assert both.admitted == {}
    both.run()
    # It was opened before there was room: so nobody had asked for it, and it can be asked for now.
    both.open(handle)
    both.run()
    assert both.d.stats.received_tokens == 20
    both.close()


def test_a_core_that_is_closed_in_flight_leaves_nothing():
    both = pair(content="on")
    both.submit(request(30))
    for _ in range(6):
        both.turn()
    both.p.core.handle(SubmitRemote(77, request(10)))
    both.p.core.handle(PrefillForPeer(78, request(10), both.opened[1].ticket, "d", 1))
    both.close()
