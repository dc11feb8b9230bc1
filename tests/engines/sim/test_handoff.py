"""Prompts handed over between sim engines: in simulated time, with and without content."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import pytest

from pdserve.clock import SystemClock
from pdserve.engine_core.kv_transfer import checksums
from pdserve.errors import ConfigError
from pdserve.messages.engine import (
    EngineSpec,
    OpenAttemptBlocks,
    PrefillForPeer,
    SubmitRemote,
    TransferSpec,
)
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.tiers import TierSpec
from pdserve.token_ids import token_ids
from pdserve_engines.sim.executor import SimExecutor
from pdserve_engines.sim.settings import SimOptions, read_model
from pdserve_engines.sim.tokens import reference_tokens
from tests.support.disagg_pair import DisaggPair, make_pair
from tests.support.handoff_pair import HandoffPair

if TYPE_CHECKING:
    from pdserve.clock import ManualClock
    from pdserve.engine_core.core import EngineCore
    from pdserve.engine_core.executor import Executor
    from pdserve.engine_core.kit import Core
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.testing.fake_mover import FakeMover

BLOCK = 8


def make_core(executor: Executor, clock: ManualClock, mover: FakeMover) -> Core:
    assert isinstance(executor, SimExecutor)
    return executor.make_core(clock, mover)


def engine_spec(ranks: int = 1, /, **options: str) -> EngineSpec:
    return EngineSpec(
        engine="sim",
        model="",
        block_size=BLOCK,
        max_batch_tokens=32,
        max_sequences=8,
        hash_secret=b"secret",
        options={"vocab": "300", "blocks": "80", "max_len": "200"} | options,
        transfer=TransferSpec(verify="all"),
        tensor_parallel=ranks,
    )


def pair(p: int = 1, d: int = 1, /, **options: str) -> DisaggPair:
    """`p`, `d`: ranks of the prefill and of the decode engine."""
    return make_pair(
        SimExecutor,
        engine_spec(**options),
        p={"tensor_parallel": p},
        d={"tensor_parallel": d},
        core=make_core,
    )


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


# ------------------------------------------------------------------ unequal tensor-parallel sizes


SIZES = [
    *((6, p, d) for p, d in ((1, 2), (2, 1), (3, 2), (2, 3))),
    *((4, p, d) for p, d in ((4, 2), (4, 1))),
    *((1, p, d) for p, d in ((4, 2), (4, 1), (2, 3))),
]
"""KV heads, ranks of the prefill and of the decode engine. With one KV head all ranks hold it."""


@pytest.mark.parametrize(("kv_heads", "p", "d"), SIZES)
def test_unequal_sizes_give_the_tokens_of_one_engine(kv_heads: int, p: int, d: int):
    both = pair(p, d, content="on", kv_heads=str(kv_heads))
    for length in (1, 8, 21):
        wanted = request(length, length, n=2, temperature=1.0)
        (ledger,) = both.generate([wanted])
        assert ledger.tokens == [reference(wanted, choice) for choice in (0, 1)]
    stats = both.d.stats
    assert stats.computed_tokens == 3 * 2 * 11
    assert stats.received_tokens == 1 + 8 + 21
    assert stats.received_bytes == both.net.bytes_applied == both.p.stats.sent_bytes
    assert stats.received_bytes == stats.received_blocks * both.d.mover.region.block_bytes
    both.close()


def reference(wanted: GenerateRequest, choice: int) -> list[int]:
    vocabulary = read_model(engine_spec(), SimOptions(vocab=300, max_len=200))
    return reference_tokens(wanted, vocabulary, choice, content=True)


def test_a_slice_that_goes_to_the_wrong_rank_changes_the_answer():
    """Checksums would find it, too; without them the tokens do."""
    both = pair(2, 2, content="on", kv_heads="4")
    region = both.d.mover.region
    first, second = region.ranks
    swapped = (replace(first, view=second.view), replace(second, view=first.view))
    both.d.mover.region = replace(region, ranks=swapped)
    wanted = request(20)
    with mock.patch.object(checksums, "checked_places", return_value=frozenset()):
        both.submit(wanted)
        both.run()
    (ledger,) = both.d.engine.ledgers.values()
    assert ledger.tokens != [reference(wanted, 0)]
    both.close()


def real_core(mover: KvConnector) -> EngineCore:
    return SimExecutor().make_core(SystemClock(), mover)


@pytest.mark.parametrize(("kv_heads", "p", "d"), [(6, 2, 3)])
def test_unequal_sizes_over_shared_memory(kv_heads: int, p: int, d: int):
    """Each rank of the receiver has the sender's bytes of its own heads."""
    options = {"content": "on", "kv_heads": str(kv_heads), "slowdown": "0"}
    sides = {"p": engine_spec(p, **options), "d": engine_spec(d, **options)}
    both = HandoffPair("shm", real_core, sides)
    wanted = [request(length, length) for length in (3, 40, 65)]
    try:
        assert both.hand_over(wanted) == [[reference(one, 0)] for one in wanted]
    finally:
        both.close()


@pytest.mark.parametrize(
    ("ranks", "options", "reason"),
    [
        (2, {"content": "on"}, "--tp 2: engine sim divides only KV heads; give .* kv_heads=N"),
        (1, {"kv_heads": "2"}, "kv_heads=2: only blocks with content have heads"),
        (4, {"content": "on", "kv_heads": "6"}, "--tp 4 with kv_heads=6: 6 heads cannot"),
        (1, {"content": "on", "kv_heads": "20000"}, "kv_heads=20000: must be at most"),
    ],
)
def test_sizes_that_are_not_possible_are_refused(ranks: int, options: dict[str, str], reason: str):
    with pytest.raises(ConfigError, match=reason):
        SimExecutor().load(engine_spec(ranks, **options), lambda *_: None)


def test_tiers_are_refused_with_ranks():
    spec = msgspec.structs.replace(
        engine_spec(2, content="on", kv_heads="2"), tiers=TierSpec(host_bytes=1 << 20)
    )
    with pytest.raises(ConfigError, match="--tp 2: KV tiers work with one rank only"):
        SimExecutor().load(spec, lambda *_: None)
