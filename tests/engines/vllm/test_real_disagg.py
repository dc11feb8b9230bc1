"""Two cores with the real vLLM: one computes prompts, the other one decodes them.

Answers are compared with those of one engine alone. vLLM's own counters say that the decoding
engine has computed one token of each prompt. Bytes go through a `FakeMover`; tests/e2e/vllm has the
transports.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.clock import SystemClock
from pdserve.errors import ConfigError, InvalidRequest
from pdserve.messages.engine import Abort, PrefillLocally, TransferSpec
from pdserve.testing.fake_mover import FakeMover, FakeNet
from pdserve_engines.vllm.core import VllmCore
from tests.engines.vllm import real
from tests.engines.vllm.real_pair import BLOCK, D, P, RealPair, alone, asked, make_pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.messages.request import FirstTokenStats, GenerateRequest
    from pdserve.testing.output_checker import OutputChecker

real.require_vllm()
pytestmark = real.MARKS

engines_of_this_file = real.keeps(P, D)


@pytest.fixture
def both() -> Iterator[RealPair]:
    pair = make_pair(P, D)
    yield pair
    pair.close()


def started(ledger: OutputChecker) -> FirstTokenStats:
    """How the first choice came to its first token."""
    assert ledger.starts[0] is not None
    return ledger.starts[0]


def opened(both: RealPair, request: GenerateRequest) -> tuple[int, Any]:
    """A request whose attempt P may fill."""
    handle, ledger = both.submit(request)
    both.step_d()
    both.open(handle)
    both.net.run()
    both.step_d()
    return handle, ledger


def prefilled(both: RealPair, request: GenerateRequest) -> tuple[int, Any, int]:
    """The same, computed by P, and its parts under way."""
    handle, ledger = opened(both, request)
    mine = both.prefill(both.opened[handle])
    while handle not in both.handoffs:
        both.step_p()
    return handle, ledger, mine


# ------------------------------------------------------------------ the plain course


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 128, 150])
def test_answers_are_those_of_one_engine(both: RealPair, length: int):
    wanted = asked(length)
    before = both.d.stats
    (ledger,) = both.generate([wanted])
    stats = both.d.stats
    assert stats.computed_tokens - before.computed_tokens == 1 + len(ledger.tokens[0]) - 1
    assert both.p.stats.computed_tokens == length
    blocks = -(-length // BLOCK)
    assert stats.received_blocks == both.p.stats.sent_blocks == blocks
    assert stats.received_bytes == blocks * both.d.engine.capabilities.block_bytes
    assert stats.received_bytes == both.net.bytes_applied == both.p.stats.sent_bytes
    assert (stats.received_tokens, stats.cached_tokens) == (length, 0)
    assert started(ledger).received_tokens == length
    assert ledger.tokens == alone(both, wanted)


def test_many_prompts_at_once(both: RealPair):
    wanted = [asked(length, seed=length) for length in (20, 40, 70, 100, 130, 33)]
    ledgers = both.generate(wanted)
    assert both.d.stats.computed_tokens == sum(len(ledger.tokens[0]) for ledger in ledgers)
    assert [ledger.tokens for ledger in ledgers] == [alone(both, one) for one in wanted]


@pytest.mark.parametrize("cached_p", [0, 32, 96])
@pytest.mark.parametrize("cached_d", [0, 32, 96])
def test_prefixes_that_either_end_has_change_nothing(both: RealPair, cached_p: int, cached_d: int):
    """What D has is not sent, what P has is not computed but copied from its cache."""
    wanted = asked(110)
    reference = alone(both, wanted)
    for end, cached in ((both.p, cached_p), (both.d, cached_d)):
        if cached:
            # A block is found only if a token follows it.
            end.engine.generate([real.request(wanted.prompt[: cached + 1], max_tokens=1)])
    before_p, before_d = both.p.stats, both.d.stats
    (ledger,) = both.generate([wanted])
    assert ledger.tokens == reference
    assert both.p.stats.computed_tokens - before_p.computed_tokens == 110 - cached_p
    assert both.d.stats.computed_tokens - before_d.computed_tokens == len(ledger.tokens[0])
    assert both.d.stats.received_blocks == 4 - cached_d // BLOCK
    assert started(ledger).cached_tokens == cached_d
    assert both.d.stats.cached_tokens - before_d.cached_tokens == cached_d


def test_a_held_prefix_is_not_evicted(both: RealPair):
    wanted = asked(110)
    reference = alone(both, wanted)
    both.d.engine.generate([real.request(wanted.prompt[:97], max_tokens=1)])
    handle, ledger = opened(both, wanted)
    assert both.opened[handle].ticket.first_token == 96
    others = [asked(150, seed=seed, max_tokens=30) for seed in range(10)]
    both.d.engine.generate(others)  # 40 blocks hold 8 of them
    both.prefill(both.opened[handle])
    before = both.d.stats.computed_tokens
    both.run()
    assert ledger.tokens == reference
    assert both.d.stats.computed_tokens - before == len(ledger.tokens[0])
    assert both.d.stats.received_blocks == 1


def test_blocks_that_came_from_p_are_reused_and_announced(both: RealPair):
    both.generate([asked(100, max_tokens=1)])
    stored = [name for event in both.d.engine.kv_events for name in getattr(event, "hashes", ())]
    assert len(stored) == 3
    before = both.d.stats
    (ledger,) = [both.d.engine.submit(asked(100, max_tokens=2))]
    both.d.engine.run()
    assert both.d.stats.cached_tokens - before.cached_tokens == 96
    assert started(ledger).cached_tokens == 96


def test_choices_share_what_was_loaded(both: RealPair):
    # One chunk: on CPUs vLLM cannot compute a seeded prompt in several.
    wanted = asked(60, n=3, temperature=0.9, seed=11)
    (ledger,) = both.generate([wanted])
    assert ledger.tokens == alone(both, wanted)
    assert both.d.stats.received_blocks == 2


def test_output_of_an_earlier_attempt_is_prefilled_too(both: RealPair):
    whole = alone(both, asked(60, max_tokens=12))[0]
    wanted = asked(60, max_tokens=12, output=[whole[:7]])
    before = both.d.stats.computed_tokens
    (ledger,) = both.generate([wanted])
    assert ledger.tokens == [whole]
    assert both.d.stats.computed_tokens - before == 5


def test_logprobs_of_the_prompt_come_with_the_handoff(both: RealPair):
    wanted = asked(40, prompt_logprobs=1, logprobs=2)
    (ledger,) = both.generate([wanted])
    assert ledger.prompt_logprobs[0] is not None
    assert both.d.stats.computed_tokens == len(ledger.tokens[0])


# ------------------------------------------------------------------ what goes wrong


def test_a_corrupted_block_is_refused(both: RealPair):
    both.net.faults = ["corrupt"]
    handle, ledger, _ = prefilled(both, asked(100))
    both.activate(both.handoffs[handle])
    both.net.run()
    both.step_d()
    assert [one.kind for one in both.lost] == ["TransferCorrupt"]
    assert both.d.stats.computed_tokens == 0
    both.open(handle)
    both.run()
    assert ledger.tokens == alone(both, ledger.request)


def test_what_cannot_be_loaded_is_computed_by_vllm_and_counted(both: RealPair, monkeypatch):
    """The rank is told to read a staging block that does not exist."""
    handle, ledger, _ = prefilled(both, asked(100))
    planner = both.d.staging.planner
    expect = planner.expect_load

    def spoilt(key: str, blocks: Any) -> None:
        expect(key, dataclasses.replace(blocks, slots=(*blocks.slots[:2], 1 << 20, 1 << 20)))

    monkeypatch.setattr(planner, "expect_load", spoilt)
    both.activate(both.handoffs[handle])
    both.run()
    assert ledger.tokens == alone(both, ledger.request)
    assert both.d.core.transfers.admission.failed_loads == 1
    assert started(ledger).received_tokens == 0
    assert both.d.stats.received_tokens == 0


def test_an_unknown_adapter_rejects_one_remote_prompt(both: RealPair):
    _, refused = both.submit(asked(100, lora="unknown"))
    both.step_d()
    assert isinstance(refused.error, InvalidRequest)
    handle, ledger, _ = prefilled(both, asked(100))
    both.activate(both.handoffs[handle])
    both.run()
    assert ledger.tokens == alone(both, ledger.request)


def test_a_prompt_that_cannot_be_saved_fails_alone(both: RealPair, monkeypatch):
    """The rank is told to write to a staging block that does not exist."""
    planner = both.p.staging.planner
    expect = planner.expect_save

    def spoilt(key: str, blocks: Any) -> None:
        expect(key, dataclasses.replace(blocks, slots=(*blocks.slots[:2], 1 << 20, 1 << 20)))

    handle, ledger = opened(both, asked(100))
    with monkeypatch.context() as patch:
        patch.setattr(planner, "expect_save", spoilt)
        mine = both.prefill(both.opened[handle])
        while not both.refused:
            both.step_p()
    assert [(one.handle, one.kind) for one in both.refused] == [(mine, "StepFailed")]
    both.open(handle)
    both.run()
    assert ledger.tokens == alone(both, ledger.request)


@pytest.mark.parametrize("stage", ["opened", "filled"])
def test_an_abort_frees_everything(both: RealPair, stage: str):
    if stage == "opened":
        handle, ledger = opened(both, asked(100))
        both.prefill(both.opened[handle])
        both.step_p()
    else:
        handle, ledger, _ = prefilled(both, asked(100))
        both.activate(both.handoffs[handle])
        both.net.run()
    ledger.aborted = True
    both.d.core.handle(Abort(handle))
    both.run()
    assert both.d.staging.pool.blocks.counts().used == 0


def test_a_withdrawn_prompt_frees_its_staging_blocks(both: RealPair):
    handle, ledger = opened(both, asked(150))
    mine = both.prefill(both.opened[handle])
    both.step_p()
    assert both.p.staging.pool.blocks.counts().used
    both.p.core.handle(Abort(mine))
    both.run()
    assert [one.handle for one in both.sent] == [mine]
    assert both.p.staging.pool.blocks.counts().used == 0
    both.d.core.handle(PrefillLocally(handle))
    both.run()
    assert ledger.tokens == alone(both, ledger.request)


# ------------------------------------------------------------------ which workers exchange KV


def test_an_aggregated_worker_exchanges_nothing():
    """Its vLLM has no connector: it computes a moved request again."""
    spec = msgspec.structs.replace(real.MAIN, transfer=TransferSpec(optional=True))
    core = VllmCore(SystemClock())
    core.use_connector(FakeMover(FakeNet()))
    assert not core._exchanges(spec)
    with pytest.raises(ConfigError, match="aggregated"):
        core.make_staging(spec)
