"""When an attempt is filled, what it is doing, and what is wrong with a handoff."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.engine_core.kv_transfer.checksums import SAMPLE_BLOCKS, checked_places, checksum_of
from pdserve.engine_core.kv_transfer.connector import AttemptKey
from pdserve.engine_core.kv_transfer.remote_prefill import (
    FillAttempt,
    RemotePrefillState,
    handoff_fault,
)
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.handoff import FirstToken, Handoff
from pdserve.messages.request import FirstTokenStats, GenerateRequest, SamplingParams, TokenLogprob
from pdserve.testing.kv_oracle import layouts
from pdserve.token_ids import token_ids
from pdserve.transfer.base import Region
from pdserve.transfer.copy_plan import block_bytes

HANDOFF = Handoff(tokens=6, parts=2, first=(FirstToken(3),), started=FirstTokenStats(0, 0, 0, 0))


def attempt() -> FillAttempt:
    return FillAttempt(AttemptKey(1, 2), NodeLife(NodeId("p"), 7), 5.0, fresh=[4, 5])


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([1] * 6),
        sampling=SamplingParams(max_tokens=4, **sampling),
    )


def test_it_is_filled_once_the_handoff_and_all_parts_are_here_in_any_order():
    one = attempt()
    one.arrived[1] = 10
    one.handoff = HANDOFF
    assert not one.filled
    one.arrived[0] = 10
    assert one.filled
    other = attempt()
    other.arrived = {0: 1, 1: 1}
    assert not other.filled


def test_every_stage_has_words():
    remote, one = RemotePrefillState(), attempt()
    stages = [remote.stage()]
    remote.admitted = True
    stages.append(remote.stage())
    one.fresh, fresh = [], one.fresh
    remote.attempt = one
    stages.append(remote.stage())
    one.fresh = fresh
    stages.append(remote.stage())
    one.opened = True
    stages.append(remote.stage())
    assert len(set(stages)) == 5
    assert "attempt 2 by p/7" in stages[-1]


@pytest.mark.parametrize(
    ("changes", "sampling", "said"),
    [
        ({"tokens": 5}, {}, "5 tokens in KV"),
        ({"first": ()}, {}, "0 first tokens"),
        ({"first": (FirstToken(50),)}, {}, "vocabulary"),
        ({"first": (FirstToken(-1),)}, {}, "vocabulary"),
        ({}, {"logprobs": 1}, "lacks its logprobs"),
        ({}, {"prompt_logprobs": 1}, "0 prompt tokens"),
        ({"checksums": ((2, 1),)}, {}, "checksum"),
        ({"parts": 0}, {}, "0 parts"),
        ({"parts": 1}, {}, "1 parts"),
    ],
)
def test_a_handoff_that_does_not_fit_is_named(
    changes: dict[str, Any], sampling: dict[str, Any], said: str
):
    one = attempt()
    one.arrived = {0: 1, 1: 1}
    one.handoff = msgspec.structs.replace(HANDOFF, **changes)
    assert said in handoff_fault(one, request(**sampling), 6, 50)


def test_one_that_fits_has_no_fault():
    one = attempt()
    one.arrived = {0: 1, 1: 1}
    logprob = TokenLogprob(3, -1.0, 1, [])
    one.handoff = msgspec.structs.replace(
        HANDOFF,
        first=(FirstToken(3, logprob),),
        prompt_logprobs=[logprob] * 5,
        checksums=((1, 5),),
    )
    assert handoff_fault(one, request(logprobs=0, prompt_logprobs=0), 6, 50) == ""


def test_a_sample_of_blocks_is_small_and_another_for_each_attempt():
    assert checked_places("off", "r", 1, 100) == frozenset()
    assert checked_places("all", "r", 1, 100) == frozenset(range(100))
    assert checked_places("sample", "r", 1, 3) == frozenset(range(3))
    samples = [checked_places("sample", "r", attempt, 1000) for attempt in range(50)]
    assert all(0 < len(sample) <= SAMPLE_BLOCKS for sample in samples)
    assert len(set(samples)) == 50
    assert samples[0] == checked_places("sample", "r", 0, 1000)


def test_a_checksum_covers_what_counts_and_nothing_else():
    (layout,) = layouts(2, 1, layers=2, tokens=4, dim=2, itemsize=2)
    size = block_bytes(layout)
    memory = bytearray(i * 7 % 251 for i in range(3 * size))
    region = Region(layout, 3, view=memoryview(memory))
    whole, half = checksum_of(region, 1, 4), checksum_of(region, 1, 2)
    assert whole != half
    token, row = 4, 16
    for run in range(2 * 2 * 2):
        begin = size + run * row
        for at in range(row):
            memory[begin + at] ^= 1
            assert checksum_of(region, 1, 4) != whole
            assert (checksum_of(region, 1, 2) == half) == (at >= 2 * token)
            memory[begin + at] ^= 1
    memory[0] ^= 1
    memory[2 * size] ^= 1
    assert (checksum_of(region, 1, 4), checksum_of(region, 1, 2)) == (whole, half)
