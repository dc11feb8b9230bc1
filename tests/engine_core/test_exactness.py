"""However the scheduler batches, chunks, preempts, reuses and forks: the tokens are the same.

The scripted executor's tokens depend on the bytes in the blocks, so each mistake in a block table
changes them; that it does is shown by planting such mistakes.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pdserve.engine_core.scheduler.scheduler import Scheduler
from pdserve.kv.block_pool import BlockPool
from pdserve.messages.engine import EngineSpec
from pdserve.testing.exactness import (
    SCENARIOS,
    Scenario,
    continued_requests,
    mixed_requests,
    solo_outputs,
)
from pdserve.testing.scripted import ENGINE, ScriptedExecutor, reference_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.scheduler.sequence import Sequence

SPEC = EngineSpec(
    engine=ENGINE, model="", block_size=4, max_model_len=96, options={"blocks": "400"}
)
VOCAB = range(3, 97)


def reference(requests):
    return [[reference_tokens(r, c, max_len=96) for c in range(r.n)] for r in requests]


def test_the_solo_run_is_what_the_script_says(seed: int):
    requests = mixed_requests(random.Random(seed), VOCAB)
    assert solo_outputs(ScriptedExecutor, SPEC, requests) == reference(requests)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scheduling_never_shows_in_the_tokens(scenario: Scenario, seed: int, long: bool):
    rng = random.Random(seed)
    for _ in range(30 if long else 3):
        requests = mixed_requests(rng, VOCAB)
        assert scenario.outputs(ScriptedExecutor, SPEC, requests) == reference(requests)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_was_broken_off_goes_on_as_if_nothing_had_happened(
    scenario: Scenario, seed: int, long: bool
):
    rng = random.Random(seed)
    for _ in range(30 if long else 3):
        requests = mixed_requests(rng, VOCAB)
        whole = reference(requests)
        parts = continued_requests(rng, requests, whole)
        assert scenario.outputs(ScriptedExecutor, SPEC, parts, prove=False) == whole


# ------------------------------------------------------------------ planted mistakes


def a_missed_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_plan_copies", lambda self, plan: None)


def a_shared_partial_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child writes into the stem's block instead of a copy."""
    share = Scheduler._share

    def shared(self: Scheduler, stem: Sequence, child: Sequence) -> bool:
        done = share(self, stem, child)
        if done:
            index = (stem.prompt_len - 1) // self._pool.block_size
            child.blocks[index] = stem.blocks[index]
        return done

    monkeypatch.setattr(Scheduler, "_share", shared)


def a_stale_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash survives its block's eviction."""
    forget = BlockPool._forget

    def keep(self: BlockPool, block: int) -> bytes:
        name = forget(self, block)
        self._by_hash[name] = block
        return name

    monkeypatch.setattr(BlockPool, "_forget", keep)
    monkeypatch.setattr(BlockPool, "check", lambda self: None)

    def acquire(self: BlockPool, blocks: list[int]) -> None:
        for block in blocks:
            self._cached.pop(block, None)
            if block in self._free:
                self._free.remove(block)
            self._refs[block] += 1

    monkeypatch.setattr(BlockPool, "acquire", acquire)


def a_hit_one_token_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix hit claims a token of the block after it."""
    place = Scheduler._place

    def too_long(self: Scheduler, sequence: Sequence) -> bool:
        done = place(self, sequence)
        if done and 0 < sequence.num_computed < len(sequence.tokens) - 1:
            sequence.num_computed += 1
        return done

    monkeypatch.setattr(Scheduler, "_place", too_long)


def a_table_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = Scheduler._grow

    def swapped(self: Scheduler, sequence: Sequence) -> bool:
        done = grow(self, sequence)
        if done and len(sequence.blocks) > 2:
            sequence.blocks[0], sequence.blocks[1] = sequence.blocks[1], sequence.blocks[0]
        return done

    monkeypatch.setattr(Scheduler, "_grow", swapped)


def a_resume_without_recomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted sequence gets fresh blocks and pretends that they are filled."""
    place = Scheduler._place

    def pretend(self: Scheduler, sequence: Sequence) -> bool:
        done = place(self, sequence)
        if done and sequence.preemptions:
            sequence.num_computed = len(sequence.tokens) - 1
        return done

    monkeypatch.setattr(Scheduler, "_place", pretend)


def salts_that_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks found under a wrong name: hashes without their position in the chain."""
    from pdserve.engine_core.scheduler import block_hasher

    def unchained(tokens: list[int], size: int, *, parent: bytes, secret: bytes) -> list[bytes]:
        del parent, secret
        full = len(tokens) // size * size
        return [bytes(tokens[i : i + size]) for i in range(0, full, size)]

    monkeypatch.setattr(block_hasher, "block_hashes", unchained)


@pytest.mark.parametrize(
    "plant",
    [
        a_missed_copy,
        a_shared_partial_block,
        a_stale_prefix,
        a_hit_one_token_too_long,
        a_table_out_of_order,
        a_resume_without_recomputing,
        salts_that_are_ignored,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_mistake_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    requests = mixed_requests(random.Random(7), VOCAB, count=20)
    expected = reference(requests)
    plant(monkeypatch)
    for scenario in SCENARIOS:
        try:
            if scenario.outputs(ScriptedExecutor, SPEC, requests) != expected:
                return
        except Exception:  # the pool or the ledger noticed before the tokens did
            return
    pytest.fail("the mistake went unnoticed")
